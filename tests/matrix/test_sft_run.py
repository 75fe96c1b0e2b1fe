"""Megatron's own fine-tuning from a Hugging Face folder to another, and a run with rollouts from that."""

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
import torch

from megatron_rl_corr.models.hf_checkpoint import HFCheckpoint
from tests.forked_torchrun import forking
from tests.matrix.patched import cpu_flags
from tests.mcore.launched import launch, run_environment, untimed_steps
from tests.mcore.test_runs import SCRIPT
from tests.preloaded import PreloadedServer, run_preloaded
from tests.tiers import long
from tools.cpu import environment, gpu_available, sglang_arguments
from tools.local_server import free_port

pytestmark = [
    long,
    pytest.mark.skipif(gpu_available(), reason="without a GPU only"),
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed"),
]
ROOT = Path(__file__).resolve().parents[2]
FINE_TUNED = Path(__file__).with_name("pretrain_sft.py")
ANSWER = "\\boxed{{{}}}"
SUMS = [(a, b) for a in range(10) for b in range(10) if a + b > 9][:32]
"""Conversations of one length: the mean over a batch is that of its microbatches."""
REWARD = """
def reward(prompt, output_ids, finish_reason):
    return float([int(one) for one in output_ids[:2]] == [77, 1])  # the tokens of an answer's form: \\boxed{1
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With a random model, and conversations."""
    folder = tmp_path_factory.mktemp("sft")
    made = run_preloaded(
        [ROOT / "examples/arithmetic/make_model.py", folder / "model", "--steps", 1], engine="sglang"
    )
    assert made.returncode == 0, made.stderr
    rows = [
        [{"role": "user", "content": f"{a}+{b}"}, {"role": "assistant", "content": ANSWER.format(a + b)}]
        for a, b in SUMS
    ]
    lines = [json.dumps({"messages": row}) + "\n" for row in rows]
    (folder / "conversations.jsonl").write_text("".join(lines))
    (folder / "prompts.jsonl").write_text(
        "".join(json.dumps({"messages": row[:1]}) + "\n" for row in rows[:8])
    )
    (folder / "reward.py").write_text(REWARD)
    return folder


def fine_tune(folder, *flags):
    given = cpu_flags(folder / "model")
    given[given.index("--tokenizer-type") + 1] = "SFTTokenizer"
    given.remove("--mock-data")
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"),
        *("--master-addr", "127.0.0.1", "--master-port", free_port()),
        *("-m", "megatron_rl_corr.launch", FINE_TUNED, *given),
        *("--sft", "--sft-tokenizer-prompt-format", "default"),
        *("--data-path", folder / "conversations.jsonl", "--seq-length", 24),
        *("--make-vocab-size-divisible-by", 83),
        *("--micro-batch-size", 16, "--global-batch-size", 32, "--expert-model-parallel-size", 2),
        *("--rollout-hf-checkpoint", folder / "model", *flags),
    ]
    environment = run_environment()
    environment["PYTHONPATH"] = f"{ROOT}:{environment['PYTHONPATH']}"
    return run_preloaded(forking([*map(str, command)])[1:], env=environment)


def loss_of(model, folder):
    """Mean over all tokens but the first of each conversation, by transformers in float64."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = [json.loads(line)["messages"] for line in (folder / "conversations.jsonl").open()]
    texts = [tokenizer.apply_chat_template(row, tokenize=False) for row in rows]
    ids = torch.tensor([tokenizer.encode(text, add_special_tokens=False) for text in texts])
    how = {"attn_implementation": "eager", "experts_implementation": "eager"}
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64, **how)
    with torch.no_grad():
        logprobs = torch.log_softmax(loaded(ids).logits[:, :-1], -1)
    return -logprobs.gather(-1, ids[:, 1:, None]).mean().item()


@pytest.fixture(scope="module")
def tuned(folder):
    """The folder that 30 steps wrote."""
    done = fine_tune(folder, "--train-iters", 30, "--lr", 3e-3, "--rollout-save-hf", folder / "tuned")
    assert done.returncode == 0, done.stderr[-6000:]
    assert [one.name for one in (folder / "tuned").iterdir()] == ["iter_0000030"]
    return folder / "tuned/iter_0000030"


def test_first_loss_when_fine_tuned_then_that_of_transformers_and_at_rate_0_nothing_moves(folder):
    done = fine_tune(folder, "--train-iters", 1, "--lr", 0, "--rollout-save-hf", folder / "same")
    assert done.returncode == 0, done.stderr[-6000:]
    losses = [float(one) for one in re.findall(r"^lm loss (\S+)$", done.stdout, re.M)]
    assert len(losses) == 2
    assert sum(losses) / 2 == pytest.approx(loss_of(folder / "model", folder), abs=1e-5)
    before, after = HFCheckpoint(folder / "model"), HFCheckpoint(folder / "same/iter_0000001")
    assert set(before.names) == set(after.names)
    assert all(torch.equal(before.tensor(name), after.tensor(name)) for name in before.names)


def test_run_when_begun_with_what_was_fine_tuned_then_it_samples_and_trains_that(folder, tuned):
    assert loss_of(tuned, folder) < 0.6 * loss_of(folder / "model", folder)
    server = PreloadedServer(
        tuned,
        dtype="float32",
        log_path=folder / "server.log",
        extra_arguments=[*sglang_arguments(), "--random-seed", "0"],
        environment=environment("sglang"),
    )
    with server:
        more = ["--expert-model-parallel-size", 2, "--rollout-input-key", "messages", "--save-interval", 5]
        done = launch(folder, "run", tuned, server.url, SCRIPT, *more, processes=2, checks="semantic")
    assert done.returncode == 0, done.stderr[-6000:]
    for step in untimed_steps(folder / "run"):
        assert step["rollout_corr/log_ratio_abs_max"] < 1e-4
    first, _ = untimed_steps(folder / "run")
    assert first["reward/mean"] > 0.5, "the form of an answer was learnt"


def test_fine_tuning_when_told_twice_then_it_goes_on_from_its_own_checkpoint(folder):
    steps = ["--train-iters", 2, "--lr", 3e-3]
    saved = ["--save", folder / "saved", "--load", folder / "saved", "--save-interval", 5]
    saved += ["--rollout-save-hf", folder / "second"]
    first = fine_tune(folder, *steps, *saved, "--exit-interval", 1)
    assert not (folder / "second/iter_0000001").exists()
    again = fine_tune(folder, *steps, *saved)
    whole = fine_tune(folder, *steps, "--rollout-save-hf", folder / "whole")
    for done in (first, again, whole):
        assert done.returncode == 0, done.stderr[-6000:]
    one, other = (HFCheckpoint(folder / name / "iter_0000002") for name in ("second", "whole"))
    assert all(torch.equal(one.tensor(name), other.tensor(name)) for name in one.names)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ["--sft-tokenizer-prompt-format", "nemotron-nano-v2"],
            "--sft-tokenizer-prompt-format nemotron-nano-v2: rollouts are prompted by the chat template",
        ),
        (["--tokenizer-model", "UNPADDED"], "its padding token is its end token"),
        (["--hidden-size", 48], "--hidden-size 48"),
        (["--make-vocab-size-divisible-by", 128], "makes an embedding of 128 rows, and the model has 83"),
        (["--rollout-url", "http://127.0.0.1:1"], "--rollout-url has no effect with --sft"),
        (["--rollout-save-hf-interval", 2], "--rollout-save-hf-interval"),
    ],
)
def test_fine_tuning_that_would_learn_something_else_then_refused_by_name(flags, words, folder, tmp_path):
    from transformers import AutoTokenizer

    unpadded = AutoTokenizer.from_pretrained(folder / "model")
    unpadded.pad_token = None
    unpadded.save_pretrained(tmp_path)
    done = fine_tune(folder, "--train-iters", 1, *[tmp_path if one == "UNPADDED" else one for one in flags])
    assert done.returncode != 0 and words in done.stderr, done.stderr[-6000:]
