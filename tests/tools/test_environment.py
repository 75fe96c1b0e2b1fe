"""The environment and flags of a process without a GPU, and that a GPU leaves both as they were."""

import os

import pytest

import tools.cpu.process_environment as module
from tools.cpu import environment, gpu_available, sglang_arguments


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(module, "_nvidia_device_present", lambda: True)


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(module, "_nvidia_device_present", lambda: False)


def test_environment_when_there_is_no_gpu_then_the_site_folder_comes_first(no_gpu):
    base = {"PYTHONPATH": "/mine", "HOME": "/home/me"}
    variables = environment("megatron", base)
    first, last = [str(module.SITE), str(module.PACKAGE_ROOT)], str(module.TRANSFORMER_ENGINE)
    assert variables["PYTHONPATH"].split(os.pathsep) == [*first, "/mine", last]
    assert environment("sglang", base)["PYTHONPATH"].split(os.pathsep) == [*first, "/mine"]
    again = environment("megatron", variables)["PYTHONPATH"]
    assert again == variables["PYTHONPATH"]
    assert (module.SITE / "sitecustomize.py").is_file() and (
        module.PACKAGE_ROOT / "megatron_rl_corr"
    ).is_dir()
    assert variables["MEGATRON_RL_CORR_CPU"] == "megatron"
    assert variables["HOME"] == "/home/me"
    assert base == {"PYTHONPATH": "/mine", "HOME": "/home/me"}


def test_environment_when_made_from_another_engines_then_only_the_new_one_is_on(no_gpu):
    variables = environment("sglang", environment("megatron", {}))
    assert variables["MEGATRON_RL_CORR_CPU"] == "sglang"
    assert variables["PYTHONPATH"].split(os.pathsep).count(str(module.SITE)) == 1
    assert variables["SGLANG_USE_CPU_ENGINE"] == "1"


def test_environment_when_transformer_engine_is_installed_then_its_stand_in_is_not_on_the_path(
    no_gpu, monkeypatch, tmp_path
):
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine/__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    module.real_transformer_engine.cache_clear()
    try:
        path = environment("megatron", {})["PYTHONPATH"].split(os.pathsep)
    finally:
        module.real_transformer_engine.cache_clear()
    assert str(module.TRANSFORMER_ENGINE) not in path


@pytest.mark.parametrize("given, expected", [({}, "1"), ({"OMP_NUM_THREADS": "4"}, "4")])
def test_environment_when_threads_are_given_then_they_stay(no_gpu, given, expected):
    assert environment("sglang", given)["OMP_NUM_THREADS"] == expected


def test_environment_when_there_is_a_gpu_then_it_is_unchanged(gpu):
    assert environment("megatron", {"PYTHONPATH": "/mine"}) == {"PYTHONPATH": "/mine"}
    assert environment("sglang", {}) == {}
    assert sglang_arguments({}) == []


@pytest.mark.parametrize("visible, expected", [("", False), ("-1", False), ("0", True), ("1,0", True)])
def test_gpu_available_when_devices_are_hidden_then_there_is_none(gpu, visible, expected):
    assert gpu_available({"CUDA_VISIBLE_DEVICES": visible}) is expected
    assert (sglang_arguments({"CUDA_VISIBLE_DEVICES": visible}) == []) is expected


def test_environment_when_engine_is_unknown_then_error_names_the_known_ones():
    with pytest.raises(ValueError, match="one of megatron, sglang, got 'vllm'"):
        environment("vllm", {})
    with pytest.raises(ValueError, match="one of megatron, sglang, got 'vllm'"):
        module.replacements("vllm")
