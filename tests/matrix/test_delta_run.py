"""A whole run on four ranks that pushes changes: its server ends with the very weights that it saves."""

import pytest
from safetensors.torch import load_file

from megatron_rl_corr.engines.sglang.changes_loader import LOADER
from tests.matrix.engine_pair import SCRIPT
from tests.mcore.launched import checksums, launch, untimed_steps, write_data
from tests.preloaded import PreloadedServer, address
from tests.tiers import long
from tests.weight_sync.pushing import Pushing
from tools.cpu import environment, sglang_arguments

pytestmark = [long, pytest.mark.usefixtures("one_rank")]
STEPS = 5


@pytest.fixture(scope="module")
def server(tiny_moe_dir, tmp_path_factory):
    address("megatron")  # what forks runs must not end with a thread that waits for a server
    with PreloadedServer(
        tiny_moe_dir,
        dtype="bfloat16",
        log_path=tmp_path_factory.mktemp("delta") / "server.log",
        environment=environment("sglang"),
        extra_arguments=[*sglang_arguments(), "--custom-weight-loader", LOADER],
    ) as server:
        yield server


@pytest.mark.parametrize("layout", [["pipeline", "expert"], ["tensor", "expert"]], ids="-".join)
def test_run_when_it_pushes_changes_then_the_server_has_what_the_run_saves(
    server, tiny_moe_dir, tmp_path, layout
):
    write_data(tmp_path)
    flags = {"pipeline": "--pipeline-model-parallel-size", "expert": "--expert-model-parallel-size"}
    flags["tensor"] = "--tensor-model-parallel-size"
    done = launch(
        tmp_path,
        "run",
        tiny_moe_dir,
        server.url,
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
    assert shares[3] == 1 and all(0 < share < 0.2 for share in shares[:3] + shares[4:])
    assert "sending the weights again" not in done.stderr
    after = checksums(server.url)
    weights = {}
    for file in (tmp_path / f"hf/iter_{STEPS:07d}").glob("*.safetensors"):
        weights |= load_file(file)
    trainer = Pushing([server.url], "distributed", tiny_moe_dir, None)
    try:
        trainer.push(weights, "whole")
    finally:
        trainer.close()
    assert after == checksums(server.url)
