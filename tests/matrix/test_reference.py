"""KL to a reference policy under the launcher: exactly 0 at the start, never on the servers,
kept over a restart.
"""

import asyncio
import json
import shutil
import sys
from pathlib import Path

import pytest
from aiohttp import web

from megatron_rl_corr.rollout import RolloutClient
from tests.forked_torchrun import forking
from tests.matrix.patched import cpu_flags, process_environment, unchanged
from tests.matrix.releases import OVERLAID, chosen
from tests.matrix.replaying_server import ReplayingServer
from tests.matrix.test_launcher_step import REWARD
from tests.mcore.test_reference import MORE, check, kl_reference  # noqa: F401
from tests.preloaded import PreloadedServer, run_preloaded
from tools.cpu import environment, sglang_arguments
from tools.local_server import free_port

pytestmark = pytest.mark.skipif(
    chosen() != OVERLAID, reason="make test-matrix runs it; tests/mcore has the gradients"
)
HERE = Path(__file__).resolve().parent
REPLICAS = [
    "--expert-model-parallel-size",
    2,
    "--use-distributed-optimizer",
    "--overlap-grad-reduce",
    "--overlap-param-gather",
]
"""Two, whose parameters are views of the distributed optimizer's buffers and are gathered late."""

SHARDS = [
    "--tensor-model-parallel-size",
    2,
    "--sequence-parallel",
    "--expert-model-parallel-size",
    2,
    "--expert-tensor-parallel-size",
    1,
]
"""Of one model. Megatron can't load the state of a distributed optimizer of float32 parameters."""


@pytest.mark.parametrize("processes", MORE)
def test_kl_penalties_in_more_layouts_then_gradients_equal_hf_autograd(processes, tiny_moe_dir, kl_reference):  # noqa: F811
    check(processes, MORE[processes], tiny_moe_dir, kl_reference)


def launch(folder, model, url, *flags, ranks=2, kill_at="none:0"):
    """One run of the launcher; what its process ended with."""
    folder.mkdir(parents=True)
    (folder / "reward.py").write_text(REWARD)
    (folder / "prompts.jsonl").write_text("".join(f'{{"input_ids": [3, 1, 4, {n}]}}\n' for n in range(4, 12)))
    ours = [
        "--rollout-url",
        url,
        "--rollout-hf-checkpoint",
        model,
        "--rollout-prompts",
        folder / "prompts.jsonl",
        "--rollout-reward-function",
        f"{folder / 'reward.py'}:reward",
        "--rollout-group-size",
        4,
        "--rollout-max-new-tokens",
        8,
        "--rollout-server-check",
        "off",
        "--rollout-log-dir",
        folder / "log",
        "--global-batch-size",
        16,
        "--log-interval",
        1,
    ]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        str(ranks),
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        str(free_port()),
        "-m",
        "megatron_rl_corr.launch",
        HERE / "killed_pretrain.py",
        *cpu_flags(model),
        *map(str, [*ours, *flags]),
    ]
    return run_preloaded(
        forking(list(map(str, command)))[1:],
        env=process_environment()
        | {
            "CUDA_VISIBLE_DEVICES": "",
            "KILL_AT": kill_at,
        },
    )


def steps_of(folder):
    return [json.loads(line) for line in (folder / "log/metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("packed", [False, True])
def test_reference_when_it_is_the_start_then_its_kl_is_0_until_the_first_update(
    packed, tmp_path, tiny_moe_dir, sglang_server_fp32
):
    flags = [*REPLICAS, "--rollout-kl-loss-coef", 0.1, "--rollout-sampler-kl-coef", 0.1]
    flags += [] if packed else ["--rollout-pad-sequences"]
    with unchanged(sglang_server_fp32, tiny_moe_dir):
        done = launch(tmp_path / "run", tiny_moe_dir, sglang_server_fp32.url, *flags, "--train-iters", 3)
    assert done.returncode == 0, done.stderr[-4000:]
    first, *later = steps_of(tmp_path / "run")
    assert first["loss/reference_kl"] == 0 and [step["loss/reference_missing"] for step in later] == [0, 0]
    assert all(step["loss/reference_kl"] > 1e-5 for step in later)
    # Of the same weights after every push: the reference's never got there.
    assert all(0 <= step["rollout_corr/k3_kl"] < 1e-6 for step in (first, *later))


def held_by(server, model):
    """Checksums of the weights that a server has."""
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]

    async def asked():
        async with RolloutClient([server.url], vocab_size=vocab_size) as client:
            [answer] = await client.weights_checker()
            return answer["ranks"][0]["checksums"]

    return asyncio.run(asked())


def numbers_of(step):
    return {
        name: value for name, value in step.items() if not name.startswith("time/") and name != "tokens_per_s"
    }


def saved_reference(checkpoints, iteration):
    """The files of a saved reset."""
    folder = checkpoints / f"iter_{iteration:07d}/rollout_reference"
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_run_when_killed_at_the_worst_moments_then_servers_have_the_live_weights_and_it_resumes_bit_for_bit(
    tmp_path, tiny_moe_dir, sglang_server_fp32
):
    """Reset after batches 2 and 4: in the pass of step 4 reference, live weights and start
    are three policies.
    """
    server, flags = (
        sglang_server_fp32,
        # The probe's passes would be counted with those of the reference.
        [*SHARDS, "--rollout-kl-loss-coef", 0.1, "--rollout-reference-reset", 2, "--save-interval", 1]
        + ["--rollout-probe-push", "off"],
    )
    with unchanged(server, tiny_moe_dir), ReplayingServer(server.url) as door:

        def run(name, iterations, *more, save=None, kill_at="none:0"):
            door.replay()
            done = launch(
                tmp_path / name,
                tiny_moe_dir,
                door.url,
                *flags,
                "--train-iters",
                iterations,
                "--save",
                tmp_path / (save or f"{name}/checkpoints"),
                *more,
                kill_at=kill_at,
            )
            assert (done.returncode == 0) == (kill_at == "none:0"), done.stderr[-4000:]
            return done, held_by(server, tiny_moe_dir)

        _, at_the_end = run("whole", 4)
        whole = steps_of(tmp_path / "whole")
        assert [step["loss/reference_kl"] == 0 for step in whole] == [True, False, True, False]
        _, after_three = run("three", 3)
        _, at_the_kill = run("killed", 4, kill_at="pass:4")
        assert at_the_kill == after_three != at_the_end
        assert (tmp_path / "killed/checkpoints/latest_checkpointed_iteration.txt").read_text() == "3"
        load = ["--load", tmp_path / "killed/checkpoints"]
        done, resumed = run("resumed", 4, *load, save="killed/checkpoints")
        assert (
            f"reference policy: {tmp_path}/killed/checkpoints/iter_0000003/rollout_reference, " in done.stdout
        )
        [step] = steps_of(tmp_path / "resumed")
        assert numbers_of(step) == numbers_of(whole[3]) and resumed == at_the_end
        # In one folder again and again: killed at each save, it goes on from the one before.
        often = tmp_path / "often/checkpoints"
        killed = [
            ("once", "written:2", 1, None),
            ("twice", "moving:2", 2, after_three),
            ("thrice", "moved:2", 3, at_the_end),
            ("last", "none:0", 4, at_the_end),
        ]
        for first, (name, kill_at, saved, held) in enumerate(killed):
            onward = ["--load", often] if first else []
            _, weights = run(name, 4, *onward, save="often/checkpoints", kill_at=kill_at)
            steps = list(map(numbers_of, steps_of(tmp_path / name)))
            assert steps == list(map(numbers_of, whole))[first : first + 2], name
            assert (often / "latest_checkpointed_iteration.txt").read_text() == str(saved)
            assert held in (None, weights), name
        assert not list(often.glob(".rollout_reference-*"))
        for iteration in (3, 4):
            assert saved_reference(often, iteration) == saved_reference(
                tmp_path / "whole/checkpoints", iteration
            )
        # The same without the saved reset: the reference is the start, and that is told.
        shutil.rmtree(tmp_path / "killed/checkpoints/iter_0000003/rollout_reference")
        (tmp_path / "killed/checkpoints/latest_checkpointed_iteration.txt").write_text("3")
        done, _ = run("lost", 4, *load, save="killed/checkpoints")
        assert (
            "the checkpoint has no rollout_reference: the reference policy is the run's first one"
            in done.stderr
        )
        assert steps_of(tmp_path / "lost")[0]["loss/reference_kl"] > 2 * step["loss/reference_kl"]


def test_reset_reference_when_it_was_saved_in_another_layout_then_its_kl_is_the_same_as_float32_rounds(
    tmp_path, tiny_moe_dir, sglang_server_fp32
):
    """Its tensors are the same bit for bit: tests/mcore/reference_worker.py."""
    flags = ["--rollout-kl-loss-coef", 0.1, "--rollout-reference-reset", 2, "--save-interval", 3]
    # Megatron can't load the optimizer's state into other expert ranks.
    layouts = {"shards": SHARDS, "stages": ["--pipeline-model-parallel-size", 2, "--no-load-optim"]}
    with unchanged(sglang_server_fp32, tiny_moe_dir), ReplayingServer(sglang_server_fp32.url) as door:
        for number, (name, layout) in enumerate(layouts.items()):
            door.replay()
            load = ["--load", tmp_path / "shards/checkpoints", "--ckpt-step", 3] if number else []
            done = launch(
                tmp_path / name,
                tiny_moe_dir,
                door.url,
                *flags,
                *layout,
                *load,
                "--train-iters",
                4,
                "--save",
                tmp_path / name / "checkpoints",
            )
            assert done.returncode == 0, done.stderr[:9000]
    assert "iter_0000003/rollout_reference" in done.stdout
    whole, [step] = steps_of(tmp_path / "shards"), steps_of(tmp_path / "stages")
    assert step["step"] == 4 and whole[2]["loss/reference_kl"] == 0 < step["loss/reference_kl"]
    assert step["loss/reference_kl"] == pytest.approx(whole[3]["loss/reference_kl"], rel=1e-3)


@pytest.fixture(scope="module")
def reference_server(tiny_moe_dir, tmp_path_factory):
    """A server of the start's weights in float32, which no trainer may push to."""
    log = tmp_path_factory.mktemp("reference") / "server.log"
    arguments = [*sglang_arguments(), "--random-seed", "5"]
    with PreloadedServer(
        tiny_moe_dir,
        dtype="float32",
        log_path=log,
        extra_arguments=arguments,
        environment=environment("sglang"),
    ) as server:
        yield server


@pytest.mark.parametrize(
    "layout",
    [["--context-parallel-size", 2, "--rollout-pad-sequences"], SHARDS],
    ids=["cp rows", "tp packed"],
)
def test_reference_when_servers_score_it_then_as_the_trainers_own_pass(
    layout, tmp_path, tiny_moe_dir, sglang_server_fp32, reference_server
):
    server, flags = sglang_server_fp32, [*layout, "--rollout-kl-loss-coef", 0.1, "--save-interval", 3]
    before = held_by(reference_server, tiny_moe_dir)
    with unchanged(server, tiny_moe_dir), ReplayingServer(server.url) as door:

        def run(name, iterations, *more):
            door.replay()
            save = ["--save", tmp_path / "checkpoints"] if iterations == 3 else []
            done = launch(
                tmp_path / name, tiny_moe_dir, door.url, *flags, *save, "--train-iters", iterations, *more
            )
            assert done.returncode == 0, done.stderr[-4000:]
            return steps_of(tmp_path / name), done.stdout

        own, _ = run("own", 4)
        by_url = ["--rollout-reference-url", reference_server.url]
        served, printed = run("served", 3, *by_url)
        resumed, _ = run(
            "resumed", 4, *by_url, "--load", tmp_path / "checkpoints", "--override-opt-param-scheduler"
        )
    assert printed.count("k3 of the start's weights against them is ") == 1
    for step, other in zip([*served, *resumed], own, strict=True):
        assert step["loss/reference_missing"] == 0 and 0 <= step["reference/floor"] < 1e-7
        assert step["loss/reference_kl"] == pytest.approx(other["loss/reference_kl"], rel=2e-2, abs=1e-7)
    assert own[3]["loss/reference_kl"] > 1e-4
    assert held_by(reference_server, tiny_moe_dir) == before


class Dying(ReplayingServer):
    """Scores the samples of one step and no more."""

    scored = 0

    async def _answer(self, request):
        if request.path == "/generate" and self.scored == 16:
            return web.Response(status=500, text="out of memory")
        answer = await super()._answer(request)
        self.scored += request.path == "/generate"
        return answer


def test_reference_servers_when_wrong_or_dead_or_pushed_to_then_the_run_says_which_flag(
    tmp_path,
    tiny_moe_dir,
    sglang_server_fp32,
    kl_reference,  # noqa: F811
):
    other, server = kl_reference[0], sglang_server_fp32
    another = PreloadedServer(
        other,
        dtype="float32",
        log_path=tmp_path / "server.log",
        environment=environment("sglang"),
        extra_arguments=[*sglang_arguments(), "--random-seed", "7"],
    )
    flags = ["--rollout-kl-loss-coef", 0.1, "--train-iters", 3, "--rollout-reference-url"]
    with unchanged(server, tiny_moe_dir), another, Dying(another.url) as dying:
        dying.run_id = b"none"
        died = launch(tmp_path / "died", tiny_moe_dir, server.url, *flags, dying.url, ranks=1)
        alias = server.url.replace("127.0.0.1", "localhost")
        pushed = launch(tmp_path / "pushed", tiny_moe_dir, server.url, *flags, alias, ranks=1)
    [step] = steps_of(tmp_path / "died")
    assert died.returncode and step["reference/floor"] > 0.02 and step["loss/reference_missing"] == 0
    assert f"against them is {step['reference/floor']:.3g}; rounding explains at most 0.01, so" in died.stdout
    assert (
        "it is a server of --rollout-reference-url, and none of them scored a sample of this batch"
        in died.stderr
    )
    assert "out of memory" in died.stderr and dying.url in died.stderr
    assert pushed.returncode and not (tmp_path / "pushed/log/metrics.jsonl").exists()
    assert f"--rollout-reference-url {alias}: its weights were called " in pushed.stderr
