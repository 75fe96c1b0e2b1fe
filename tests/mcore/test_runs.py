"""Whole runs on Transformer Engine's spec: they go on from a checkpoint, and give a Hugging Face folder."""

import json
import math
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from megatron_rl_corr import cli
from megatron_rl_corr.models.hf_checkpoint import HFCheckpoint
from megatron_rl_corr.rollout.sample_file import read_trajectories
from megatron_rl_corr.rollout.trace_file import TRAINER
from tests.mcore.launched import checksums, launch, replayed, untimed_steps
from tests.rollout.test_trace import read_trace

SCRIPT = Path(__file__).resolve().parents[1] / "matrix/pretrain_any.py"
GROUPED = ["--moe-grouped-gemm", "--moe-permute-fusion"]
NEAR = 1e-4  # of float32
RUN = ["--global-batch-size", 16, "--train-iters", 4, "--save-interval", 2, "--rollout-save-hf-interval", 2]
CHOSEN = ["--rollout-correction", "auto"]
PRESET = ["--rollout-correction-preset", "decoupled_token_is"]
BEGIN = ["--train-iters", 1, "--save-interval", 1, "--rollout-save-hf-interval", 1, "--lr", 0, "--seed", 4321]
"""A step that moves nothing: what is served and saved after it is the start. The seed is for
samples of its own.
"""
LAYOUT = [
    *GROUPED,
    "--tensor-model-parallel-size",
    2,
    "--sequence-parallel",
    "--pipeline-model-parallel-size",
    2,
    "--expert-model-parallel-size",
    2,
    "--expert-tensor-parallel-size",
    1,
]


def made(folder, server, model, wanted, correction=PRESET):
    """Name -> (exit, folder of the run, the server's checksums after it, samples that no run
    before it asked for).

    wanted: name -> flags of the run.
    """
    found = {}
    with replayed(server, model, folder) as door:
        for name, flags in wanted.items():
            door.replay()
            out = folder / name
            saves = [
                "--rollout-save-hf",
                out / "hf",
                "--rollout-save-trajectories",
                out / "samples",
                "--rollout-trace",
                out / "traces",
            ]
            done = launch(
                folder,
                name,
                model,
                door.url,
                SCRIPT,
                *RUN,
                *saves,
                *flags,
                processes=4,
                mixed=True,
                correction=correction,
            )
            assert name == "local" or done.returncode == 0, done.stderr[-4000:] + done.stdout[-2000:]
            found[name] = done, folder / name, checksums(server.url), door.sampled
    return found


def again(folder):
    """Flags that go on from the second step of the run "whole"."""
    return ["--load", folder / "whole/checkpoints", "--ckpt-step", 2]


@pytest.fixture(scope="module")
def runs(sglang_server_fp32, tiny_moe_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    local = ["--transformer-impl", "local", "--pipeline-model-parallel-size", 2, "--rollout-pad-sequences"]
    begin = [
        *BEGIN,
        "--pretrained-checkpoint",
        folder / "whole/checkpoints",
        "--load",
        folder / "begun/checkpoints",
    ]
    wanted = {"whole": LAYOUT, "begun": [*LAYOUT, *begin]}
    wanted |= {"resumed": [*LAYOUT, *again(folder)], "local": [*again(folder), *local]}
    return made(folder, sglang_server_fp32, tiny_moe_dir, wanted, CHOSEN)


def test_run_when_resumed_in_the_same_layout_then_its_steps_and_weights_are_those_of_a_run_that_never_ended(
    runs,
):
    (_, whole, weights, _), (_, resumed, resumed_weights, sampled) = runs["whole"], runs["resumed"]
    wanted, steps = untimed_steps(whole), untimed_steps(resumed)
    assert [step["step"] for step in steps] == [3, 4] and len(wanted) == 4
    assert sampled == 0, "other samples were asked for"
    # The checkpoint keeps which weights the run had chosen.
    assert [step["auto/level"] for step in wanted] == [0, 1, 1, 1]
    for step, expected in zip(steps, wanted[2:], strict=True):
        assert step["grad_norm"] > 0
        # What a reward's dict has beside its score is learnt by all ranks, and logged.
        assert step["reward/parts/reward"] == pytest.approx(step["reward/mean"], abs=1e-12)
        assert step["reward/parts/reward/odd"] == pytest.approx(8 * step["reward/mean"], abs=1e-12)
        assert step == expected
    assert resumed_weights == weights


def test_run_when_it_begins_with_a_checkpoint_of_megatron_then_its_weights_are_trained_and_served(runs):
    (_, whole, weights, _), (_, begun, begun_weights, _) = runs["whole"], runs["begun"]
    [step] = untimed_steps(begun)
    assert step["step"] == 1 and step["grad_norm"] > 0 and step["rollout_corr/k3_kl"] < 1e-8
    assert begun_weights == weights
    assert_same_weights(begun / "hf/iter_0000001", whole / "hf/iter_0000004")


def test_run_when_resumed_on_layers_of_other_names_then_refused_with_the_remedy(runs):
    done, folder, *_ = runs["local"]
    saved = folder.parent / "whole/checkpoints/iter_0000002"
    assert done.returncode == 1 and not (folder / "log/metrics.jsonl").exists()
    assert (
        f"megatron_rl_corr: --transformer-impl local: the checkpoint {saved} was saved with "
        "transformer_engine, whose layers have other names"
    ) in done.stderr


def test_hugging_face_folder_when_loaded_then_its_logprobs_are_the_servers(runs):
    from transformers import AutoModelForCausalLM

    _, whole, *_ = runs["whole"]
    assert sorted(path.name for path in (whole / "hf").iterdir()) == ["iter_0000002", "iter_0000004"]
    model = AutoModelForCausalLM.from_pretrained(whole / "hf/iter_0000002", dtype="auto").eval()
    assert model.dtype == torch.float32  # what was trained; the start was bfloat16
    samples = [s for path in (whole / "samples").glob("step_000003*") for s in read_trajectories(path)]
    assert len(samples) == 16
    for sample in samples:
        prompt, output = sample.trajectory.prompt_ids.long(), sample.trajectory.output_ids.long()
        with torch.no_grad():
            logits = model(torch.cat([prompt, output])[None]).logits[0, len(prompt) - 1 : -1]
        found = logits.log_softmax(-1).gather(1, output[:, None])[:, 0]
        torch.testing.assert_close(found, sample.trajectory.rollout_logprobs, atol=1e-5, rtol=0)


def test_checkpoint_when_exported_then_the_weights_are_those_that_the_run_wrote(runs, tiny_moe_dir, tmp_path):
    _, whole, *_ = runs["whole"]
    for step, checkpoint in ((4, whole / "checkpoints"), (2, whole / "checkpoints/iter_0000002")):
        assert exported(checkpoint, tiny_moe_dir, tmp_path / f"{step}") == 0
        assert_same_weights(tmp_path / f"{step}", whole / f"hf/iter_{step:07d}")


def replay(folder, of, name, model, *flags, processes=1, correction=PRESET):
    """A run on the samples of the run `of`, without a server."""
    flags = ["--rollout-replay", folder / of / "samples", "--rollout-save-hf", folder / name / "hf", *flags]
    run = [SCRIPT, *RUN[:6], *flags]
    return launch(folder, name, model, None, *run, processes=processes, correction=correction)


def test_run_when_replayed_without_a_server_in_another_layout_then_its_steps_are_nearly_the_same(
    runs, tiny_moe_dir
):
    _, whole, *_ = runs["whole"]
    done = replay(whole.parent, "whole", "replayed", tiny_moe_dir, *GROUPED, correction=CHOSEN)
    assert done.returncode == 0, done.stderr[-4000:]
    steps, wanted = untimed_steps(whole.parent / "replayed"), untimed_steps(whole)
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    for step, expected in zip(steps, wanted, strict=True):
        assert set(step) == set(expected)
        # Where advantages sum to 0, so does the loss, but for what the weights differ by: e^D of a token, the
        # product of at most 8 of them of a sequence. D is rounding, and after a step what the rounding of a
        # gradient near 0 makes of a few weights (assert_nearly_same_weights).
        rounding = step["rollout_corr/log_ratio_abs_max"]
        apart = rounding * (8 if step["auto/level"] else 1)
        assert step["loss/policy"] == pytest.approx(expected["loss/policy"], rel=NEAR, abs=apart)
        assert rounding < NEAR
        for name in ("loss/entropy", "grad_norm", "reward/mean", "weight_lag", "response_length/mean"):
            assert step[name] == pytest.approx(expected[name], rel=NEAR, abs=1e-7), name
        assert step["rollout_corr/k3_kl"] < 1e-6, "other samples than those that these weights gave"
    found, weights = (
        HFCheckpoint(folder / "hf/iter_0000004") for folder in (whole.parent / "replayed", whole)
    )
    assert_nearly_same_weights(found, weights)


def plant_mismatch(source, folder):
    """The first step's samples in four steps whose log-ratios are made up. Returns ESS / n of each.

    Steps 1 and 4 have no mismatch. In steps 2 and 3 the tokens of the longest sample are all more likely to
    the trainer, and all others less: the product of one sample is nearly the sum of all.
    """
    folder.mkdir(parents=True)
    [path] = source.glob("step_000001_*")
    table = pq.read_table(path)
    train = table["train_logprobs"].to_pylist()
    lengths = [len(values) for values in train]
    assert len(train) == 16 and max(lengths) >= 6  # of a product of fewer the rest is not small
    longest, ess = lengths.index(max(lengths)), []
    for step, size in enumerate([0.0, 0.6, 0.8, 0.0], start=1):
        ratios = [size if sample == longest else -size for sample in range(len(train))]
        planted = [[value - ratio for value in values] for values, ratio in zip(train, ratios, strict=True)]
        products = [math.exp(ratio * length) for ratio, length in zip(ratios, lengths, strict=True)]
        ess.append(sum(products) ** 2 / sum(product**2 for product in products) / len(products))
        column = table.schema.get_field_index("rollout_logprobs")
        made = table.set_column(
            column, table.schema.field(column), pa.array(planted, type=table.schema.field(column).type)
        )
        about = json.loads(table.schema.metadata[b"megatron_rl_corr.batch"]) | {"step": step}
        metadata = table.schema.metadata | {b"megatron_rl_corr.batch": json.dumps(about).encode()}
        pq.write_table(made.replace_schema_metadata(metadata), folder / f"step_{step:06d}_replica0.parquet")
    return ess


def test_auto_when_the_mismatch_changes_then_each_batch_has_the_weights_that_the_one_before_asked_for(
    runs, tiny_moe_dir
):
    _, whole, *_ = runs["whole"]
    folder = whole.parent
    ess = plant_mismatch(whole / "samples", folder / "planted/samples")
    wanted = {"auto": CHOSEN}
    wanted |= {
        level: ["--rollout-is", level, "--rollout-is-threshold", 2.0] for level in ("token", "sequence")
    }
    steps = {}
    for name, correction in wanted.items():
        done = replay(
            folder,
            "planted",
            f"planted_{name}",
            tiny_moe_dir,
            *GROUPED,
            *["--lr", 0, "--weight-decay", 0, "--pipeline-model-parallel-size", 2],
            processes=2,
            correction=correction,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        steps[name] = untimed_steps(folder / f"planted_{name}")
    auto, levels = steps["auto"], ["token", "sequence", "token", "token"]
    assert [step["auto/level"] for step in auto] == [level == "sequence" for level in levels]
    assert [step["rollout_corr/ess_sequences"] for step in auto] == pytest.approx(ess, rel=0.01)
    for place, level in enumerate(levels):
        expected = steps[level][place]
        assert {name: auto[place][name] for name in expected} == expected, f"step {place + 1}"
    # The test can tell one level from the other.
    found, other = (steps[level][1]["grad_norm"] for level in ("sequence", "token"))
    assert found != pytest.approx(other, rel=0.1)


def test_auto_when_raw_rewards_are_all_less_then_it_trains_alike(runs, tiny_moe_dir):
    _, whole, *_ = runs["whole"]
    folder, found = whole.parent, {}
    for name, off in (("near", 0.0), ("off", -7.0)):
        plant_mismatch(whole / "samples", folder / name / "samples")
        for path in sorted((folder / name / "samples").glob("*.parquet")):
            table = pq.read_table(path)
            place = table.schema.get_field_index("reward")
            less = pa.array(
                [one + off for one in table["reward"].to_pylist()], table.schema.field(place).type
            )
            pq.write_table(table.set_column(place, table.schema.field(place), less), path)
    raw = [*GROUPED, "--lr", 0, "--weight-decay", 0, "--rollout-advantage", "raw"]
    for name, of, correction in (
        ("near_auto", "near", CHOSEN),
        ("off_auto", "off", CHOSEN),
        ("off_fixed", "off", PRESET),
    ):
        done = replay(folder, of, name, tiny_moe_dir, *raw, correction=correction)
        assert done.returncode == 0, done.stderr[-4000:]
        found[name] = [step["grad_norm"] for step in untimed_steps(folder / name)]
    assert found["off_auto"] == pytest.approx(found["near_auto"], rel=1e-4)
    assert found["off_fixed"][0] > 3 * found["off_auto"][0], "the baseline's own gradient"


def test_probe_when_a_run_pushes_then_the_servers_log_probs_are_the_trainers_after_every_push(runs):
    _, whole, *_ = runs["whole"]
    rows = [json.loads(line) for line in (whole / "log/metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 4
    assert all(
        0 < row["rollout/probe_max_abs_log_ratio"] < NEAR and row["rollout/probe_rounds"] == 0 for row in rows
    )


def test_trace_of_a_run_then_every_sample_and_part_of_a_step_is_in_it_and_adds_up(runs):
    _, whole, *_ = runs["whole"]
    paths = sorted((whole / "traces").iterdir())
    assert [path.name for path in paths] == [f"step_00000{step}_replica0.json" for step in (1, 2, 3, 4)]
    logged = [json.loads(line) for line in (whole / "log/metrics.jsonl").read_text().splitlines()]
    for path, metrics in zip(paths, logged, strict=True):
        slices, names, facts = read_trace(path)
        assert facts["replicas"] == 1 and facts["samples_left_out"] == 0
        trainer = Counter()  # files are begun before the training, and waited for behind it
        for event in slices.pop((TRAINER, 0)):
            trainer[event["name"]] += event["dur"] / 1e6
        step = trainer.pop(f"step {metrics['step']}")
        assert list(trainer) == ["collect", "reference", "score", "save", "train", "push"]
        assert sum(trainer.values()) == pytest.approx(step, abs=1e-4)
        assert step == pytest.approx(metrics["time/step_s"], rel=0.5, abs=0.2)  # of another rank
        assert len(slices) == 16
        for own in slices.values():
            parts = {event["name"]: event["dur"] for event in own}
            whole_s = parts.pop("sample")
            assert set(parts) == {"queued", "generate", "reward", "wait"}
            assert whole_s * 0.9 - 50_000 <= sum(parts.values()) <= whole_s + 10


def assert_nearly_same_weights(one, other):
    """To 1e-6, but for a few: where a gradient is about 0, its rounding decides which way Adam steps."""
    differences = torch.cat([(one.tensor(name) - other.tensor(name)).abs().flatten() for name in other.names])
    assert (differences > 1e-6).float().mean() < 1e-3 and differences.max() < 1e-4


def exported(checkpoint, model, out):
    return cli.main(["export", str(checkpoint), "--hf-checkpoint", str(model), "--out", str(out)])


def assert_same_weights(one, other):
    one, other = HFCheckpoint(one), HFCheckpoint(other)
    assert set(one.names) == set(other.names) and one.config == other.config
    for name in one.names:
        assert torch.equal(one.tensor(name), other.tensor(name)), name
