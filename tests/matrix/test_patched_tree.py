"""A patched Megatron under plain torchrun, on every release whose wheel has megatron.training: no
launcher anywhere.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl_corr.integrations import patch_tree as patching
from tests.matrix.patched import copied_tree, cpu_flags, process_environment, unchanged
from tests.matrix.releases import OVERLAID, PATCHED, checkout, chosen
from tests.test_launch import write_inputs
from tools.local_server import free_port

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RELEASES = (*PATCHED, *checkout()) if chosen() == OVERLAID else PATCHED[-1:]
in_the_matrix = pytest.mark.skipif(
    chosen() != OVERLAID, reason="make test-matrix runs it; test_own_fork.py has such a run of one"
)
REWARD = (
    "def reward(prompt, output_ids, finish_reason):\n    return sum(int(i) % 2 for i in output_ids) / 8\n"
)


@pytest.fixture(scope="module", params=RELEASES)
def tree(request, tmp_path_factory):
    """(release, folder) of a copy of that release's wheel; patched by the command."""
    folder = copied_tree(tmp_path_factory.mktemp("patched") / "fork", request.param)
    for what in ("--check", "--apply", "--apply"):
        run = subprocess.run(
            [sys.executable, "-m", "megatron_rl_corr.cli", "patch", "--megatron-root", folder, what],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        assert run.returncode == 0 and f"megatron-core {request.param} in {folder}" in run.stdout, run.stderr
    assert (folder / patching.FILE).read_text().count(patching.HUNK) == 1
    return request.param, folder


@pytest.fixture
def server(sglang_server_fp32, tiny_moe_dir):
    with unchanged(sglang_server_fp32, tiny_moe_dir):
        yield sglang_server_fp32


def command(tmp_path, model, *more):
    """torchrun of a script that knows nothing of rollouts."""
    (tmp_path / "my_reward.py").write_text(REWARD)
    (tmp_path / "prompts.jsonl").write_text(
        "".join(f'{{"input_ids": [3, 1, 4, {n}]}}\n' for n in range(4, 8))
    )
    return [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        "1",
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        str(free_port()),
        HERE / "pretrain_any.py",
        *cpu_flags(model),
        *map(str, more),
    ]


def run(words, folder, asked="1"):
    environment = process_environment(folder, ROOT) | {"MEGATRON_RL_CORR": asked}
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=200)


@in_the_matrix
def test_patched_tree_when_asked_for_then_plain_torchrun_takes_corrected_steps(
    tree, server, tiny_moe_dir, tmp_path
):
    ours = [
        "--rollout-url",
        server.url,
        "--rollout-hf-checkpoint",
        tiny_moe_dir,
        "--rollout-prompts",
        tmp_path / "prompts.jsonl",
        "--rollout-reward-function",
        f"{tmp_path / 'my_reward.py'}:reward",
        "--rollout-group-size",
        4,
        "--rollout-max-new-tokens",
        8,
        "--rollout-correction-preset",
        "decoupled_token_is",
        "--rollout-log-dir",
        tmp_path / "log",
    ]
    done = run(command(tmp_path, tiny_moe_dir, *ours), tree[1])
    assert done.returncode == 0, done.stderr[-4000:]
    assert "lm loss" not in done.stdout, "the script's own step was taken"
    steps = [json.loads(line) for line in (tmp_path / "log/metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2] and [step["weight_version"] for step in steps] == [1, 2]
    for step in steps:
        assert step["grad_norm"] > 0 and step["skipped"] == 0 and step["rollout_corr/valid_tokens"] > 8
        assert 0 <= step["rollout_corr/k3_kl"] < 1e-6, (
            "float32 on both sides, of the same weights after every push"
        )


@in_the_matrix
def test_patched_tree_when_nobody_asks_then_the_script_is_its_own(tree, tiny_moe_dir, tmp_path):
    done = run(command(tmp_path, tiny_moe_dir), tree[1], asked="0")
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("lm loss") == 4


PROBE = """
import sys
from megatron_rl_corr import plugin

plugin.prepare(sys.argv[1:])()
import megatron.training
from megatron.training import training


def ours(function):
    found = getattr(function, "__wrapped__", None)
    return ("megatron_rl_corr" in function.__code__.co_filename) + (0 if found is None else ours(found))


replaced = [
    training.train_step,
    training.setup_model_and_optimizer,
    megatron.training.arguments.add_megatron_arguments,
]
print("FILE", megatron.training.__file__)
print("OURS", *[ours(function) for function in replaced], ours(training.pretrain))
"""


@pytest.fixture
def ours(tmp_path):
    """The flags that every run needs, of files that are there."""
    write_inputs(tmp_path)
    words = {
        "--rollout-hf-checkpoint": "model",
        "--rollout-prompts": "prompts.jsonl",
        "--rollout-reward-function": "reward.py:reward",
    }
    return [
        "--rollout-url",
        "http://127.0.0.1:9",
        *[word for flag, path in words.items() for word in (flag, f"{tmp_path / path}")],
    ]


def test_patched_tree_when_the_launcher_is_used_too_then_every_function_is_replaced_once(tree, ours):
    done = run([sys.executable, "-W", "ignore", "-c", PROBE, *ours], tree[1])
    assert f"FILE {tree[1] / patching.FILE}\nOURS 1 1 1 0\n" in done.stdout, done.stderr[-3000:]


@in_the_matrix
def test_patched_tree_when_a_flag_is_wrong_then_one_line_and_status_2(tree, ours):
    words = [
        sys.executable,
        "-W",
        "ignore",
        "-c",
        "import megatron.training",
        *ours,
        "--rollout-iss",
        "token",
    ]
    done = run(words, tree[1])
    assert done.returncode == 2, done.stderr
    told = [line for line in done.stderr.splitlines() if line.startswith("MEGATRON_RL_CORR: ")]
    assert told == ["MEGATRON_RL_CORR: unknown flag --rollout-iss; did you mean --rollout-is?"]
