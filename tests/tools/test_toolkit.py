"""Servers find the compiler that `make setup` lays down for a GPU."""

import os

from tools import local_server
from tools.toolkit import with_libraries, with_toolkit


def test_toolkit_when_laid_down_then_its_compiler_and_programs_come_first_and_what_is_set_is_kept(tmp_path):
    (tmp_path / "cuda").mkdir()
    found = with_toolkit({"PATH": "/usr/bin", "A": "1"}, tmp_path)
    assert found == {"PATH": f"{tmp_path}/bin:/usr/bin", "A": "1", "CUDA_HOME": f"{tmp_path}/cuda"}
    assert with_toolkit({"CUDA_HOME": "/opt/cuda"}, tmp_path)["CUDA_HOME"] == "/opt/cuda"
    assert with_toolkit({}, tmp_path)["PATH"] == f"{tmp_path}/bin:{os.defpath}"


def test_toolkit_when_there_is_none_then_the_environment_is_as_before(tmp_path):
    base = {"PATH": "/usr/bin"}
    assert with_toolkit(base, tmp_path) == base


def test_local_server_then_its_process_gets_the_toolkit(tmp_path, monkeypatch):
    monkeypatch.setattr(local_server, "with_toolkit", lambda base: {**base, "CUDA_HOME": "laid down"})
    server, given = local_server.LocalServer(tmp_path, log_path=tmp_path / "log", environment={"A": "1"}), []
    server.popen = lambda command, **options: given.append(options["env"])
    server.start()
    assert given[0]["CUDA_HOME"] == "laid down" and given[0]["A"] == "1"


def test_libraries_when_laid_down_then_they_come_first_and_else_nothing_changes(tmp_path):
    assert with_libraries({"A": "1"}, tmp_path) == {"A": "1"}
    (tmp_path / "cuda/lib").mkdir(parents=True)
    assert with_libraries({}, tmp_path) == {"LD_LIBRARY_PATH": f"{tmp_path}/cuda/lib"}
    assert with_libraries({"LD_LIBRARY_PATH": "/own"}, tmp_path) == {
        "LD_LIBRARY_PATH": f"{tmp_path}/cuda/lib:/own"
    }


def test_local_server_when_it_has_a_memory_saver_then_its_process_finds_cudas_libraries(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(local_server, "with_libraries", lambda base: {**base, "LD_LIBRARY_PATH": "found"})
    for flags, expected in ((["--enable-memory-saver"], "found"), ([], None)):
        server, given = (
            local_server.LocalServer(
                tmp_path, log_path=tmp_path / "log", environment={}, extra_arguments=flags
            ),
            [],
        )
        server.popen = lambda command, given=given, **options: given.append(options["env"])
        server.start()
        assert given[0].get("LD_LIBRARY_PATH") == expected
