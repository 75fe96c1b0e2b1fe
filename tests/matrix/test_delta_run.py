"""A whole run on four ranks that pushes changes: its servers end with the very weights that it saves."""

from contextlib import ExitStack

import pytest
from safetensors.torch import load_file

from megatron_rl_corr.engines.sglang.changes_loader import LOADER
from tests.matrix.engine_pair import ARGUMENTS, SCRIPT
from tests.mcore.launched import launch, untimed_steps, write_data
from tests.preloaded import PreloadedServer, address
from tests.tiers import long
from tests.weight_sync.pushing import Pushing
from tools.cpu import environment

pytestmark = [long, pytest.mark.usefixtures("one_rank")]
STEPS = 5
MORE = {"sglang": ["--custom-weight-loader", LOADER], "vllm": []}


@pytest.fixture(scope="module")
def server_of(tiny_moe_dir, tmp_path_factory):
    """server_of(engine): started once."""
    address("megatron")  # what forks runs must not end with a thread that waits for a server
    made = {}
    with ExitStack() as stack:

        def server_of(engine):
            if engine not in made:
                server = PreloadedServer(
                    tiny_moe_dir,
                    engine=engine,
                    dtype="bfloat16",
                    log_path=tmp_path_factory.mktemp("delta") / "server.log",
                    environment=environment(engine),
                    extra_arguments=[*ARGUMENTS[engine](), *MORE[engine]],
                )
                made[engine] = stack.enter_context(server)
            return made[engine]

        yield server_of


def everything(url, engine, folder, weights):
    """The server's checksums, before and after a push of all these weights to it."""
    trainer = Pushing([url], "distributed", folder, None, engine)
    try:
        before = trainer.all_checksums()
        trainer.push(weights, "whole")
        return before, trainer.all_checksums()
    finally:
        trainer.close()


@pytest.mark.parametrize(
    ("engines", "layout"),
    [
        (["sglang"], ["pipeline", "expert"]),
        (["sglang"], ["tensor", "expert"]),
        (["vllm"], ["pipeline", "expert"]),
        (["vllm"], ["tensor", "expert"]),
        (["sglang", "vllm"], ["pipeline", "expert"]),
    ],
    ids="-".join,
)
def test_run_when_it_pushes_changes_then_the_servers_have_what_the_run_saves(
    server_of, tiny_moe_dir, tmp_path, engines, layout
):
    write_data(tmp_path)
    servers = {engine: server_of(engine) for engine in engines}
    flags = {"pipeline": "--pipeline-model-parallel-size", "expert": "--expert-model-parallel-size"}
    flags["tensor"] = "--tensor-model-parallel-size"
    done = launch(
        tmp_path,
        "run",
        tiny_moe_dir,
        [server.url for server in servers.values()],
        SCRIPT,
        *(word for one in layout for word in (flags[one], 2)),
        *(["--sequence-parallel"] if "tensor" in layout else []),
        "--bf16",
        "--lr",
        1e-5,
        "--global-batch-size",
        16,
        "--train-iters",
        STEPS,
        "--save-interval",
        100,
        "--rollout-push",
        "delta",
        "--rollout-push-full-every",
        4,
        "--rollout-save-hf",
        tmp_path / "hf",
        "--rollout-save-hf-interval",
        1,
        processes=4,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    shares = [step["rollout/push_changed"] for step in untimed_steps(tmp_path / "run")]
    # The first changes and the fourth after them are proven by a push of everything.
    assert shares[0] == shares[4] == 1 and all(0 < share < 0.2 for share in shares[1:4])
    assert "sending the weights again" not in done.stderr and "not changes alone" not in done.stderr
    weights = {}
    for file in (tmp_path / f"hf/iter_{STEPS:07d}").glob("*.safetensors"):
        weights |= load_file(file)
    for engine, server in servers.items():
        before, after = everything(server.url, engine, tiny_moe_dir, weights)
        assert before == after
