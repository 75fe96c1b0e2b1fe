"""What the hooks replace, and what they refuse, in processes of their own: pytest's never imports Megatron."""

import json
import subprocess
import sys

import pytest

from megatron_rl_corr.cpu import environment

START = """
import json, sys, types
from megatron_rl_corr.mcore.arguments import parse
from megatron.training import arguments, training
from megatron_rl_corr.mcore import hooks, session, versions
FLAGS = ["--rollout-url", "http://127.0.0.1:9", "--rollout-hf-checkpoint", "m", "--rollout-prompts", "p",
         "--rollout-reward-function", "r.py:r"]
def install():
    return hooks.install(*parse(FLAGS), lambda metrics, writer: None)
def bound():
    return [arguments.add_megatron_arguments, training.setup_model_and_optimizer, training.train_step]
def say(**values):
    print("RESULT " + json.dumps({"case": name, **values}))
"""


CASES = {}
"""Name -> what a child process runs."""


@pytest.fixture(scope="module")
def results():
    """Name -> what the case said; Megatron is imported once, and every case has a fork of that."""
    code = START + """
import os
for name, case in json.loads(sys.argv[1]).items():
    sys.stdout.flush()
    if not os.fork():
        exec(case)
        sys.stdout.flush()
        os._exit(0)
    os.wait()
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, json.dumps(CASES)], env=environment("megatron"),
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    lines = [line.removeprefix("RESULT ") for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    found = {case["case"]: case for case in map(json.loads, lines)}
    assert found.keys() == CASES.keys(), done.stderr[-3000:]
    return found


REFUSAL = """
before = bound()[:2]
{change}
try:
    install()
    said = ""
except versions.UnsupportedMegatron as error:
    said = str(error)
say(said=said, same=[arguments.add_megatron_arguments, training.setup_model_and_optimizer] == before)
"""
CHANGED = (
    "this Megatron was changed in a way that megatron_rl_corr does not know; "
    "supported are megatron-core 0.14 to 0.19"
)
CASES["other parameters"] = REFUSAL.format(
    change="training.train_step = lambda forward_step_func, data_iterator, model: ()"
)
CASES["missing"] = REFUSAL.format(change="del training.train_step")


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("other parameters", f"does not take optimizer, opt_param_scheduler, config: {CHANGED}"),
        ("missing", f"megatron.training.training of megatron-core 0.19.2 has no train_step: {CHANGED}"),
    ],
)
def test_install_when_a_function_is_not_as_known_then_it_is_named_and_nothing_is_replaced(case, words, results):
    assert results[case]["said"].endswith(words) and results[case]["same"]


CASES["imported before"] = """
importer = types.ModuleType("somebodys_fork")
importer.train_step = importer.step_of_mine = training.train_step
importer.another = lambda: None
sys.modules["somebodys_fork"] = importer
originals, another = bound(), importer.another
install()
say(
    renewed=[new.__wrapped__ is old for new, old in zip(bound(), originals)],
    names=[importer.train_step is training.train_step, importer.step_of_mine is training.train_step],
    left=importer.another is another,
    stale=[f"{m.__name__}.{n}" for m, n in sum(map(hooks._holders, originals), [])],
)
"""


def test_install_when_a_function_was_imported_before_then_every_name_of_it_is_bound_anew(results):
    found = results["imported before"]
    assert found == {"case": "imported before", "renewed": [True] * 3, "names": [True] * 2, "left": True, "stale": []}


CASES["restart"] = """
log = []
class Step:
    def __init__(self):
        self.number = len([entry for entry in log if entry[0] == "start"]) + 1
        log.append(["start", self.number])
    def close(self):
        log.append(["close", self.number])
session.start = lambda *args: Step()
session.check_megatron_arguments = lambda args: None
hooks.all_reduce_refusal = lambda prepare: prepare()
training.get_args = lambda: None
def setup_model_and_optimizer(model_provider_func, model_type):
    log.append(["set up", None])
    return "model", "optimizer", "scheduler"
training.setup_model_and_optimizer = setup_model_and_optimizer
leave = install()
leave()
sys.argv = ["script", *FLAGS]
parsed = []
for attempt in range(2):
    parsed.append(arguments.parse_args().rollout_prompts)
    training.setup_model_and_optimizer("provider", "type")
leave()
say(log=log, parsed=parsed)
"""


def test_hooks_when_megatron_restarts_within_the_process_then_flags_parse_anew_and_the_old_servers_are_left(results):
    found = results["restart"]
    assert found["parsed"] == ["p", "p"]
    assert found["log"] == [
        ["set up", None], ["start", 1], ["close", 1], ["set up", None], ["start", 2], ["close", 2],
    ]  # fmt: skip


CASES["failed close"] = CASES["restart"].replace("""
        log.append(["close", self.number])
""", """
        log.append(["close", self.number])
        if self.number == 1:
            import torch
            raise torch.distributed.DistBackendError("the communicator was aborted")
""")  # fmt: skip


def test_hooks_when_the_old_step_can_not_be_closed_at_a_restart_then_the_new_one_starts(results):
    assert results["failed close"]["log"] == results["restart"]["log"]


CASES["experts"] = """
from megatron_rl_corr.mcore import compat
def said(release, experts, ep, tp, etp):
    compat.release = lambda: release
    args = types.SimpleNamespace(
        num_experts=experts, expert_model_parallel_size=ep, tensor_model_parallel_size=tp,
        expert_tensor_parallel_size=etp,
    )
    try:
        compat.check_expert_layout(args)
    except ValueError as error:
        return str(error)
say(
    refused=said((0, 18), 8, 1, 2, 1),
    taken=[said((0, 19), 8, 1, 2, 1), said((0, 18), 8, 2, 2, 1), said((0, 18), 8, 1, 2, 2),
           said((0, 18), 8, 1, 2, None), said((0, 18), None, 1, 2, 1)],
)
"""


def test_expert_layout_when_an_older_release_would_lose_gradients_then_it_is_refused(results):
    found = results["experts"]
    assert found["refused"].startswith(
        "--expert-tensor-parallel-size 1 with --tensor-model-parallel-size 2 and --expert-model-parallel-size 1: "
    )
    assert "leaves tokens out of the experts' gradients; use 0.19 or newer" in found["refused"]
    assert found["taken"] == [None] * 5


CASES["evaluation"] = """
from megatron_rl_corr.mcore.collection import check_they_fit
def said(check):
    try:
        return check()
    except ValueError as error:
        return str(error)
def flags(interval, prompts="held_out.jsonl"):
    return types.SimpleNamespace(
        context_parallel_size=1, yaml_cfg=None, rampup_batch_size=None, finetune=False, pretrained_checkpoint=None,
        iterations_to_skip=None, eval_iters=0, rollout_eval_prompts=prompts, eval_interval=interval, train_iters=20,
        num_experts=None, router_replay="off", expert_statistics=False, expert_tensor_parallel_size=None,
        tensor_model_parallel_size=1, expert_model_parallel_size=1, seq_length=32,
    )
def prompts(longest):
    prompt = types.SimpleNamespace(input_ids=[1] * longest)
    return types.SimpleNamespace(prompts=[prompt])
say(
    intervals=[said(lambda: session.check_megatron_arguments(flags(n))) for n in (None, 0, 21, 20, 1)],
    without=said(lambda: session.check_megatron_arguments(flags(1000, prompts=None))),
    lengths=[said(lambda: check_they_fit(prompts(n), "--rollout-eval-prompts", 8, 32)) for n in (26, 25)],
)
"""


def test_evaluation_when_it_would_never_come_or_its_prompts_are_too_long_then_refused_at_the_start(results):
    found = results["evaluation"]
    never = ("--rollout-eval-prompts would never be asked: --eval-interval {}, the steps from one evaluation to the "
             "next, must be from 1 to --train-iters 20")  # fmt: skip
    assert found["intervals"] == [*map(never.format, (None, 0, 21)), None, None] and found["without"] is None
    assert found["lengths"] == [
        "--seq-length 32 is too short for the longest prompt of --rollout-eval-prompts, 26 tokens, and "
        "--rollout-max-new-tokens 8; use --seq-length 33 or more", None,
    ]  # fmt: skip
