"""docs/get_started/first_gpu_run.md: its flags pass Megatron's, SGLang's and our own parsers and checks."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_rl_corr.models.megatron_flags import model_flags
from tests.preloaded import run_preloaded
from tools.cpu import environment

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/get_started/first_gpu_run.md").read_text()
QWEN3_4B = {
    "model_type": "qwen3", "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0, "max_position_embeddings": 40960, "tie_word_embeddings": True, "attention_bias": False,
    "hidden_act": "silu",
}  # fmt: skip
MEGATRON = """
import sys
from megatron.training import arguments
from megatron_rl_corr.config.flags import add_flags
from megatron_rl_corr.mcore.run_flags import check_megatron_arguments

args = arguments.parse_args(extra_args_provider=add_flags)
assert args.world_size == 4
check_megatron_arguments(args)
print("accepted", args.seq_length, args.rollout_group_size)
"""


SGLANG = """
import argparse
from sglang.srt.server_args import ServerArgs

parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
args = parser.parse_args()
print(args.model_path, args.dtype, args.port)
"""


def command(start):
    """The words of the page's command that contains `start`, from there on."""
    [line] = [line for line in PAGE.replace("\\\n", " ").splitlines() if start in line and line.startswith("    ")]
    return line[line.index(start) :]


def blocks():
    """What the page's two files define: prompts.py and math_reward.py."""
    made = []
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        made.append({"__name__": "first_gpu_run"})
        exec(compile(block, "first_gpu_run.md", "exec"), made[-1])
    return made


@pytest.fixture
def words(tmp_path):
    """The training command's words behind the script, with a model's folder and files that exist."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_4B))
    line = command("torchrun").replace("$(megatron-rl-corr model-flags $MODEL)", shlex.join(model_flags(QWEN3_4B)))
    found = shlex.split(line.replace("$MODEL", str(tmp_path)))
    return found[found.index("$MEGATRON/pretrain_gpt.py") + 1 :]


def test_training_flags_of_the_page_then_our_parser_and_megatrons_take_them(words, tmp_path):
    variables = environment("megatron") | {"WORLD_SIZE": "4", "RANK": "0", "LOCAL_RANK": "0"}
    (tmp_path / "parse.py").write_text(MEGATRON)
    run = run_preloaded([tmp_path / "parse.py", *words], env=variables, cwd=ROOT)
    assert run.returncode == 0, run.stderr[-2000:]
    assert "accepted 5120 8" in run.stdout


def test_training_flags_of_the_page_then_the_plugin_reads_them(words):
    code = "import sys; from megatron_rl_corr.plugin import prepare; prepare(sys.argv[1:])"
    run = subprocess.run([sys.executable, "-c", code, *words], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_every_flag_of_the_page_then_a_table_explains_it(words):
    explained = {
        flag for row in PAGE.splitlines() if row.startswith("| `") for flag in re.findall(r"--[a-z0-9-]+", row)
    }
    of_the_model = {word for word in model_flags(QWEN3_4B) if word.startswith("--")}
    given = {word for word in [*words, *command("--model-path").split()] if word.startswith("--")}
    assert given - explained - of_the_model == set()


def test_server_flags_of_the_page_then_sglang_has_them(tmp_path):
    line = command("--model-path").replace("$((30000 + i)) ", "30000 ").removesuffix(" &")
    (tmp_path / "parse.py").write_text(SGLANG)
    run = run_preloaded([tmp_path / "parse.py", *shlex.split(line.replace("$MODEL", "MODEL"))], engine="sglang")
    assert run.returncode == 0, run.stderr[-2000:]
    assert "MODEL bfloat16 30000" in run.stdout


def test_batch_of_the_page_then_it_is_whole_groups_on_each_replica(words):
    given = {flag: int(words[words.index(flag) + 1]) for flag in (
        "--global-batch-size", "--rollout-group-size", "--tensor-model-parallel-size", "--seq-length",
        "--rollout-max-new-tokens",
    )}  # fmt: skip
    replicas = 4 // given["--tensor-model-parallel-size"]
    assert given["--global-batch-size"] % (replicas * given["--rollout-group-size"]) == 0
    assert given["--seq-length"] == 1024 + given["--rollout-max-new-tokens"]


def test_prompts_and_reward_of_the_page_then_a_right_answer_gets_1():
    prompts, rewards = blocks()
    tokenizer = SimpleNamespace(
        apply_chat_template=lambda messages, tokenize, add_generation_prompt: f"<user>{messages[0]['content']}",
        decode=lambda ids: "".join(map(chr, ids)),
    )
    row = prompts["prompt_row"](tokenizer, "What is 6 x 7?", "42")
    assert row["prompt"].startswith("<user>What is 6 x 7?") and row["answer"] == "42"
    rewards["tokenizer"], prompt = tokenizer, SimpleNamespace(metadata={"answer": "42"})
    answers = {"so \\boxed{42}": 1.0, "\\boxed{42}, no, \\boxed{41}": 0.0, "42": 0.0, "\\boxed{ 42 }": 1.0}
    for text, expected in answers.items():
        assert rewards["reward"](prompt, list(map(ord, text)), "stop") == expected
