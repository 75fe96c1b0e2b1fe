"""The tiny model and the real servers that tests share: made once a session, if a test asks."""

import asyncio
import functools
import gc
import importlib.util
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_rl_corr.engines.sglang.changes_loader import LOADER
from megatron_rl_corr.events import EVENTS
from megatron_rl_corr.rollout import RolloutClient
from tests import server_load, stand_in_server
from tests.preloaded import PreloadedServer, preload_all, run_preloaded
from tests.record import Record
from tests.schedule import pytest_collection_modifyitems, pytest_xdist_make_scheduler  # noqa: F401
from tools.cpu import environment, gpu_available, sglang_arguments, vllm_arguments
from tools.process_group import group_members

ROOT = Path(__file__).resolve().parents[1]
SMALL_PROGRAMS = ("uname", "ldconfig", "lscpu", "gcc", "c++", "g++", "ruff")
"""What libraries ask a machine with, and a formatter: they take no time."""
SHARED: list[PreloadedServer] = []
"""The running servers of the session with the tiny model's own weights."""


def pytest_addoption(parser):
    parser.addoption("--fast", action="store_true", help="leave out what starts a process (make test-fast)")
    parser.addoption(
        "--record", metavar="FOLDER", help="write outcome and seconds into a file there (tests/record.py)"
    )


def pytest_configure(config):
    folder = config.getoption("--record")
    if folder and not hasattr(config, "workerinput"):  # the parent of xdist's workers, or the only process
        config.pluginmanager.register(Record(Path(folder)))
    if getattr(config.option, "numprocesses", None) and not config.getoption("--fast"):
        preload_all()  # all workers share what their parent starts


def forbid_processes():
    """Skip each test, or fixture, at the moment it starts a process of ours."""

    def skip():
        pytest.skip("starts a process; make test runs it")

    def popen(self, args, *others, **settings):
        word = args if isinstance(args, str) else os.fspath(args[0])
        if Path(word.split()[0]).name not in SMALL_PROGRAMS:
            skip()
        started(self, args, *others, **settings)

    started, subprocess.Popen.__init__ = subprocess.Popen.__init__, popen
    multiprocessing.process.BaseProcess.start = lambda self: skip()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    report = yield
    if "megatron.core" in sys.modules:  # see sglang_server_fp32
        raise pytest.UsageError(
            f"{collector.nodeid} imports Megatron into pytest's own process; give it a process of its own"
        )
    return report


def pytest_collection_finish(session):
    gc.freeze()  # the collector would walk thousands of tests again and again
    if session.config.getoption("--fast"):
        forbid_processes()


@pytest.fixture(scope="session")
def tiny_moe_dir(tmp_path_factory) -> Path:
    """A tiny Qwen3-MoE in Hugging Face format, seed 0."""
    out = tmp_path_factory.mktemp("tiny_moe")
    made = run_preloaded([ROOT / "examples/quickstart/make_model.py", out, "--seed", 0], engine="sglang")
    assert made.returncode == 0, made.stderr
    return out


@pytest.fixture
def short_path(tmp_path_factory) -> Path:
    """As tmp_path, for a folder in which processes make sockets: their paths have 107 bytes at the most."""
    return tmp_path_factory.mktemp("s")


@pytest.fixture(scope="module")
def one_rank():
    """torch.distributed over gloo with this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def hf_reference(tmp_path_factory):
    """hf_reference(model_dir): the path of what mcore/hf_reference.py saves of it, made once a session."""

    @functools.cache
    def made(model_dir: Path) -> Path:
        path = tmp_path_factory.mktemp("hf_reference") / "reference.pt"
        made = run_preloaded([ROOT / "tests/mcore/hf_reference.py", model_dir, path])
        assert made.returncode == 0, made.stderr
        return path

    return made


@pytest.fixture(scope="session")
def sglang_server_fp32(tiny_moe_dir, tmp_path_factory):
    """A real SGLang server of the tiny model in float32; without routed experts."""
    # Megatron-core replaces how torch pickles tensors, and a server that is sent such a pickle dies.
    assert "megatron.core" not in sys.modules, (
        "a test imported Megatron into this process; use one of its own"
    )
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("sglang is not installed; make setup installs it")
    server = PreloadedServer(
        tiny_moe_dir,
        dtype="float32",
        log_path=tmp_path_factory.mktemp("sglang") / "server.log",
        extra_arguments=[*sglang_arguments(), "--random-seed", "0", "--custom-weight-loader", LOADER],
        environment=environment("sglang"),
    )
    with server:
        group = server.pid
        SHARED.append(server)
        yield server
    SHARED.remove(server)
    assert group_members(group) == []


@pytest.fixture(scope="session")
def vllm_server_fp32(tiny_moe_dir, tmp_path_factory):
    """A real vLLM server of the tiny model in float32."""
    yield from vllm_server("vllm", tiny_moe_dir, tmp_path_factory.mktemp("vllm"))


@pytest.fixture(scope="session")
def vllm_v2_server_fp32(tiny_moe_dir, tmp_path_factory):
    """As vllm_server_fp32, with the V2 model runner: routed experts and sampling masks, at 12
    tokens a second.
    """
    flags = ["--enable-return-routed-experts", "--return-sampling-mask"]
    yield from vllm_server("vllm_v2", tiny_moe_dir, tmp_path_factory.mktemp("vllm_v2"), *flags)


def vllm_server(engine, model_dir, folder, *flags):
    if gpu_available():
        pytest.skip("make setup-vllm installs vLLM without a GPU only")
    with PreloadedServer(
        model_dir,
        engine="vllm",
        dtype="float32",
        log_path=folder / "server.log",
        extra_arguments=[*vllm_arguments(), *flags],
        environment=environment(engine),
    ) as server:
        group = server.pid
        SHARED.append(server)
        yield server
    SHARED.remove(server)
    assert group_members(group) == []


@pytest.fixture(params=["sglang", "vllm"])
def engine_server(request):
    """(engine, server): a test that takes it runs on a real server of each engine, of the same
    model in float32.
    """
    return request.param, request.getfixturevalue(f"{request.param}_server_fp32")


@pytest.fixture(scope="module", autouse=True)
def shared_servers_keep_their_weights_name(request):
    """A module that leaves a shared server with pushed weights fails here, not in the next that
    asks for its own.
    """
    yield
    for server in SHARED:
        name = asyncio.run(_weights_name(server))
        assert name == "default", (
            f"{request.node.nodeid} left the weights {name!r} on the {server.engine} server"
        )


async def _weights_name(server):
    async with RolloutClient([server.url], vocab_size=83, engine=server.engine) as client:
        return (await client.reported_versions())[0]


@pytest.fixture(scope="session")
def keeping_server(tiny_moe_dir, tmp_path_factory):
    """A real server that may be paused in place and keeps cached prefixes then; it returns routed experts."""
    arguments = ["--disable-overlap-schedule", "--enable-return-routed-experts", "--random-seed", "2"]
    with PreloadedServer(
        tiny_moe_dir,
        dtype="float32",
        log_path=tmp_path_factory.mktemp("keeping") / "server.log",
        extra_arguments=[*sglang_arguments(), *arguments],
        environment=environment("sglang"),
    ) as server:
        SHARED.append(server)
        yield server
    SHARED.remove(server)


VICTIM = {
    "sglang": [
        *sglang_arguments(),
        "--disable-overlap-schedule",
        "--disable-radix-cache",
        "--enable-deterministic-inference",
        "--random-seed",
        "1",
    ],
    "vllm": vllm_arguments(),
}


class Victim:
    """A server that a test may kill and start again at the same address; it may be paused in place,
    and heeds seeds.
    """

    def __init__(self, engine, model_dir, folder):
        self.engine, self._model_dir, self._folder = engine, model_dir, folder
        self.server, self.killed = self._made(port=0), False

    def _made(self, port):
        return PreloadedServer(
            self._model_dir,
            engine=self.engine,
            dtype="float32",
            port=port,
            log_path=self._folder / "server.log",
            extra_arguments=VICTIM[self.engine],
            environment=environment(self.engine),
        )

    def kill(self):
        os.killpg(self.server.pid, signal.SIGKILL)
        self.killed = True

    def start_again(self):
        self.server.stop()  # what the dead one left behind
        self.server = self._made(self.server.port)
        self.server.start().wait_ready()
        self.killed = False

    def revive(self):
        """Start it again if a test has killed it."""
        if self.killed:
            self.start_again()


@pytest.fixture(scope="module")
def victim(any_victim):
    """A second real server, of the same weights as the first; it runs, whatever the module
    before has done to it.
    """
    any_victim.revive()
    return any_victim


@pytest.fixture(scope="session")
def any_victim(tiny_moe_dir, tmp_path_factory):
    """The one that all modules share; tests/matrix/test_vllm_victim.py has another in its place."""
    yield from running_victim("sglang", tiny_moe_dir, tmp_path_factory.mktemp("victim"))


def running_victim(engine, model_dir, folder):
    victim = Victim(engine, model_dir, folder)
    try:
        victim.server.start().wait_ready()
        yield victim
    finally:
        victim.server.stop()


@pytest.fixture(scope="session")
def companion(sglang_server_fp32):
    """The server beside the victim: of the same engine and the same weights."""
    return sglang_server_fp32


@pytest.fixture
def faulty():
    """The functions of stand_in_server.py: faulty.run, faulty.failure, faulty.good, and so on."""
    return stand_in_server


@pytest.fixture
def wait_until_sampling():
    """wait_until_sampling(url) of server_load.py."""
    return server_load.wait_until_sampling


@pytest.fixture
def told(monkeypatch):
    """(kind, facts) of each event that is told, the reason among them."""
    found, tell = [], EVENTS.tell

    def noted(kind, reason, **facts):
        found.append((kind, {"reason": reason} | facts))
        tell(kind, reason, **facts)

    monkeypatch.setattr(EVENTS, "tell", noted)
    return found


@pytest.fixture
def seen(record_property):
    """seen("after 3.1 s"): what a drill saw, for the table of drills."""
    return lambda text: record_property("seen", text)
