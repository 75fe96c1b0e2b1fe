"""The arithmetic example in small: messages, math rewards, a group filter, two evaluation sets, an
exported folder.
"""

import json
import re
import sys
from pathlib import Path

import pytest
from safetensors import safe_open

from megatron_rl_corr.rollout.sample_file import read_trajectories
from tests.preloaded import run_preloaded

ROOT = Path(__file__).resolve().parents[2]
FORKED = ROOT / "tests/examples/forked_quickstart.py"
FLAGS = ["--steps", 2, "--supervised-steps", 60, "--", "--eval-interval", 2]
SETS = ("sums", "differences")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The ended run of two steps, and its folder."""
    out = tmp_path_factory.mktemp("arithmetic") / "run"
    done = run_preloaded([FORKED, "--arithmetic", "--out", out, *FLAGS], cwd=ROOT, timeout=280)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done, out


def test_arithmetic_when_run_then_messages_are_asked_in_the_models_template_and_math_compares_with_the_label(
    run,
):
    from transformers import AutoTokenizer

    _, out = run
    tokenizer = AutoTokenizer.from_pretrained(out / "model")
    rows = [json.loads(line) for line in (out / "data/train.jsonl").read_text().splitlines()]
    answers = {row["messages"][0]["content"]: row["label"] for row in rows}
    for step in (1, 2):
        files = sorted((out / "samples").glob(f"step_{step:06d}_*.parquet"))
        samples = [sample for path in files for sample in read_trajectories(path)]
        assert len(samples) == 256
        groups = {}
        for sample in samples:
            text = tokenizer.decode(sample.trajectory.prompt_ids.tolist())
            question = re.fullmatch(r"<\|user\|>(.*)<\|end\|><\|assistant\|>", text)[1]
            response = tokenizer.decode(sample.trajectory.output_ids.tolist(), skip_special_tokens=True)
            boxed = re.fullmatch(r"\\boxed\{(\d+)\}", response)
            if boxed:  # of another form math-verify decides, by its own rules
                assert sample.reward == (int(boxed[1]) == int(answers[question])), (question, response)
            groups.setdefault(question, []).append(sample.reward)
        assert all(len(rewards) % 16 == 0 and set(rewards) == {0.0, 1.0} for rewards in groups.values())


def test_arithmetic_when_run_then_the_exported_folder_solves_what_the_evaluation_counted(run):
    done, out = run
    last = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["step"] == 2
    for name in SETS:
        [solved] = re.findall(rf"held-out {name} .*solved greedily: ([\d.]+)", done.stdout)
        questions = len((out / f"data/{name}.jsonl").read_text().splitlines())
        # A question of two answers that are about equally likely may go the other way in bfloat16.
        assert abs(float(solved) - last[f"eval/{name}/reward"]) <= 1.5 / questions


def test_arithmetic_when_its_questions_are_dealt_out_then_none_is_in_two_parts():
    sys.path.insert(0, str(ROOT / "examples/arithmetic"))
    try:
        from task import KINDS, split
    finally:
        sys.path.pop(0)
    for kind, total in zip(KINDS, (100, 55), strict=True):
        train, held_out = ([row["messages"][0]["content"] for row in part] for part in split(kind))
        assert len(set(train) | set(held_out)) == len(train) + len(held_out) == total


def test_arithmetic_when_its_model_is_made_then_no_embedding_is_near_zero(run):
    # The gradient of a norm is 1000-fold there, and any id may be sampled.
    _, out = run
    with safe_open(out / "model/model.safetensors", "pt") as tensors:
        norms = tensors.get_tensor("model.embed_tokens.weight").norm(dim=1)
    assert norms.min() > 0.2 * norms.median()
