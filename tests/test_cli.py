"""The command line as a user meets it, in a fresh process; its errors in this one, which has
imported what it needs.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl_corr import __version__, cli
from megatron_rl_corr.config.correction import PRESETS
from tests.commands.planner.published import QWEN3_4B

ROOT = Path(__file__).resolve().parents[1]


def run(*arguments: str, code: str | None = None) -> subprocess.CompletedProcess:
    command = ["-c", code] if code else ["-m", "megatron_rl_corr.cli", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, env=environment, timeout=120
    )


@pytest.fixture
def run_here(capsys):
    """run_here(*arguments): as `run`, by a call."""

    def called(*arguments: str) -> subprocess.CompletedProcess:
        try:
            status = cli.main(list(arguments))
        except SystemExit as left:
            status = left.code
        return subprocess.CompletedProcess(arguments, status, *capsys.readouterr())

    return called


@pytest.mark.parametrize(
    "argument, words",
    [
        ("--help", ("report", "presets")),
        ("presets", ("slime_mis", "m2po")),
        ("plan --gpus 8 --hf-checkpoint {model}", ("Training on 4 GPUs",)),
        ("model-flags {model}", ("--num-layers 36",)),
    ],
)
def test_command_that_needs_no_training_when_run_then_it_answers_without_importing_torch(
    argument, words, tmp_path
):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_4B))
    argument = argument.format(model=tmp_path)
    code = f"""
import sys
from megatron_rl_corr import cli
try:
    cli.main("{argument}".split())
finally:
    print("loaded", [name for name in ("torch", "numpy", "matplotlib") if name in sys.modules])
"""
    result = run(code=code)
    assert result.returncode == 0, result.stderr
    assert all(word in result.stdout for word in words)
    assert "loaded []" in result.stdout


def test_presets_when_the_reader_has_gone_then_no_error_is_printed():
    reading, writing = os.pipe()
    os.close(reading)
    result = subprocess.run(
        [sys.executable, "-m", "megatron_rl_corr.cli", "presets"],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        timeout=120,
    )
    os.close(writing)
    assert (result.returncode, result.stderr) == (141, "")


def test_version_when_asked_then_name_and_version():
    assert run("--version").stdout == f"megatron-rl-corr {__version__}\n"


def test_model_flags_of_a_folder_then_one_line_that_a_shell_can_split(tmp_path):
    config = {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 2,
        "hidden_size": 8,
        "intermediate_size": 16,
        "vocab_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [],
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = run("model-flags", str(tmp_path))
    assert result.returncode == 0, result.stderr
    words = result.stdout.split()
    assert words[:2] == ["--num-layers", "2"] and words[words.index("--moe-layer-freq") + 1] == "[0,1]"
    assert result.stdout.count("\n") == 1 and "'" not in result.stdout


def test_model_flags_when_there_is_no_such_model_then_status_2_and_what_is_supported(run_here, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    result = run_here("model-flags", str(tmp_path))
    assert (
        result.returncode == 2
        and "supported: deepseek_v3, deepseek_v32, glm4_moe, glm4_moe_lite, glm_moe_dsa, gpt_oss, kimi_k2"
        in result.stderr
    )


def test_report_when_the_folder_holds_a_run_then_one_line_says_where_the_page_is(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n{"step": 2, "rew')
    result = run("report", str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"report: {tmp_path / 'report.html'}\n"
    assert (tmp_path / "report.html").is_file() and (tmp_path / "overview.png").is_file()
    assert "metrics.jsonl:2: the last line is incomplete and was left out" in result.stderr


@pytest.mark.parametrize(
    "content, words",
    [
        (None, "no metrics.jsonl in"),
        ("", "metrics.jsonl holds no steps; let the run finish at least one step"),
        ('{"step": 1}\nnonsense\n{"step": 3}\n', "metrics.jsonl:2: not a step's metrics"),
    ],
)
def test_report_when_the_metrics_are_unusable_then_status_2_and_one_line_of_reason(
    run_here, tmp_path, content, words
):
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    result = run_here("report", str(tmp_path))
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.startswith("megatron-rl-corr report: error: ") and words in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "report.html").exists()


def test_report_when_the_folder_is_missing_then_status_2_and_its_name(tmp_path):
    result = run("report", str(tmp_path / "nowhere"))
    assert result.returncode == 2
    assert result.stderr == (
        f"megatron-rl-corr report: error: no such folder: {tmp_path / 'nowhere'}; "
        "give the folder that the run wrote into\n"
    )


def test_presets_when_listed_then_a_table_of_all_within_110_columns():
    header, *lines = run("presets").stdout.splitlines()
    assert header.split() == ["preset", "weights", "keeps", "loss"]
    assert max(map(len, lines)) <= 110
    starts = [header.index(word) for word in ("preset", "weights", "keeps", "loss")]
    cells = [[line[a:b].strip() for a, b in zip(starts, [*starts[1:], None], strict=True)] for line in lines]
    table = {row[0]: row[1:] for row in cells if row[0]}
    assert list(table) == list(PRESETS)
    assert table["disabled"] == ["1", "all", "ppo_clip"]
    assert table["decoupled_token_icepop"] == ["token, 0 outside [0.5, 5]", "all", "ppo_clip"]
    assert table["decoupled_k3_rs"] == ["1", "seq_mean_k3 <= 0.01", "ppo_clip"]
    assert table["bypass_pg_is"] == ["sequence, at most 2", "all", "reinforce, bypass"]
    assert table["ms_swift_sequence_mask"] == ["geometric, 0 above 2", "all", "ppo_clip"]
    assert table["slime_mis"] == ["token, at most 2, mean 1", "token_ratio in [0.5, 2]", "ppo_clip"]
    assert ["", "", "seq_max_ratio >= 0.0001", ""] in cells
    assert table["nemo_rl_seq_mask_tis"] == [
        "token, no bound",
        "seq_mean_ratio in [0.999, 1.002]",
        "ppo_clip",
    ]
    assert table["m2po"] == ["1", "m2 <= 0.04", "ppo_clip"]
    assert table["vespo"] == ["sequence, w^k e^(l (1 - w))", "all", "reinforce, bypass"]
    assert table["trm"] == ["1", "seq_max_binary_kl <= 0.05", "ppo_clip"]
    assert table["prime_rl"] == ["1", "all", "dppo_tv, bypass"]


@pytest.mark.parametrize("arguments", [(), ("reprot",)])
def test_command_when_missing_or_unknown_then_status_2_and_usage(arguments):
    result = run(*arguments)
    assert result.returncode == 2 and "usage: megatron-rl-corr" in result.stderr


def test_report_when_matplotlib_is_not_installed_then_the_extra_that_brings_it(tmp_path):
    absent = "import sys; sys.modules['matplotlib'] = None"
    asked = run(
        code=f"{absent}\nfrom megatron_rl_corr import cli\nsys.exit(cli.main(['report', {str(tmp_path)!r}]))"
    )
    assert (asked.returncode, asked.stdout) == (2, "")
    assert asked.stderr == (
        "megatron-rl-corr report: error: needs matplotlib: pip install 'megatron_rl_corr[report]'\n"
    )
