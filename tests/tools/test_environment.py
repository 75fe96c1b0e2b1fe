"""The environment and flags of a process without a GPU, and that a GPU leaves both as they were."""

import os
import subprocess
import sys

import pytest

import tools.cpu.process_environment as module
from tests.preloaded import run_preloaded
from tests.tiers import long, matrix
from tools.cpu import environment, gpu_available, sglang_arguments, vllm_arguments

pytestmark = matrix


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


def test_environment_when_of_vllm_then_its_packages_come_last_and_in_no_other_engines(
    no_gpu, monkeypatch, tmp_path
):
    monkeypatch.setattr(module, "VLLM_PACKAGES", tmp_path)
    with pytest.raises(FileNotFoundError, match="run make setup-vllm"):
        environment("vllm", {})
    (tmp_path / ".complete").touch()
    variables = environment("vllm", {"PYTHONPATH": "/mine"})
    assert variables["PYTHONPATH"].split(os.pathsep) == [
        str(module.SITE),
        str(module.PACKAGE_ROOT),
        "/mine",
        str(tmp_path),
    ]
    for engine in ("megatron", "sglang"):
        assert str(tmp_path) not in environment(engine, variables)["PYTHONPATH"]


def installed(folder):
    """A folder for PYTHONPATH that has a package of Transformer Engine's name."""
    (folder / "transformer_engine").mkdir()
    (folder / "transformer_engine/__init__.py").write_text("__version__ = '2.20.2'\n")
    return {"PYTHONPATH": str(folder)}


@long
def test_environment_when_transformer_engine_is_installed_then_there_is_no_stand_in(no_gpu, tmp_path):
    there = installed(tmp_path)
    inherited = environment("megatron", {})["PYTHONPATH"]
    assert str(module.TRANSFORMER_ENGINE) in inherited.split(os.pathsep)
    variables = environment("megatron", os.environ | {"PYTHONPATH": f"{inherited}:{tmp_path}"})
    assert str(module.TRANSFORMER_ENGINE) not in variables["PYTHONPATH"].split(os.pathsep)
    assert module.transformer_engine(there) == "none: the installed package needs a GPU"
    assert module.transformer_engine({}) == "stand-in for the CPU"
    assert module.megatron_arguments(there)[:2] == ["--transformer-impl", "local"]
    assert module.megatron_arguments({})[:2] == ["--transformer-impl", "transformer_engine"]
    code = (
        "from megatron_rl_corr.mcore.versions import transformer_engine; print('FOUND', transformer_engine())"
    )
    assert "FOUND none\n" in python(code, variables).stdout
    assert "FOUND stand-in for the CPU (2.20.2)\n" in python(code, environment("megatron")).stdout


def test_environment_when_there_is_a_gpu_then_no_stand_in_whether_transformer_engine_is_installed_or_not(
    gpu, tmp_path
):
    there = installed(tmp_path)
    for base, used in ((there, "the installed package"), ({}, "none")):
        assert environment("megatron", base) == base
        assert module.transformer_engine(base) == used
    assert module.transformer_engine({"CUDA_VISIBLE_DEVICES": ""}) == "stand-in for the CPU"


@pytest.mark.parametrize(
    "case, words",
    [
        ("", "IMPORTED"),
        ("gpu", "torch finds a GPU"),
        ("installed", "the real transformer_engine is installed"),
    ],
)
def test_stand_in_when_the_real_one_could_run_then_its_import_names_the_folder_to_remove(
    case, words, tmp_path
):
    there = installed(tmp_path)["PYTHONPATH"] if case == "installed" else ""
    path = os.pathsep.join(filter(None, [str(module.TRANSFORMER_ENGINE), there]))
    code = (
        f"import torch; torch.cuda.is_available = lambda: {case == 'gpu'}; import transformer_engine as te; "
    )
    run = python(code + "print('IMPORTED', te.STAND_IN)", os.environ | {"PYTHONPATH": path})
    assert words in run.stdout + run.stderr
    assert (run.returncode == 0) is (not case)
    told = f"RuntimeError: a stand-in for Transformer Engine is on the path, and {words}: take "
    assert not case or told in run.stderr


def python(code, variables):
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], env=variables, capture_output=True, text=True
    )


@pytest.mark.parametrize("given, expected", [({}, "1"), ({"OMP_NUM_THREADS": "4"}, "4")])
def test_environment_when_threads_are_given_then_they_stay(no_gpu, given, expected):
    assert environment("sglang", given)["OMP_NUM_THREADS"] == expected


def test_environment_when_there_is_a_gpu_then_it_is_unchanged(gpu):
    assert environment("megatron", {"PYTHONPATH": "/mine"}) == {"PYTHONPATH": "/mine"}
    assert environment("sglang", {}) == {}
    assert environment("vllm", {}) == {}
    assert sglang_arguments({}) == vllm_arguments({}) == []


@pytest.mark.parametrize("visible, expected", [("", False), ("-1", False), ("0", True), ("1,0", True)])
def test_gpu_available_when_devices_are_hidden_then_there_is_none(gpu, visible, expected):
    assert gpu_available({"CUDA_VISIBLE_DEVICES": visible}) is expected
    assert (sglang_arguments({"CUDA_VISIBLE_DEVICES": visible}) == []) is expected


def test_environment_when_engine_is_unknown_then_error_names_the_known_ones():
    with pytest.raises(ValueError, match="one of megatron, sglang, vllm, vllm_v2, got 'slime'"):
        environment("slime", {})
    with pytest.raises(ValueError, match="one of megatron, sglang, vllm, vllm_v2, got 'slime'"):
        module.replacements("slime")


def test_transformer_engine_when_asked_under_the_hook_with_the_stand_in_on_the_path_then_found(tmp_path):
    (tmp_path / "ask.py").write_text(
        "from tools.cpu import process_environment as p; print(p.transformer_engine())"
    )
    answer = run_preloaded([tmp_path / "ask.py"])
    assert answer.stdout == "stand-in for the CPU\n", answer.stderr
