"""A new rejection rule, with an input of its own, costs one file of the package; a new policy loss costs two.

Each test patches a copy of the package, and a process that imports the copy uses what was added.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

RULE_INPUT = """"doubt": RuleInput(
        "how much a made-up judge doubts each token", of_batch=lambda batch: batch.tokens / 10,
    ),
    """
RULE = """"judged": Divergence(
        "a made-up judge's doubt", lambda ratios: ratios.inputs["doubt"],
        levels=("token", "seq_mean"), needs="doubt",
        one_bound="it is 0 without a doubt", check=_below_one("doubt", "use 0.5, for example"),
    ),
    """
USE_RULE = """
from megatron_rl_corr import RolloutCorrectionConfig, compute_correction
from megatron_rl_corr.config.rules import RejectionRule, check_trainer_inputs
from megatron_rl_corr.integrations.settings import check_settings
from megatron_rl_corr.mcore.batch.rollout_batch import RolloutBatch
from megatron_rl_corr.mcore.loss import make_loss_inputs
from megatron_rl_corr.mcore.scoring import OldPass
from megatron_rl_corr.reduce.collectives import ParallelGroups

config = RolloutCorrectionConfig.from_dict(
    {"rollout_rs": "token_judged,seq_mean_judged", "rollout_rs_threshold": "0.8,0.52"}
)
logprobs, ids = torch.full((4,), -1.0), torch.tensor([0, 0, 1, 1])
# Means: 0.5, which is kept, and 0.55; the token of 0.9 goes alone.
doubt = torch.tensor([0.1, 0.9, 0.5, 0.6])
given = (logprobs, logprobs, torch.ones(4), ids)
correction = compute_correction(*given, num_sequences=2, config=config, doubt=doubt)
batch = dataclasses.replace(
    RolloutBatch.empty([2, 2], 2),
    tokens=torch.tensor([1, 9, 5, 6]),
    loss_mask=torch.ones(4, dtype=torch.bool),
    rollout_logprobs=logprobs,
    rewards=torch.tensor([0.0, 1.0]),
)
trained = make_loss_inputs(batch, OldPass(logprobs), config, ParallelGroups(), group_size=2).correction
shown = {
    "help": help_text(),
    "docs": generate_docs.rules_page(),
    "mask": correction.mask.tolist(),
    "trained": trained.mask.tolist(),
    "metrics": {name: metric.value() for name, metric in correction.metrics.items()},
    "level": refusal(RejectionRule, "seq_sum", "judged", upper=0.5),
    "bound": refusal(RejectionRule, "token", "judged", upper=1.5),
    "side": refusal(RejectionRule, "token", "judged", lower=0.5),
    "missing": refusal(compute_correction, *given, num_sequences=2, config=config),
    "bypass": refusal(check_trainer_inputs, config.rollout_rs, None, bypass_mode=True),
    "elsewhere": refusal(check_settings, config, "slime and miles"),
}
"""

LOSS = """"made_up": LossKind(
        "made_up", "a made-up square", aggregation="seq-mean-token-sum", advantage="raw"
    ),
    """
FORMULA = '''"""A made-up loss, for T tokens."""

from megatron_rl_corr.core.losses.ratio import inside


def made_up(inputs, config, *, metrics=None):
    """(log pi_theta - A)^2 per token; [T], 0 outside the mask."""
    return inside(inputs.mask, (inputs.logprobs - inputs.advantages).square())
'''
USE_LOSS = """
from megatron_rl_corr import RolloutCorrectionConfig, compute_correction, policy_loss

config = RolloutCorrectionConfig.from_dict({"loss": "made_up"})
old, ids = torch.tensor([-1.0, -2.0, -3.0]), torch.zeros(3, dtype=torch.int64)
correction = compute_correction(old, old, torch.tensor([1, 1, 0]), ids, num_sequences=1, config=config)
now = old.clone().requires_grad_()
loss = policy_loss("made_up", now, old, torch.tensor([1.0, 0.0, 7.0]), correction, config)
loss.sum().backward()
shown = {
    "help": help_text(),
    "docs": generate_docs.losses_page(),
    "loss": loss.tolist(),
    "gradient": now.grad.tolist(),
    "settings": [config.aggregation, config.advantage_kind],
    "clip": refusal(RolloutCorrectionConfig, loss="made_up", clip_ratio_high=0.2),
}
"""

BEFORE = """
import argparse, dataclasses, importlib.util, json, sys
from pathlib import Path
import torch
import megatron_rl_corr
from megatron_rl_corr.config import flags

assert megatron_rl_corr.__file__.startswith(sys.argv[1])
spec = importlib.util.spec_from_file_location("generate_docs", Path(sys.argv[1]) / "scripts/generate_docs.py")
generate_docs = importlib.util.module_from_spec(spec)
spec.loader.exec_module(generate_docs)


def help_text():
    return " ".join(flags.add_flags(argparse.ArgumentParser()).format_help().split())


def refusal(call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except ValueError as error:
        return str(error)
"""


@pytest.fixture
def copy(tmp_path) -> Path:
    for name in ("megatron_rl_corr", "scripts"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path.resolve()


def insert(file: Path, after: str, text: str) -> None:
    before = file.read_text()
    assert before.count(after) == 1
    file.write_text(before.replace(after, after + text))


def changed(copy: Path) -> list[str]:
    """Files of the copy that the package lacks, or has otherwise."""
    before, after = (
        {
            path.relative_to(root).as_posix(): path.read_bytes()
            for path in (root / "megatron_rl_corr").rglob("*.py")
        }
        for root in (ROOT, copy)
    )
    assert before.keys() <= after.keys()
    return sorted(name for name in after if before.get(name) != after[name])


def show(copy: Path, use: str) -> dict:
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", f"{BEFORE}{use}\nprint(json.dumps(shown))", str(copy)],
        capture_output=True,
        text=True,
        cwd=copy,
        env=os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"},
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


def test_rule_with_an_input_when_added_then_one_file_and_it_is_shown_checked_evaluated_and_refused(copy):
    rules = copy / "megatron_rl_corr/config/rules.py"
    insert(rules, "RULE_INPUTS: dict[str, RuleInput] = {\n    ", RULE_INPUT)
    insert(rules, "DIVERGENCES: dict[str, Divergence] = {\n    ", RULE)
    assert changed(copy) == ["megatron_rl_corr/config/rules.py"]
    shown = show(copy, USE_RULE)
    assert "{token,seq_mean}_judged (upper bound): a made-up judge's doubt" in shown["help"]
    assert "| `judged` | `token`, `seq_mean` | " in shown["docs"]
    assert (
        "| `doubt` | how much a made-up judge doubts each token | `judged` | not bypass mode |"
        in shown["docs"]
    )
    assert shown["mask"] == shown["trained"] == [True, False, False, False]
    metrics = shown["metrics"]
    assert (
        metrics["rejected_fraction/token_judged"] == 0.25
        and metrics["rejected_fraction/seq_mean_judged"] == 0.5
    )
    assert "seq_sum_judged does not exist; use token_judged or seq_mean_judged" in shown["level"]
    assert "must be a doubt below 1, got 1.5; use 0.5, for example" in shown["bound"]
    assert "takes one upper bound, got a lower bound of 0.5: it is 0 without a doubt" in shown["side"]
    missing = (
        "token_judged needs doubt, how much a made-up judge doubts each token; pass doubt, or use "
        "another rule"
    )
    assert shown["missing"] == missing
    assert "`rollout_rs` token_judged looks at how much a made-up judge doubts each token" in shown["bypass"]
    assert "which slime and miles do not give; use another rule" in shown["elsewhere"]


def test_loss_when_added_then_two_files_and_it_is_shown_and_computed(copy):
    insert(copy / "megatron_rl_corr/config/losses.py", "LOSS_KINDS: dict[str, LossKind] = {\n    ", LOSS)
    (copy / "megatron_rl_corr/core/losses/made_up.py").write_text(FORMULA)
    assert changed(copy) == ["megatron_rl_corr/config/losses.py", "megatron_rl_corr/core/losses/made_up.py"]
    shown = show(copy, USE_LOSS)
    assert "made_up: a made-up square;" in shown["help"]
    assert (
        "| `made_up` | a made-up square | `made_up` | none |  | `seq-mean-token-sum` | `raw` |"
        in shown["docs"]
    )
    # (-1 - 1)^2 and (-2 - 0)^2, with gradients 2 (-2); the third token is outside the mask.
    assert shown["loss"] == [4.0, 4.0, 0.0] and shown["gradient"] == [-4.0, -4.0, 0.0]
    assert shown["settings"] == ["seq-mean-token-sum", "raw"]
    assert "clip_ratio_high" in shown["clip"]
