"""The recipes' real command lines, at the real sizes, through every parser that would read them;
the script's order.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from tests.examples.recipe_inputs import CONFIGS, write_dapo, write_gsm8k, write_model
from tests.preloaded import run_preloaded
from tests.tiers import in_matrix, long, matrix
from tools.cpu import environment
from tools.local_server import free_port

pytestmark = matrix

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "examples/recipes"
SERVERS = {"qwen3_4b": 4, "qwen3_30b_a3b": 2, "gpt_oss_20b": 4}


class Recipe:
    """run.sh of one model, its inputs, and a python that writes down what the script asks for."""

    def __init__(self, folder, name):
        self.name, self.folder, self.record = name, folder, folder / "record.jsonl"
        self.script, self.python = ROOT / "examples" / name / "run.sh", folder / "environment/bin/python"
        self._dry_runs = {}
        (folder / "model").mkdir()
        write_model(folder / "model", CONFIGS[name])
        write_gsm8k(folder / "gsm8k.parquet")
        write_dapo(folder / "dapo.parquet")
        self.python.parent.mkdir(parents=True)
        self.python.write_text(
            f'#!/bin/sh\nexec {sys.executable} {ROOT}/tests/examples/recording_python.py "$@"\n'
        )
        self.python.chmod(0o755)

    def run(self, *words, recorded=True, data="dapo", **variables):
        process = self.start(*words, recorded=recorded, data=data, **variables)
        try:
            out, error = process.communicate(timeout=300)
        except BaseException:
            process.kill()
            raise
        return subprocess.CompletedProcess(process.args, process.returncode, out, error)

    def start(self, *words, recorded=True, data="dapo", **variables):
        self.record.unlink(missing_ok=True)
        given = {
            "MODEL": self.folder / "model",
            "DATA": self.folder / f"{data}.parquet",
            "OUT": self.folder / "out",
            "PYTHON": self.python if recorded else sys.executable,
            "RECORD": self.record,
            "PYTHONPATH": ROOT,
            "PORT": 30000,
        }
        return subprocess.Popen(
            ["bash", self.script, *map(str, words)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.folder,
            # A shell traps no signal that was ignored as it began, as Ctrl-C is in what a script
            # has put behind it.
            preexec_fn=lambda: [
                signal.signal(each, signal.SIG_DFL) for each in (signal.SIGINT, signal.SIGHUP)
            ],
            env=os.environ | {name: str(value) for name, value in (given | variables).items()},
        )

    def asked(self, *start):
        """The recorded calls that begin with these words."""
        lines = [json.loads(line) for line in self.record.read_text().splitlines()]
        return [line for line in lines if line["words"][: len(start)] == list(start)]

    def words_of_dry_run(self, what, **variables):
        """What `--dry-run` gives dry_run.py server, or train; its plan is left out."""
        if (key := json.dumps(variables)) not in self._dry_runs:
            run = self.run("--dry-run", SKIP_PLAN=1, **variables)
            assert run.returncode == 0, run.stdout + run.stderr
            calls = [call["words"] for call in self.asked(str(RECIPES / "dry_run.py"))]
            self._dry_runs[key] = {words[1]: words[2:] for words in calls}
        return self._dry_runs[key][what]

    def check_training(self, *words, **variables):
        """The launcher's check of the trainer's command line with words behind it, in a fork
        that has Megatron.
        """
        flags = [*self.words_of_dry_run("train", **variables), *words]
        return run_preloaded(["-m", "megatron_rl_corr.launch", "--rollout-corr-check", *flags], cwd=ROOT)

    def plan(self):
        """What `--plan` prints, in lines."""
        run = self.run("--plan")
        assert run.returncode == 0, run.stderr
        return run.stdout.splitlines()


@pytest.fixture(scope="module", params=["qwen3_30b_a3b", *in_matrix("qwen3_4b")])
def recipe(request, tmp_path_factory):
    return Recipe(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module", params=["qwen3_30b_a3b", *in_matrix("qwen3_4b")])
def one_recipe(request, tmp_path_factory):
    return Recipe(tmp_path_factory.mktemp(f"one_{request.param}"), request.param)


@long
def test_dry_run_of_gpt_oss_then_every_parser_takes_the_flags_and_the_plan_fits(tmp_path):
    run = Recipe(tmp_path, "gpt_oss_20b").run("--dry-run", recorded=False)
    assert run.returncode == 0, run.stdout + run.stderr
    for words in (
        "The best layout that fits: TP 2, EP 4, DP 2",
        "bfloat16, 1 GPUs, port 30000",
        "4 processes: tensor 2, pipeline 1, context 1, expert 4, expert tensor 1, data 2",
        "prompts: 32 rows; router replay R3",
        "checked, and nothing was started",
    ):
        assert words in run.stdout
    (tmp_path / "other").mkdir()
    run = Recipe(tmp_path / "other", "gpt_oss_20b").run("--dry-run", COLOCATE=1)
    assert run.returncode == 2 and "gpt-oss is not colocated; leave it out" in run.stderr


@pytest.fixture(scope="module")
def sparse(tmp_path_factory):
    return Recipe(tmp_path_factory.mktemp("sparse"), "qwen3_30b_a3b")


@long
def test_dry_run_as_a_user_starts_it_then_every_parser_takes_the_flags(sparse):
    run = sparse.run("--dry-run", recorded=False)
    assert run.returncode == 0, run.stdout + run.stderr
    for words in (
        "The best layout that fits: TP 2, EP 4, DP 2",
        "bfloat16, 2 GPUs, port 30000",
        "4 processes: tensor 2, pipeline 1, context 1, expert 4, expert tensor 1, data 2",
        "16 prompts of 8; responses of at most 4096 tokens",
        "prompts: 32 rows; router replay R3",
        "checked, and nothing was started",
    ):
        assert words in run.stdout


@pytest.mark.parametrize("data", ["gsm8k", *in_matrix("dapo")])
def test_training_flags_then_megatron_and_our_checks_take_them_with_data_of_both_kinds(recipe, data):
    checked = recipe.check_training(data=data)
    assert checked.returncode == 0, checked.stderr[-2000:]
    assert "checked, and nothing was started" in checked.stdout and "prompts: 32 rows" in checked.stdout


@long
def test_training_flags_of_two_nodes_then_they_are_checked_for_16_processes(one_recipe):
    checked = one_recipe.check_training(NODES=2)
    assert checked.returncode == 0, checked.stderr[-2000:]
    assert "16 processes: tensor 2" in checked.stdout and "data 8" in checked.stdout


def test_training_flags_when_colocated_then_they_are_checked_for_all_8_gpus(one_recipe):
    checked = one_recipe.check_training(COLOCATE=1)
    assert checked.returncode == 0, checked.stderr[-2000:]
    assert "8 processes: tensor 2" in checked.stdout and "data 4" in checked.stdout
    assert "--rollout-colocate" in one_recipe.words_of_dry_run("train", COLOCATE=1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--rollout-weight-transport", "distributed"],
            "--rollout-colocate with --rollout-weight-transport distrib",
        ),
        *in_matrix(
            (["--rollout-max-lag", 1], "--rollout-colocate with --rollout-max-lag 1: servers have no memory"),
        ),
        (
            ["--rollout-engine", "vllm"],
            "--rollout-colocate with --rollout-engine vllm: the release of its memo",
        ),
        (
            ["--log-params-norm"],
            "--log-params-norm with --rollout-colocate: Megatron reads the optimizer's main",
        ),
        *in_matrix(
            (
                ["--optimizer-offload-fraction", 0.5],
                "--optimizer-offload-fraction 0.5 with --rollout-colocate: the share",
            ),
        ),
        (
            ["--no-optimizer-cpu-offload"],
            "--use-precision-aware-optimizer with --rollout-colocate: it updates",
        ),
    ],
)
def test_training_flags_when_colocated_and_one_leaves_no_turns_then_refused_by_name(sparse, words, message):
    flags = sparse.words_of_dry_run("train", COLOCATE=1)
    if words == ["--no-optimizer-cpu-offload"]:  # Megatron has no such flag
        flags, words = [flag for flag in flags if flag != "--optimizer-cpu-offload"], []
    checked = run_preloaded(
        ["-m", "megatron_rl_corr.launch", "--rollout-corr-check", *flags, *words], cwd=ROOT
    )
    assert checked.returncode == 2, checked.stdout[-2000:]
    assert message in checked.stderr, checked.stderr[-2000:]


def test_run_when_colocated_then_every_server_sees_all_gpus_and_takes_its_own(one_recipe):
    port = free_port(8)
    run = one_recipe.run(PORT=port, COLOCATE=1)
    assert run.returncode == 0, run.stdout + run.stderr
    servers, count = one_recipe.asked("-m", "sglang.launch_server"), 2 * SERVERS[one_recipe.name]
    every = ",".join(map(str, range(8)))
    assert [server["CUDA_VISIBLE_DEVICES"] for server in servers] == [every] * count
    words = [server["words"] for server in servers]
    first = sorted(int(line[line.index("--base-gpu-id") + 1]) for line in words)
    assert first == [number * 8 // count for number in range(count)]
    assert all("--enable-memory-saver" in line for line in words)
    [training] = one_recipe.asked("-m", "torch.distributed.run")
    assert training["CUDA_VISIBLE_DEVICES"] == every and training["words"][3:5] == ["--nproc_per_node", "8"]


def test_run_when_colocated_over_several_nodes_then_refused(sparse):
    run = sparse.run("--dry-run", COLOCATE=1, NODES=2)
    assert (
        run.returncode == 2
        and "COLOCATE=1 with NODES=2: weights are handed over on one machine" in run.stderr
    )


def test_server_flags_then_sglang_has_them(recipe):
    flags = [
        *recipe.words_of_dry_run("server", COLOCATE=1),
        "--base-gpu-id",
        "2",
        "--enable-deterministic-inference",
    ]
    assert flags[-1] in recipe.script.read_text()
    variables = environment("sglang") | {"RECIPE_SERVER_FLAGS": "1"}
    run = run_preloaded([RECIPES / "dry_run.py", "server", *flags], engine="sglang", env=variables)
    assert run.returncode == 0, run.stderr[-2000:]
    wrong = run_preloaded(
        [RECIPES / "dry_run.py", "server", *flags, "--tp-sise", 2], engine="sglang", env=variables
    )
    assert wrong.returncode == 2 and "unrecognized arguments: --tp-sise" in wrong.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--expert-model-parallel-size", 3],
            "Number of experts should be a multiple of expert model parallel_size",
        ),
        *in_matrix(
            (["--tensor-model-parallel-sise", 2], "unrecognized arguments: --tensor-model-parallel-sise 2"),
        ),
        (
            ["--rollout-group-sise", 8],
            "unknown flag --rollout-group-sise; did you mean --rollout-group-size?",
        ),
        (["--hidden-size", 4096], "--hidden-size 4096: config.json says 2048"),
        (["--rollout-label-key", "solution"], 'dapo.parquet: row 0: no key "solution"; the row has'),
        *in_matrix(
            (["--rollout-reward-function", "nowhere.py:reward"], "nowhere.py"),
        ),
        # 24 samples over 2 replicas are 12 each: one prompt of 8, and half of another.
        (
            ["--global-batch-size", 24],
            "--global-batch-size 24 must be a multiple of --rollout-group-size 8 times the",
        ),
        (
            ["--rollout-eval-prompts", "nowhere.parquet", "--eval-interval", 9],
            "--rollout-eval-prompts: nowhere.parq",
        ),
        *in_matrix(
            (
                ["--rollout-environment", "nowhere.py:Shop"],
                "--rollout-environment: there is no file nowhere.py",
            ),
        ),
        # Folders that different ranks write: every one, leaders, those that send weights, the last one.
        (["--save", "{model}/config.json"], "--save {model}/config.json can't be made"),
        *in_matrix(
            (["--rollout-trace", "{model}/config.json"], "--rollout-trace {model}/config.json can't be made"),
        ),
        (["--rollout-save-hf", "{model}/config.json"], "--rollout-save-hf {model}/config.json can't be made"),
        # Qwen3's tokenizer has fewer ids than its embedding has rows, as this one.
        (
            ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "{model}"],
            "HuggingFaceTokenizer: its tokenizer makes an embedding of 256 rows, and the model has 151936",
        ),
    ],
)
def test_training_flags_when_one_is_wrong_then_refused_by_name(sparse, words, message):
    checked = sparse.check_training(*[str(word).format(model=sparse.folder / "model") for word in words])
    assert checked.returncode == 2, checked.stdout[-2000:]
    assert message.format(model=sparse.folder / "model") in checked.stderr, checked.stderr[-2000:]


def test_training_flags_when_the_model_has_no_weights_or_cut_ones_then_told_or_refused(sparse):
    checked = sparse.check_training()
    assert f"weights: {sparse.folder / 'model'} has none yet, and a run would need them" in checked.stdout
    weights = sparse.folder / "model/model.safetensors"
    weights.write_bytes(b"cut")
    try:
        checked = sparse.check_training()
    finally:
        weights.unlink()
    assert checked.returncode == 2, checked.stdout[-2000:]
    assert f"{weights} can't be read as safetensors" in checked.stderr, checked.stderr[-2000:]


def make_checkout(folder):
    """run.sh in a checkout that holds the recipes alone."""
    script = folder / "examples/qwen3_30b_a3b/run.sh"
    script.parent.mkdir(parents=True)
    (script.parents[1] / "recipes").symlink_to(RECIPES)
    return script


def test_run_when_the_environment_is_the_cpus_then_refused_and_the_dry_run_says_so(sparse, tmp_path):
    checkout = make_checkout(tmp_path)
    checkout.write_text(sparse.script.read_text())
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").symlink_to(sparse.python)
    sparse.script, kept, message = (
        checkout,
        sparse.script,
        f"{tmp_path}/.venv was made on a machine without a GPU",
    )
    try:
        for words in ([], ["--serve"], ["--train"]):
            run = sparse.run(*words, PYTHON="", START_TIMEOUT_S=0)
            assert run.returncode == 2 and message in run.stderr, run.stdout + run.stderr
            assert "make setup DEVICE_FOR_SETUP=gpu" in run.stderr and not sparse.record.exists()
        dry = sparse.run("--dry-run", PYTHON="", SKIP_PLAN=1)
        assert dry.returncode == 0 and f"this would not start: {message}" in dry.stdout, (
            dry.stdout + dry.stderr
        )
        (tmp_path / ".venv/cuda").mkdir()
        run = sparse.run(PYTHON="", PORT=free_port(4))
        assert run.returncode == 0 and message not in run.stderr, run.stdout + run.stderr
    finally:
        sparse.script = kept


def test_layout_when_it_does_not_fit_then_the_dry_run_ends_with_the_plan(sparse):
    script = sparse.script.read_text()
    broken = make_checkout(sparse.folder / "broken")
    broken.write_text(
        script.replace("PLAN_ADAM=(--optimizer-cpu-offload)", "PLAN_ADAM=(--no-optimizer-cpu-offload)")
    )
    sparse.script, kept = broken, sparse.script
    try:
        run = sparse.run("--dry-run")
    finally:
        sparse.script = kept
    assert run.returncode == 2 and "NOTHING FITS" in run.stdout and "does not fit" in run.stderr


@long
def test_plan_when_flags_are_added_then_it_counts_them_and_refuses_what_does_not_fit(recipe):
    # One sample of 33792 tokens in place of 5120; the microbatch of the 4B recipe is given apart.
    longer = [
        "--seq-length",
        33792,
        "--rollout-max-new-tokens=32768",
        "--rollout-max-tokens-per-microbatch",
        33792,
    ]
    run = recipe.run("--plan", *longer, "--lr", "1e-5")
    assert run.returncode == 1 and "NOTHING FITS" in run.stdout, run.stdout + run.stderr
    counted = "--max-new-tokens 32768 --max-tokens-per-microbatch 33792 --max-prompt-tokens 1024"
    assert f"counts these, by its names, and no others: {counted}\n" in run.stdout
    dry = recipe.run("--dry-run", *longer)
    assert dry.returncode == 2 and "the layout does not fit, by the plan above" in dry.stderr
    less = recipe.run("--plan", "--recompute-granularity", "full", "--rollout-linear-logprobs", "--lr")
    assert less.returncode == 0, less.stdout + less.stderr
    assert "no others: --recompute full --linear-logprobs\n" in less.stdout
    before, after = (memory_a_gpu(lines) for lines in (recipe.plan(), less.stdout.splitlines()))
    assert after < before - 1
    assert "no others: none\n" in recipe.run("--plan", "--lr", "1e-5").stdout


def test_plan_when_the_gpus_are_smaller_then_it_counts_theirs_or_what_is_given(recipe, tmp_path):
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 81559\necho 24564\n")
    smi.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    found, given = recipe.run("--plan", PATH=path), recipe.run("--plan", PATH=path, GPU_GIB=141)
    assert found.returncode == 1 and "GPUs of 24 GiB" in found.stdout and "NOTHING FITS" in found.stdout
    assert given.returncode == 0 and "GPUs of 141 GiB" in given.stdout, given.stdout + given.stderr
    smi.write_text("#!/bin/sh\necho no devices were found; exit 6\n")
    assert "GPUs of 80 GiB" in recipe.run("--plan", PATH=path).stdout


def memory_a_gpu(lines):
    """GiB that a plan's layout takes of a GPU."""
    [row] = [line.split() for line in lines if line.startswith("0  ")]
    return float(row[-2])


def test_plan_of_a_recipe_then_the_memory_that_its_comment_says(recipe):
    assert f"{memory_a_gpu(recipe.plan()):.0f} GiB a GPU" in recipe.script.read_text()


def test_plan_of_a_recipe_then_its_flags_are_those_that_the_recipe_gives(recipe):
    [planned, servers] = [line.split() for line in recipe.plan() if line.startswith("  --")]
    given = [*recipe.words_of_dry_run("train"), *recipe.words_of_dry_run("server")]
    for flag, value in pairwise([*planned, *servers, "--"]):
        if flag.startswith("--"):
            assert flag in given
            assert value.startswith("--") or given[given.index(flag) + 1] == value, flag


def test_run_then_servers_start_and_answer_before_training_and_end_after_it(recipe):
    port = free_port(4)
    run = recipe.run(PORT=port)
    assert run.returncode == 0, run.stdout + run.stderr
    servers, count = recipe.asked("-m", "sglang.launch_server"), SERVERS[recipe.name]
    gpus = ["4", "5", "6", "7"] if count == 4 else ["4,5", "6,7"]
    assert sorted(server["CUDA_VISIBLE_DEVICES"] for server in servers) == gpus
    [training] = recipe.asked("-m", "torch.distributed.run")
    words = training["words"]
    assert training["CUDA_VISIBLE_DEVICES"] == "0,1,2,3" and training["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert words[2:7] == ["--standalone", "--nproc_per_node", "4", "-m", "megatron_rl_corr.launch"]
    # What is trained is what the dry run checks; its first word is the number of processes.
    checked = [re.sub("30000", str(port), word) for word in recipe.words_of_dry_run("train")[1:]]
    assert [word for word in words[7:] if ":" not in word] == [word for word in checked if ":" not in word]
    assert words[words.index("--rollout-url") + 1] == f"http://127.0.0.1:{port}"
    assert [run.stdout.count(f":{port + i} answers") for i in range(count)] == [1] * count
    assert all(not is_open(port + i) for i in range(count))


@long
def test_run_when_sizes_and_threads_are_set_then_the_trainer_has_them_and_else_its_share_of_the_cores(sparse):
    given = {"GROUP_SIZE": 4, "BATCH_SIZE": 64, "RESPONSE_TOKENS": 2048, "PROMPT_TOKENS": 512}
    for threads, expected in ((3, "3"), ("", str(max(len(os.sched_getaffinity(0)) // 4, 1)))):
        run = sparse.run(PORT=free_port(4), OMP_NUM_THREADS=threads, **given)
        assert run.returncode == 0, run.stdout + run.stderr
        [training] = sparse.asked("-m", "torch.distributed.run")
        words = training["words"]
        assert training["OMP_NUM_THREADS"] == expected
        flags = ("--rollout-group-size", "--global-batch-size", "--rollout-max-new-tokens", "--seq-length")
        assert [words[words.index(flag) + 1] for flag in flags] == ["4", "64", "2048", "2560"]


@pytest.mark.parametrize(
    "given, expected",
    [
        ({}, "pinned_max_round_threshold_mb:1"),
        ({"PYTORCH_ALLOC_CONF": "a:1"}, "a:1,pinned_max_round_threshold_mb:1"),
        # torch reads one of the two
        ({"PYTORCH_CUDA_ALLOC_CONF": "b:2"}, "b:2,pinned_max_round_threshold_mb:1"),
        ({"PYTORCH_ALLOC_CONF": "pinned_max_round_threshold_mb:64"}, "pinned_max_round_threshold_mb:64"),
    ],
)
def test_pinned_memory_when_the_host_has_the_optimizer_then_it_is_not_rounded_up_to_powers_of_two(
    sparse, given, expected
):
    run = sparse.run(PORT=free_port(4), **given)
    assert run.returncode == 0, run.stdout + run.stderr
    [training] = sparse.asked("-m", "torch.distributed.run")
    assert training["PYTORCH_ALLOC_CONF"] == expected
    # ValueError if it has no such name
    torch._C._accelerator_setAllocatorSettings("pinned_max_round_threshold_mb:1")


def test_flags_of_the_model_when_a_file_matches_a_value_then_the_value_stays(sparse, tmp_path):
    fake, file = tmp_path / "python", sparse.folder / "1"
    fake.write_text(
        '#!/bin/sh\ncase "$*" in *model-flags*) echo "--moe-layer-freq [0,1,1]" ;; '
        f'*) exec {sparse.python} "$@" ;; esac\n'
    )
    fake.chmod(0o755)
    file.touch()
    try:
        run = sparse.run("--dry-run", PYTHON=fake, SKIP_PLAN=1)
    finally:
        file.unlink()
    assert run.returncode == 0, run.stdout + run.stderr
    [words] = [
        call["words"] for call in sparse.asked(str(RECIPES / "dry_run.py")) if call["words"][1] == "train"
    ]
    assert words[words.index("--moe-layer-freq") + 1] == "[0,1,1]"


def test_run_when_a_server_ends_at_its_start_then_its_log_is_named_and_nothing_trains(sparse):
    run = sparse.run(PORT=free_port(4), SERVERS_END=1)
    assert run.returncode == 2 and "a server ended at its start; see" in run.stderr
    assert sparse.asked("-m", "torch.distributed.run") == []


def test_run_when_somebody_elses_server_has_a_port_then_refused_before_ours_start(sparse):
    port = free_port(4)
    with socket.create_server(("127.0.0.1", port + 1)):
        run = sparse.run(PORT=port)
    assert run.returncode == 2
    assert f"port {port + 1} of 127.0.0.1 is in use" in run.stderr and "give another PORT" in run.stderr
    assert sparse.asked("-m", "sglang.launch_server") == sparse.asked("-m", "torch.distributed.run") == []


def test_run_when_a_server_ends_after_its_answer_then_nothing_trains(sparse):
    port = free_port(4)
    run = sparse.run(PORT=port, PORT_THAT_ENDS=port)  # as the second is asked
    assert run.returncode == 2 and "a server ended at its start; see" in run.stderr
    assert run.stdout.count("answers") == 2 and sparse.asked("-m", "torch.distributed.run") == []


@long
def test_run_when_setup_laid_a_compiler_down_then_servers_and_trainer_find_it_and_one_that_is_set_is_kept(
    sparse,
):
    compiler, programs = sparse.folder / "environment/cuda", sparse.python.parent
    compiler.mkdir()
    try:
        found, kept = (
            sparse_environments(sparse, **given) for given in ({}, {"CUDA_HOME": "/opt/cuda-12.4"})
        )
    finally:
        compiler.rmdir()
    assert found[0] == [(str(compiler), str(programs))] * 3 and "kernels are compiled" not in found[1]
    assert kept[0] == [("/opt/cuda-12.4", str(programs))] * 3
    assert f"CUDA_HOME=/opt/cuda-12.4, which was set; the lock's is {compiler}" in kept[1]
    without, _ = sparse_environments(sparse)
    assert without == [(None, os.environ["PATH"].split(":")[0])] * 3


@pytest.mark.parametrize(("colocate", "first"), [(1, "{cuda}/lib:/own"), (0, "/own")])
def test_run_when_colocated_then_servers_find_cudas_libraries_before_python_is_there_to_find_them(
    sparse, colocate, first
):
    cuda = sparse.python.parent.parent / "cuda"
    cuda.mkdir()
    try:
        run = sparse.run(PORT=free_port(4), COLOCATE=colocate, LD_LIBRARY_PATH="/own")
    finally:
        cuda.rmdir()
    assert run.returncode == 0, run.stdout + run.stderr
    servers = sparse.asked("-m", "sglang.launch_server")
    assert {server["LD_LIBRARY_PATH"] for server in servers} == {first.format(cuda=cuda)}
    [training] = sparse.asked("-m", "torch.distributed.run")
    assert training["LD_LIBRARY_PATH"] == "/own"


def sparse_environments(sparse, **variables):
    """([(CUDA_HOME, first folder of PATH)] of the servers and the trainer, what the script said)."""
    run = sparse.run(PORT=free_port(4), **variables)
    assert run.returncode == 0, run.stdout + run.stderr
    calls = [*sparse.asked("-m", "sglang.launch_server"), *sparse.asked("-m", "torch.distributed.run")]
    return [(call["CUDA_HOME"], call["PATH"].split(":")[0]) for call in calls], run.stdout


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_run_when_it_is_ended_by_a_signal_then_training_gets_it_and_gives_the_status_and_servers_end(
    sparse, sent
):
    port, begun = free_port(4), sparse.folder / f"begun_{sent}"
    process = sparse.start(PORT=port, TRAINING_WAITS=begun)
    end = time.monotonic() + 120
    while not begun.exists() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
    assert is_open(port) and is_open(port + 1)
    process.send_signal(sent)
    try:
        out, error = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        os.kill(int(begun.read_text()), signal.SIGKILL)  # the script goes on behind it, and ends the servers
        raise
    assert process.returncode == 7, out + error
    assert not is_open(port) and not is_open(port + 1)


def test_run_when_servers_do_not_end_then_they_and_their_children_are_killed(sparse, tmp_path):
    port, children = free_port(4), tmp_path / "children"
    run = sparse.run(PORT=port, SERVERS_STAY=children, END_TIMEOUT_S=1)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("has not ended within 1 s: it is killed") == 2
    assert not is_open(port) and not is_open(port + 1)
    killed = [int(pid) for pid in children.read_text().split()]
    assert len(killed) == 2
    for pid in killed:  # a signal takes effect when its process has its turn
        wait_until_ended(pid)


def test_run_when_a_second_signal_comes_while_servers_end_then_they_are_killed_at_once(sparse, tmp_path):
    port, children, begun = free_port(4), tmp_path / "children", tmp_path / "begun"
    process = sparse.start(PORT=port, SERVERS_STAY=children, END_TIMEOUT_S=100, TRAINING_WAITS=begun)
    end = time.monotonic() + 120
    while not begun.exists() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    while not Path(f"{children}.told").exists() and time.monotonic() < end:
        time.sleep(0.05)  # the training has ended, and the script waits for the servers
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=60)
    assert process.returncode == 7, out + error
    assert not is_open(port) and not is_open(port + 1)


@pytest.mark.parametrize(
    ("words", "variables", "message"),
    [
        ([], {"NODES": 2}, "NODES=2: other machines serve than those that train; give --serve on"),
        (
            [],
            {"GPUS_TRAIN": "0,1,2,3,4"},
            "GPU 4 is in GPUS_TRAIN=0,1,2,3,4 and in GPUS_SERVE=4,5,6,7; give each GPU",
        ),
        (
            ["--dry-run"],
            {"GPUS_SERVE": "2,3"},
            "GPU 2 is in GPUS_TRAIN=0,1,2,3 and in GPUS_SERVE=2,3; give each GPU",
        ),
        (["--serve"], {"GPUS_SERVE": "4,5,6"}, "GPUS_SERVE=4,5,6: a server takes 2 GPUs, and these are 3"),
        (
            [],
            {"SERVER_URLS": "http://10.0.0.1:30000"},
            "SERVER_URLS=http://10.0.0.1:30000: training would use those",
        ),
        (
            [],
            {"COLOCATE": 1, "GPUS_TRAIN": "0,1,2,3"},
            "GPUS_TRAIN=0,1,2,3 and GPUS_SERVE=0,1,2,3,4,5,6,7: every GPU",
        ),
        (
            ["--serve"],
            {"COLOCATE": 1, "PYTORCH_ALLOC_CONF": "a:1,expandable_segments:True"},
            "PYTORCH_ALLOC_CONF=a:1,expandable_segments:True with COLOCATE=1: SGLang's memory saver can't "
            "release",
        ),
        (
            ["--dry-run"],
            {"COLOCATE": 1, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:true"},
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:true with COLOCATE=1",
        ),
        (
            ["--train"],
            {"NODES": 2, "MASTER_ADDR": "10.0.0.2"},
            "NODES=2 without NODE_RANK: the number of this machine",
        ),
        (
            ["--train"],
            {"NODES": 2, "NODE_RANK": 1},
            "NODES=2 without MASTER_ADDR: the address of the first machine",
        ),
    ],
)
def test_run_when_its_machines_or_gpus_do_not_go_together_then_refused_before_anything_starts(
    sparse, words, variables, message
):
    run = sparse.run(*words, START_TIMEOUT_S=0, **variables)
    assert run.returncode == 2 and message in run.stderr, run.stdout + run.stderr
    assert not sparse.record.exists()


def test_urls_when_those_of_other_servers_are_set_then_this_machines(sparse):
    assert sparse.run("--urls", SERVER_URLS="http://10.0.0.1:30000").stdout.split() == [
        "http://127.0.0.1:30000",
        "http://127.0.0.1:30001",
    ]


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"MODEL": "nowhere"}, "MODEL=nowhere is no Hugging Face folder"),
        ({"DATA": "nowhere.parquet"}, "DATA=nowhere.parquet: there is no such file"),
        ({"MODEL": ""}, "MODEL: folder of Qwen3-30B-A3B"),
    ],
)
def test_run_when_an_input_is_missing_then_its_variable_is_named(sparse, variables, message):
    run = sparse.run("--dry-run", **variables)
    assert run.returncode != 0 and message in run.stderr


# On Debian a host finds itself, here the first, at 127.0.1.1.
@pytest.mark.parametrize("own_address", ["10.0.0.1", "127.0.1.1"])
def test_slurm_job_of_three_nodes_then_the_first_serves_and_the_others_train_against_it(
    sparse, own_address, tmp_path
):
    tools = tmp_path
    calls = tools / "calls"
    stubs = {
        "scontrol": "printf 'node1\\nnode2\\nnode3\\n'",
        "getent": f'[ "$2" = node1 ] && echo "{own_address} STREAM $2" || echo "10.0.0.${{2#node}} STREAM '
        '$2"',
        "hostname": "echo '127.0.0.1 10.0.0.1 172.17.0.1 '",
        # A step of training has a task for each of its nodes; this one runs the second's.
        "srun": f'echo "$SERVER_HOST | ${{SERVER_URLS:-}} | ${{MASTER_ADDR:-}} | $* | $SRUN_CPUS_PER_TASK" '
        f">> {calls}; "
        'case "$*" in *--train*) shift 3; RECORD="$RECORD" exec "$@" ;; esac; exec sleep 60',
    }
    for name, text in stubs.items():
        (tools / name).write_text(f"#!/bin/bash\n{text}\n")
        (tools / name).chmod(0o755)
    # The servers of the first node are not there: one port of the loopback answers in their place.
    script, sparse.script = sparse.script, RECIPES / "slurm.sbatch"
    try:
        run = sparse.run(
            script,
            "--train-iters",
            3,
            PATH=f"{tools}:{os.environ['PATH']}",
            SLURM_JOB_NODELIST="node[1-3]",
            SLURM_NODEID=1,
            SERVER_HOST="unset",
            START_TIMEOUT_S=0,
            SLURM_CPUS_PER_TASK=64,
        )
    finally:
        sparse.script = script
    serve, train = [line.split(" | ") for line in sorted(calls.read_text().splitlines())]
    assert serve[4] == train[4] == "64"
    assert serve[0] == "10.0.0.1" and f"--nodelist=node1 bash {script} --serve" in serve[3]
    assert (
        train[1] == "http://10.0.0.1:30000 http://10.0.0.1:30001 http://10.0.0.1:30002 http://10.0.0.1:30003"
    )
    assert train[2] == "10.0.0.2" and "--nodes=2 --ntasks=2 --nodelist=node2,node3" in train[3]
    # START_TIMEOUT_S is over at once, as nothing answers there.
    assert "http://10.0.0.1:30000 does not answer after 0 s" in run.stderr


def test_slurm_job_when_another_node_has_only_a_loopback_address_then_it_is_named(sparse, tmp_path):
    stubs = {
        "scontrol": "printf 'node1\\nnode2\\nnode3\\n'",
        "hostname": "echo 10.0.0.1",
        "srun": "exec sleep 60",
        "getent": 'echo "127.0.1.1 STREAM $2"',
    }
    for name, text in stubs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    script, sparse.script = sparse.script, RECIPES / "slurm.sbatch"
    try:
        run = sparse.run(script, PATH=f"{tmp_path}:{os.environ['PATH']}", SLURM_JOB_NODELIST="node[1-3]")
    finally:
        sparse.script = script
    assert run.returncode == 2 and "node2 has no address but those of the loopback" in run.stderr


def is_running(pid):
    """Whether it is there and no zombie, which nobody may collect in a container."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_ended(pid):
    end = time.monotonic() + 120
    while is_running(pid):
        assert time.monotonic() < end, pid
        time.sleep(0.05)


def is_open(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
