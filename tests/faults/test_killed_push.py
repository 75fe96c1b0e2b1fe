"""The trainer is killed at every request of a push, and started again: it goes on without a
hand at the servers.
"""

import time
from pathlib import Path

import pytest

from tests.faults.drills import drill, long
from tests.matrix.engine_pair import ARGUMENTS, check_samples, pair, run, steps_of
from tests.mcore.launched import REWARD, launch
from tests.preloaded import PreloadedServer, address
from tools.cpu import environment

SCRIPT = Path(__file__).with_name("killed_push_pretrain.py")
MOMENTS = [
    ("pause_generation", "before", 1),
    ("pause_generation", "after", 1),
    ("update_weight_version", "after", 1),
    ("reopen_weight_update", "after", 1),
    ("bucket", "before", 1),
    ("bucket", "after", 1),
    ("bucket", "after", 4),
    ("end_weight_update", "before", 1),
    ("end_weight_update", "after", 1),
    ("update_weight_version", "after", 2),
    ("flush_cache", "before", 1),
    ("flush_cache", "after", 1),
    ("weights_checker", "after", 1),
    ("continue_generation", "before", 1),
    ("continue_generation", "after", 1),
]
"""Request, side of it, number; as they follow one another in a push."""
UNFINISHED = MOMENTS[2:9]
"""Between the two names."""
BUCKET = {"distributed": "update_weights_from_distributed", "tensor": "update_weights_from_tensor"}
STEPS = 3 + len(MOMENTS)


@pytest.fixture(scope="module")
def servers(tiny_moe_dir, tmp_path_factory):
    with pair(tiny_moe_dir, tmp_path_factory.mktemp("pair")) as servers:
        yield servers


def flags_of(transport, folder, load):
    flags = ["--rollout-weight-transport", transport, "--rollout-bucket-mib", 0.02]
    return [*flags, "--load", folder / "run/checkpoints", "--save-interval", 1] if load else flags


@long
@drill(
    f"the trainer is killed (SIGKILL) at {len(MOMENTS)} moments of a push, before or after a request; SGLang "
    "and vLLM. Each moment once: in turn anew and with --load, and of either two distributed, two tensor, "
    "and so on",
    promised="the next start goes on without a hand at the servers",
)
@pytest.mark.parametrize("load", [False, True], ids=["anew", "load"])
def test_trainer_when_killed_at_a_request_of_a_push_then_the_next_start_goes_on(
    servers, tiny_moe_dir, tmp_path, seen, load
):
    """Each run meets what the one before it has left, and is killed at the next moment of its
    second or third push.
    """
    before, seconds = None, []
    for number, moment in enumerate(MOMENTS[load::2]):
        transport, (request, side, count) = ("distributed", "tensor")[number // 2 % 2], moment
        folder = tmp_path if load else tmp_path / str(number)
        folder.mkdir(exist_ok=True)
        request = BUCKET[transport] if request == "bucket" else request
        begun = time.monotonic()
        done = run(
            folder,
            servers,
            tiny_moe_dir,
            *flags_of(transport, folder, load),
            steps=STEPS,
            script=SCRIPT,
            KILL_AT=f"{3 if load else 2}:{request}:{side}:{count}",
        )
        seconds.append(time.monotonic() - begun)
        assert "SIGKILL" in done.stderr and "megatron_rl_corr: " not in done.stderr, (
            moment,
            done.stderr[-3000:],
        )
        assert not load or steps_of(folder), moment
        assert ("a trainer was killed while it sent them" in done.stdout) == (before in UNFINISHED), moment
        before = moment
    last = tmp_path if load else tmp_path / "last"
    last.mkdir(exist_ok=True)
    done = run(last, servers, tiny_moe_dir, *flags_of("tensor", last, load), steps=STEPS if load else 2)
    assert done.returncode == 0, done.stderr[-6000:]
    if load:
        assert steps_of(last)[-1]["step"] == STEPS
    else:
        check_samples(last, servers, tiny_moe_dir, 2)
    seen(
        f"{len(seconds)} of {len(seconds)} starts went on; with its kill the slowest took {max(seconds):.0f} "
        "s"
    )


@long
@drill(
    "the only server is killed in a push, 1 rank and 2", promised="the run ends with its name, within 10 s"
)
@pytest.mark.parametrize(("engine", "ranks"), [("sglang", 1), ("vllm", 2)])
def test_run_when_its_only_server_dies_in_a_push_then_it_ends_with_its_name_soon(
    tiny_moe_dir, tmp_path, seen, engine, ranks
):
    server = PreloadedServer(
        tiny_moe_dir,
        engine=engine,
        dtype="float32",
        log_path=tmp_path / "server.log",
        extra_arguments=ARGUMENTS[engine](),
        environment=environment(engine),
    )
    address("megatron")  # what forks runs must not end with a thread that waits for one
    killed = tmp_path / "killed"
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "prompts.jsonl").write_text(
        "".join(f'{{"input_ids": [3, 1, 4, {n}]}}\n' for n in range(4, 12))
    )
    with server:
        done = launch(
            tmp_path,
            "run",
            tiny_moe_dir,
            server.url,
            SCRIPT,
            "--global-batch-size",
            16,
            "--train-iters",
            4,
            "--save-interval",
            100,
            "--moe-grouped-gemm",
            "--moe-permute-fusion",
            *flags_of("distributed", tmp_path, False),
            processes=ranks,
            KILL_AT="2:update_weights_from_distributed:before:3",
            SERVER=str(server.pid),
            KILLED=str(killed),
        )
        ended = time.time()
        assert killed.exists(), done.stderr[:6000]
        took = ended - float(killed.read_text())
    assert (
        done.returncode == 1
        and f"megatron_rl_corr: rollout server {server.url} did not answer" in done.stderr
    )
    assert took < 10, (took, done.stderr[-3000:])  # torchrun's own end is in it
    seen(f"torchrun and all ranks had ended {took:.1f} s after the kill")
