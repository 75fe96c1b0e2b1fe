"""The launcher's check of a command line, on every release whose wheel has megatron.training.

Up to 0.17 `pretrain` itself parses the flags; later the script does, and makes a configuration
of them before it.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl_corr.models.megatron_flags import model_flags
from tests.commands.planner.published import QWEN3_4B
from tests.examples.recipe_inputs import write_gsm8k, write_model
from tests.matrix.releases import WITH_TRAINING, checkout, chosen, release_environment
from tests.tiers import long

HERE = Path(__file__).resolve().parent
RELEASES = [*checkout(), *(release for release in WITH_TRAINING if release in chosen())]


@long
@pytest.mark.parametrize("release", RELEASES)
def test_check_of_a_command_line_then_it_ends_where_training_would_begin_or_with_what_is_wrong(
    release, tmp_path
):
    write_model(tmp_path, QWEN3_4B)
    write_gsm8k(tmp_path / "data.parquet")
    flags = [
        *model_flags(QWEN3_4B),
        "--tensor-model-parallel-size",
        2,
        "--sequence-parallel",
        "--bf16",
        "--micro-batch-size",
        1,
        "--global-batch-size",
        16,
        "--seq-length",
        512,
        "--train-iters",
        2,
        "--lr",
        1e-6,
        "--eval-iters",
        0,
        "--tokenizer-type",
        "NullTokenizer",
        "--mock-data",
        "--no-gradient-accumulation-fusion",
        "--rollout-url",
        "http://127.0.0.1:30000",
        "--rollout-hf-checkpoint",
        tmp_path,
        "--rollout-max-new-tokens",
        256,
        "--rollout-prompts",
        tmp_path / "data.parquet",
        "--rollout-input-key",
        "question",
        "--rollout-label-key",
        "answer",
        "--rollout-reward-function",
        "math",
    ]

    def check(*more):
        words = [
            "-m",
            "megatron_rl_corr.launch",
            "--rollout-corr-check",
            4,
            HERE / "pretrain_any.py",
            *flags,
            *more,
        ]
        return subprocess.run(
            [sys.executable, *map(str, words)],
            env=release_environment(release),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
        )

    passed = check()
    assert passed.returncode == 0, passed.stderr[-3000:]
    assert "4 processes: tensor 2, pipeline 1" in passed.stdout and "prompts: 32 rows" in passed.stdout
    refused = check("--attention-dropout", 0.1)
    assert refused.returncode == 2 and "--attention-dropout 0.1" in refused.stderr, refused.stderr[-3000:]
