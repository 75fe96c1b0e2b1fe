"""What the hooks replace, and what they refuse, in processes of their own: pytest's never
imports Megatron.
"""

import json

import pytest

from tests.megatron_forks import run_megatron

START = """
import json, sys, types
from megatron_rl_corr.config.flags import parse
from megatron.training import arguments, checkpointing, training
from megatron_rl_corr.mcore import hooks, scoring, session, versions
from megatron_rl_corr.mcore.checks import run_flags
from megatron_rl_corr.mcore.checks import start_checks
FLAGS = ["--rollout-url", "http://127.0.0.1:9", "--rollout-hf-checkpoint", "m", "--rollout-prompts", "p",
         "--rollout-reward-function", "r.py:r", "--rollout-pad-sequences"]
def install():
    return hooks.install(*parse(FLAGS), lambda metrics, writer: None)
def bound():
    return [arguments.add_megatron_arguments, training.setup_model_and_optimizer, training.train_step,
            checkpointing.save_checkpoint, checkpointing.get_checkpoint_tracker_filename,
            training.checkpoint_and_decide_exit]
def say(**values):
    print("RESULT " + json.dumps({"case": name, **values}))
"""


CASES = {}
"""Name -> what a child process runs."""


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Name -> what the case said; Megatron is imported once, and every case has a fork of that."""
    code = (
        START
        + """
import os
for name, case in json.loads(sys.argv[1]).items():
    sys.stdout.flush()
    if not os.fork():
        exec(case)
        sys.stdout.flush()
        os._exit(0)
    os.wait()
"""
    )
    script = tmp_path_factory.mktemp("hooks") / "cases.py"
    script.write_text(code)
    done = run_megatron(script, json.dumps(CASES))
    lines = [line.removeprefix("RESULT ") for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    found = {case["case"]: case for case in map(json.loads, lines)}
    assert found.keys() == CASES.keys(), done.stderr[-3000:]
    return found


CASES["joining"] = """
from argparse import Namespace
from megatron_rl_corr.engines.trajectory import SamplingParams
from megatron_rl_corr.mcore import serving

asked = []
serving.broadcast_made = lambda make: make()
serving.found_at_start = lambda *args, **how: None
push = Namespace(
    membership=Namespace(begin=lambda joins, found, samplings: asked.extend([joins.sampling, *samplings])),
    servers=Namespace(quantization=None, drafts=Namespace(sent=False)),
    exporter=None,
    bucket_bytes=1,
    reference=Namespace(check_live=None),
    features=(),
)
source = Namespace(client=None, loop=Namespace(call=lambda value: value))
run = Namespace(source=source, collector=Namespace(sampling=SamplingParams(4)), model=None, optimizer=None)
options = Namespace(batch_invariant=True, server_check="semantic")
serving.begin_changes_of_servers(options, push, run)
say(asked=[sampling.batch_invariant for sampling in asked])
"""


def test_server_that_joins_when_the_run_is_batch_invariant_then_it_must_be_too(results):
    assert results["joining"]["asked"] == [True, True]


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
    "supported are megatron-core 0.14 to 0.20"
)
CASES["other parameters"] = REFUSAL.format(
    change="training.train_step = lambda forward_step_func, data_iterator, model: ()"
)
CASES["missing"] = REFUSAL.format(change="del training.train_step")


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (
            "other parameters",
            f"does not take optimizer, opt_param_scheduler, config, forward_backward_func: {CHANGED}",
        ),
        ("missing", f"megatron.training.training of megatron-core 0.19.2 has no train_step: {CHANGED}"),
    ],
)
def test_install_when_a_function_is_not_as_known_then_it_is_named_and_nothing_is_replaced(
    case, words, results
):
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
    stale=[f"{m.__name__}.{n}" for m, n in sum(hooks._holders(originals), [])],
)
"""


def test_install_when_a_function_was_imported_before_then_every_name_of_it_is_bound_anew(results):
    found = results["imported before"]
    assert found == {
        "case": "imported before",
        "renewed": [True] * 6,
        "names": [True] * 2,
        "left": True,
        "stale": [],
    }


CASES["restart"] = """
from megatron_rl_corr.events import EVENTS
from megatron_rl_corr.reduce import restarts
from megatron_rl_corr.reduce.failure import WATCH
log, restarted = [], []
gone = []
class Step:
    features = (types.SimpleNamespace(close=lambda: gone.append("feature")),)
    def __init__(self):
        self.number = len([entry for entry in log if entry[0] == "start"]) + 1
        log.append(["start", self.number])
    def close(self):
        log.append(["close", self.number])
def start(config, options, megatron, reports, opened):
    restarted.append(restarts.is_restart())  # where servers may be gone
    step = Step()
    opened.callback(step.close)
    return step
session.start = start
run_flags.check_loaded_iteration = lambda args: None
start_checks.check_start = lambda config, options, args: None
hooks.all_reduce_startup = lambda prepare: prepare()
training.get_args = lambda: types.SimpleNamespace(iteration=0)
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
watched = len(gone)
for clean_up in WATCH._clean_ups:
    clean_up()
watched = len(gone) - watched
leave()
say(log=log, parsed=parsed, gone=len(gone), watched=watched, kinds=dict(EVENTS.counts),
    left=len(WATCH._clean_ups), restarted=restarted)
"""


def test_hooks_when_megatron_restarts_within_the_process_then_flags_parse_anew_and_the_old_servers_are_left(
    results,
):
    found = results["restart"]
    assert found["parsed"] == [["p"], ["p"]]
    assert found["log"] == [
        ["set up", None],
        ["start", 1],
        ["close", 1],
        ["set up", None],
        ["start", 2],
        ["close", 2],
    ]
    assert found["kinds"] == {"run_started": 1, "run_restarted": 1, "run_ended": 1}
    assert found["restarted"] == [False, True]
    assert found["left"] == 1  # to close the reports of the second start; the first one's is forgotten
    # By the watch the second start's; and at the restart and the end.
    assert found["watched"] == 1 and found["gone"] == 3


# The first start opens something and fails: the second closes it, and is a restart.
CASES["failed start"] = (
    CASES["restart"]
    .replace(
        """
    return step
session""",
        """
    if step.number == 1:
        raise RuntimeError("a collective was aborted")
    return step
session""",
    )
    .replace(
        """
    training.setup_model_and_optimizer("provider", "type")
watched""",
        """
    try:
        training.setup_model_and_optimizer("provider", "type")
    except RuntimeError as error:
        log.append(["failed", str(error)])
watched""",
    )
)


def test_hooks_when_a_start_fails_and_megatron_restarts_then_what_it_opened_is_closed_and_a_restart_is_told(
    results,
):
    found = results["failed start"]
    assert found["log"] == [
        ["set up", None],
        ["start", 1],
        ["failed", "a collective was aborted"],
        ["close", 1],
        ["set up", None],
        ["start", 2],
        ["close", 2],
    ]
    assert found["kinds"] == {"run_restarted": 1, "run_ended": 1}


CASES["failed close"] = CASES["restart"].replace(
    """
        log.append(["close", self.number])
""",
    """
        log.append(["close", self.number])
        if self.number == 1:
            import torch
            raise torch.distributed.DistBackendError("the communicator was aborted")
""",
)


def test_hooks_when_the_old_step_can_not_be_closed_at_a_restart_then_the_new_one_starts(results):
    assert results["failed close"]["log"] == results["restart"]["log"]


CASES["cursor"] = """
import dataclasses, json, pathlib, tempfile
from megatron.training import checkpointing
from megatron_rl_corr.core.auto_weights import AutoWeights
from megatron_rl_corr.mcore import checkpoint_cursor
from megatron_rl_corr.mcore.reference.policy import Reference
from megatron_rl_corr.mcore.updates import Updates
from megatron_rl_corr.rollout import Prompt, PromptDataset
from megatron_rl_corr.rollout.failures import FailedPrompts
from megatron_rl_corr.rollout.cursor import Cursor, Drawn, SavedCursor
seen, asked = [], []
folder = pathlib.Path(tempfile.mkdtemp())
path = folder / "iter_0000040/rollout_cursor.json"
def gathered(batches, *, with_last):
    asked.append([batches, with_last])
    return cursor
class Step:
    close = staticmethod(lambda: None)
    features = (types.SimpleNamespace(settle=lambda: asked.append("settled")),)
    waiting = types.SimpleNamespace(
        settle=lambda: asked.append("groups written"),
        begin=lambda folder, groups: asked.append([folder and folder.name, groups, path.exists()]),
    )
    collector = types.SimpleNamespace(cursor_of_all_replicas=gathered, take_open=lambda: ["group"])
    step = types.SimpleNamespace(collector=collector, training=None,
                                 reference=Reference(), updates=Updates(parts=2, earlier=5), colocation=None,
                                 push=None, auto=AutoWeights(64, "sequence"))
prompts, failed = PromptDataset([Prompt(i, [1]) for i in range(9)], seed=4), FailedPrompts(9)
failed.add(3, 2), failed.add(3, 10), failed.add(5, 4)
cursor = SavedCursor.of([Drawn(330, (321, 328))], prompts, failed, 25)
def save_checkpoint(iteration, model, optimizer, *rest):
    "As Megatron: shards, then the name of the tracker's file, then the tracker."
    seen.append(path.exists())
    if model != "local":
        path.parent.mkdir(exist_ok=True)
    checkpointing.get_checkpoint_tracker_filename(str(folder))
    seen.append(path.exists())
session.start = lambda *args: Step()
run_flags.check_loaded_iteration = lambda args: None
start_checks.check_start = lambda config, options, args: None
hooks.all_reduce_startup = lambda prepare: prepare()
training.get_args = lambda: types.SimpleNamespace(save=None, iteration=0)
training.setup_model_and_optimizer = lambda model_type: (0, 0, 0)
checkpointing.save_checkpoint = save_checkpoint
install()
checkpointing.save_checkpoint(40, "local", None)  # while the model is set up
training.setup_model_and_optimizer("type")
checkpointing.save_checkpoint(40, "local", None)
checkpointing.save_checkpoint(iteration=40, model="model", optimizer=None)
written = path.read_text()
path.unlink()
checkpointing.get_checkpoint_tracker_filename(str(folder))  # outside a save
Step.step.training = "the batch"
checkpointing.save_checkpoint(41, "local", None)
older = json.loads(written)
del older["batches"], older["replicas"], older["failed_batches"]
def began(updates, iteration, saved):
    run = Updates.of(types.SimpleNamespace(updates_per_batch=updates, epochs_per_batch=1, max_kl_to_old=None,
                     ess_step_scale=False), 0,
                     iteration, saved)
    return [run.batches(at) for at in (iteration, iteration + 4)]
found = SavedCursor.parse(written)
others = PromptDataset(prompts.rows[:8], seed=4)
def said(text):
    try:
        SavedCursor.parse(text)
    except ValueError as error:
        return str(error)
say(
    seen=seen, left=path.exists(), asked=asked,
    same=found == dataclasses.replace(cursor, auto_level="sequence"),
    batches=[began(2, 40, found), began(4, 40, found), began(4, 40, None), began(1, 40, None),
             began(4, 40, SavedCursor.parse(json.dumps(older)))],
    wrong=[said("{}"), said("[]"), said('{"again": [], "failed": 1}')],
    on=[found.cursor_of(data) == expected for data, expected in (
        (prompts, Cursor(330, (321, 328))), (others, Cursor(330)))],
    failed=[dict(found.failed_of(data).counts) for data in (prompts, others)],
)
"""


def test_cursor_when_megatron_saves_then_it_is_in_the_folder_before_the_checkpoint_is_finished(results):
    found = results["cursor"]
    # While the model is set up, and where the checkpoint has no folder here, none is written.
    assert found["seen"] == [False, False, False, False, False, True, False, False] and not found["left"]
    assert found["same"] and found["on"] == [True, True] and found["failed"] == [{"3": 2, "5": 1}, {}]
    assert all("it holds no data cursor" in said for said in found["wrong"])


def test_cursor_when_a_batch_has_no_update_yet_then_its_prompts_are_to_be_drawn_again(results):
    begun = [one for one in results["cursor"]["asked"] if isinstance(one, list) and len(one) == 2]
    assert begun == [[25, False], [25, False], [25, True]]


def test_waiting_groups_when_megatron_saves_then_they_are_begun_behind_the_cursor(results):
    local, saved, without_folder = (results["cursor"]["asked"][at : at + 4] for at in (0, 4, 8))
    assert saved == ["settled", "groups written", [25, False], ["iter_0000040", ["group"], True]]
    assert local[1:] == ["groups written", [25, False], [None, ["group"], False]]
    assert without_folder[3] == [None, ["group"], False]


def test_batches_when_a_checkpoint_was_made_with_other_updates_a_batch_then_they_are_counted_on(results):
    # 25 batches in 40 steps; without the file they are counted by steps, and an older file is of
    # one update a batch.
    assert results["cursor"]["batches"] == [[25, 27], [25, 26], [10, 11], [40, 44], [40, 41]]


CASES["folders to load"] = """
import pathlib, tempfile
from megatron.training import checkpointing, global_vars
from megatron_rl_corr.mcore.checkpoint_files import folders_to_load

here = pathlib.Path(tempfile.mkdtemp())


def loads(load_dir, args, rank0, state, iteration, *rest, **named):
    return (
        None,
        checkpointing.get_checkpoint_name(str(load_dir), iteration, return_base_dir=True),
        False,
        None,
    )


checkpointing._load_global_dist_base_checkpoint = loads


def loaded(kind, directory=None):
    "A non-persistent checkpoint of step 40: (what Megatron loads, the first of ours that is there)."
    root = here / str(directory)
    parent = pathlib.Path(directory) if directory else root / "old/non_persistent"
    args = types.SimpleNamespace(
        load=str(root / "old"),
        save=str(root / "new"),
        iteration=40,
        ckpt_step=None,
        non_persistent_ckpt_type=kind,
        non_persistent_global_ckpt_dir=directory,
    )
    for folder in (
        parent,
        root / "old",
        root / "new/non_persistent",
    ):  # that of another run would be taken for ours
        (folder / "iter_0000040").mkdir(parents=True)
        (folder / "latest_checkpointed_iteration.txt").write_text("40")
    _, own, *_ = checkpointing._load_base_checkpoint(args.load, args, rank0=True)
    return [own, *map(str, folders_to_load(args))]


say(beside=loaded("global"), elsewhere=loaded("global", str(here / "local disk")))
"""


def test_folders_to_load_when_a_checkpoint_is_non_persistent_then_ours_are_looked_for_where_megatron_loads_it(
    results,
):
    for where in ("beside", "elsewhere"):
        own, first, second = results["folders to load"][where]
        assert own == first and second.endswith("old/iter_0000040")


CASES["reference in place"] = """
import pathlib, tempfile, torch
from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.mcore.reference import checkpoint as reference_checkpoint
from megatron_rl_corr.mcore.reference.policy import LocalReference, ReferenceInPlace, ReferenceWeights
from megatron_rl_corr.mcore import serving
from megatron_rl_corr.mcore.serving import WeightPush
from megatron_rl_corr.mcore.step import CorrectedStep
from megatron_rl_corr.models.shards import LocalParameter

live = torch.nn.Parameter(torch.ones(3))
weights = ReferenceWeights([LocalParameter(live, "w", 0, 0, None)])
with torch.no_grad():
    live += 1
reference, seen = LocalReference(weights), []
serving.push_weights = lambda *args, **named: seen.append(["pushed", live.tolist()])
push = WeightPush(None, None, "run", 1, reference)
run = hooks.CorrectedTraining(*parse(FLAGS), None)
step = CorrectedStep(
    config=RolloutCorrectionConfig(),
    layout=None,
    shape=None,
    collector=types.SimpleNamespace(cursor_of_all_replicas=lambda *args, **named: None),
    logprob_settings=None,
    push=push,
    report=None,
    reference=reference,
)
run.session = types.SimpleNamespace(step=step, features=(), waiting=None)
folder = pathlib.Path(tempfile.mkdtemp())
others = folder / "iter_0000001/rollout_reference"
others.mkdir(parents=True)
training.get_args = lambda: types.SimpleNamespace(save=str(folder), iteration=0)
reference_checkpoint.dist = types.SimpleNamespace(get_rank=lambda: 0)
save = run.wrap_save(lambda iteration, model, optimizer: seen.append(["saved", live.tolist()]))


def train():
    step._train(
        lambda *args: seen.append(["trained"]),
        None,
        types.SimpleNamespace(inputs=None, packs=None),
        0,
        [],
        None,
        False,
        {},
    )


uses = {"push": lambda: push(1), "save": lambda: save(1, [], None), "train": train}


def said(use):
    try:
        use()
    except ReferenceInPlace as error:
        return str(error)


with weights.in_place():
    inside, refused = live.tolist(), {name: said(use) for name, use in uses.items()}
push(1), save(1, [], None)
try:
    train()
except ReferenceInPlace:
    seen.append("refused behind the pass")
except AttributeError:
    pass  # what it lacks is behind the check
say(inside=inside, refused=refused, seen=seen, others=[others.exists(), others.parent.exists()])
"""


def test_reference_when_its_weights_are_in_place_then_a_push_a_save_and_an_update_are_errors(results):
    found = results["reference in place"]
    assert found["inside"] == [1.0] * 3
    for use, word in (("push", "pushed"), ("save", "saved"), ("train", "trained")):
        assert found["refused"][use].startswith(
            f"the model's weights can't be {word} now: they are the reference"
        )
    assert found["seen"] == [["pushed", [2.0] * 3], ["saved", [2.0] * 3]]
    # What another run has left in a checkpoint that is written over is not taken for this run's.
    assert found["others"] == [False, True]


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
        "--expert-tensor-parallel-size 1 with --tensor-model-parallel-size 2 and "
        "--expert-model-parallel-size 1: "
    )
    assert "leaves tokens out of the experts' gradients; use 0.19 or newer" in found["refused"]
    assert found["taken"] == [None] * 5


CASES["evaluation"] = """
run_flags.check_policy = lambda args: None


def said(check):
    try:
        return check()
    except ValueError as error:
        return str(error)


def flags(interval, prompts=("held_out.jsonl",), **run):
    run = {"train_iters": 20, "train_samples": None, "global_batch_size": 16, "rampup_batch_size": None} | run
    return types.SimpleNamespace(
        context_parallel_size=1,
        yaml_cfg=None,
        finetune=False,
        pretrained_checkpoint=None,
        load=None,
        iterations_to_skip=None,
        eval_iters=0,
        rollout_eval_prompts=prompts,
        eval_interval=interval,
        **run,
        num_experts=None,
        router_replay="off",
        expert_statistics=False,
        expert_tensor_parallel_size=None,
        rollout_pad_sequences=True,
        rollout_updates_per_batch=1,
        rollout_epochs_per_batch=1,
        exit_interval=None,
        rollout_colocate=False,
        save=None,
        adlr_autoresume=False,
        rollout_save_hf_interval=None,
        rollout_ledger_interval=None,
        rollout_indexer_replay=False,
        rollout_batch_invariant=False,
        tensor_model_parallel_size=1,
        expert_model_parallel_size=1,
        seq_length=32,
        calculate_per_token_loss=False,
        multi_latent_attention=False,
        transformer_impl="local",
        position_embedding_type="rope",
        quick_geglu=False,
        rollout_hf_checkpoint="no such folder",
        rollout_model_provider="auto",
    )


def refused(args):
    return said(lambda: run_flags.check_megatron_arguments(args))


say(
    intervals=[refused(flags(n)) for n in (None, 0, 21, 20, 1)],
    by_samples=[refused(flags(n, train_iters=None, train_samples=170)) for n in (11, 10)],
    without=refused(flags(1000, prompts=())),
    batches=[
        refused(flags(1, **{name: given}))
        for name, given in (("rampup_batch_size", ["4", "4", "9"]), ("step_batch_size_schedule", "0:8 9:16"))
    ],
    offloaded=[refused(flags(1, optimizer_cpu_offload=True, fp16=False, bf16=b)) for b in (False, True)],
    latent=[
        said(
            lambda: run_flags.check_latent_attention(
                types.SimpleNamespace(
                    tensor_model_parallel_size=ranks, multi_latent_attention=latent, transformer_impl=spec
                )
            )
        )
        for ranks, latent, spec in (
            (2, True, "local"),
            (1, True, "local"),
            (2, False, "local"),
            (2, True, "transformer_engine"),
        )
    ],
    delta_nets=[
        said(
            lambda: run_flags.check_delta_net_norms(
                types.SimpleNamespace(
                    tensor_model_parallel_size=ranks,
                    sequence_parallel=cut,
                    experimental_attention_variant=variant,
                )
            )
        )
        for ranks, cut, variant in (
            (2, False, "gated_delta_net"),
            (2, True, "gated_delta_net"),
            (1, False, "gated_delta_net"),
            (2, False, None),
        )
    ],
)
"""


def test_evaluation_when_it_would_never_come_then_refused_at_the_start(results):
    found = results["evaluation"]
    never = (
        "--rollout-eval-prompts would never be asked: --eval-interval {}, the steps from one evaluation to "
        "the next, must be from 1 to the run's 20 steps, by --train-iters or --train-samples"
    )
    assert found["intervals"] == [*map(never.format, (None, 0, 21)), None, None] and found["without"] is None
    assert found["by_samples"] == [never.format(11).replace("20 steps", "10 steps"), None]
    assert found["batches"] == [
        f"--{flag} is not supported with rollouts: every step takes --global-batch-size"
        for flag in ("rampup-batch-size", "step-batch-size-schedule")
    ]


def test_offloaded_optimizer_in_float32_when_its_copies_would_stay_the_initial_weights_then_refused(results):
    refused, taken = results["evaluation"]["offloaded"]
    assert refused.startswith("--optimizer-cpu-offload in float32: ") and taken is None


def test_delta_nets_when_a_norms_gradients_would_differ_on_ranks_then_refused(results):
    refused, *taken = results["evaluation"]["delta_nets"]
    assert refused == (
        "--tensor-model-parallel-size 2 without --sequence-parallel: Megatron would not add up the gradients "
        "of the norm behind a gated delta net, and ranks would train different ones; give --sequence-parallel"
    )
    assert taken == [None, None, None]


def test_latent_attention_when_the_local_spec_cuts_it_over_ranks_then_refused(results):
    refused, *taken = results["evaluation"]["latent"]
    assert refused == (
        "--transformer-impl local with --multi-latent-attention and --tensor-model-parallel-size 2: "
        "Megatron does not sum the positional key's gradient over the ranks; use --transformer-impl "
        "transformer_engine, or --tensor-model-parallel-size 1"
    )
    assert taken == [None, None, None]


CASES["begin"] = """
import pathlib, tempfile
folder = pathlib.Path(tempfile.mkdtemp())
tracker = pathlib.Path(checkpointing.get_checkpoint_tracker_filename(str(folder)))
def said(named, **given):
    tracker.unlink(missing_ok=True)
    if named is not None:
        tracker.write_text(named)
    try:
        run_flags.check_begin(types.SimpleNamespace(**{"load": str(folder), "ckpt_step": None} | given))
    except ValueError as error:
        return str(error).replace(str(folder), "DIR")
say(
    release=[said("release"), said("release", ckpt_step=40), said("0")],
    overridden=said("40", override_ckpt_iteration=0),
    taken=[said(None), said(None, override_ckpt_iteration=0), said("40"), said("0", ckpt_step=40),
           said("40", override_ckpt_iteration=1), said("release", load=None)],
)
"""


def test_checkpoint_when_it_would_begin_at_iteration_0_then_refused(
    results,
):
    found = results["begin"]
    for said, named in zip(found["release"], ("release", "release", "0"), strict=True):
        assert said.startswith(
            f"--load DIR: its checkpoint ({named}) begins at iteration 0, where the weights of "
        )
        assert said.endswith("name it by --pretrained-checkpoint, and by --load the run's own folder")
    assert found["overridden"].startswith(
        "--override-ckpt-iteration 0 begins at iteration 0, where the weights of "
    )
    assert found["taken"] == [None] * 6


CASES["layers"] = """
import pathlib, tempfile
folder = pathlib.Path(tempfile.mkdtemp())
pathlib.Path(checkpointing.get_checkpoint_tracker_filename(str(folder))).write_text("40")
saved = {"iter_0000020": "local", "iter_0000040": "transformer_engine"}
run_flags.dist_checkpointing = types.SimpleNamespace(
    check_is_distributed_checkpoint=lambda path: pathlib.Path(path).name in saved,
    load_common_state_dict=lambda path: {"args": types.SimpleNamespace(
        transformer_impl=saved[pathlib.Path(path).name], hybrid_layer_pattern=pattern,
    )},
)
pattern = None
def said(impl, **given):
    plain = {"load": str(folder), "ckpt_step": None, "num_experts": 8, "multi_latent_attention": False,
             "pretrained_checkpoint": None}
    try:
        run_flags.check_layers(types.SimpleNamespace(transformer_impl=impl, **(plain | given)))
    except ValueError as error:
        return str(error).replace(str(folder), "DIR")
latent = {"num_experts": None, "multi_latent_attention": True}
hybrid = [said("transformer_engine", hybrid_layer_pattern="*E|*E")]
pattern = "*E*E"
hybrid += [said("transformer_engine"), said("transformer_engine", hybrid_layer_pattern="*E|*E")]
pattern = None
say(
    refused=[said("local"), said("transformer_engine", ckpt_step=20), said("local", **latent)],
    taken=[said("transformer_engine"), said("local", ckpt_step=20), said("local", num_experts=None),
           said("local", ckpt_step=30), said("local", load=None)],
    hybrid=hybrid,
    pretrained=[said("local", load=None, pretrained_checkpoint=str(folder)),
                said("local", pretrained_checkpoint="elsewhere")],
)
"""


def test_checkpoint_when_its_layers_name_their_norms_otherwise_then_refused_with_the_remedy(results):
    found = results["layers"]
    te = "transformer_engine"
    expected = [
        ("local", "DIR/iter_0000040", te),
        (te, "DIR/iter_0000020", "local"),
        ("local", "DIR/iter_0000040", te),
    ]
    for said, (impl, path, saved) in zip(found["refused"], expected, strict=True):
        assert said.startswith(
            f"--transformer-impl {impl}: the checkpoint {path} was saved with {saved}, whose "
        )
        assert f"give --transformer-impl {saved}, or convert it to Hugging Face format" in said
    assert found["taken"] == [None] * 5
    gpt, hybrid, same = found["hybrid"]
    assert same is None and gpt == (
        "--hybrid-layer-pattern: the checkpoint DIR/iter_0000040 was saved with none, and this run has "
        "*E*E, whose layers have other numbers; give that of the checkpoint, or convert it to Hugging Face "
        "format for --rollout-hf-checkpoint and leave --load out"
    )
    assert "was saved with *E*E, and this run has none" in hybrid
    for said, flag in zip(found["pretrained"], ("--pretrained-checkpoint", "--load"), strict=True):
        assert said.startswith("--transformer-impl local: ") and said.endswith(f"and leave {flag} out")


CASES["start"] = """
from megatron_rl_corr.mcore.reference import start as reference_start
def said(**given):
    options = types.SimpleNamespace(reference_checkpoint=given.get("reference_checkpoint"))
    args = types.SimpleNamespace(pretrained_checkpoint=given.get("pretrained_checkpoint"))
    try:
        reference_start.check_start_known(options, args)
    except ValueError as error:
        return str(error)
say(refused=said(pretrained_checkpoint="sft"),
    taken=[said(), said(pretrained_checkpoint="sft", reference_checkpoint="hf")])
"""


def test_reference_when_the_start_is_a_checkpoint_of_megatron_then_its_folder_must_be_named(results):
    found = results["start"]
    assert found["refused"].startswith(
        "--pretrained-checkpoint sft with a KL penalty against a reference policy: "
    )
    assert (
        "name that folder by --rollout-reference-checkpoint" in found["refused"]
        and found["taken"] == [None] * 2
    )


CASES["per token"] = """
def said(per_token, fp16, batch, length):
    args = types.SimpleNamespace(
        calculate_per_token_loss=per_token, fp16=fp16, global_batch_size=batch, seq_length=length,
    )
    try:
        run_flags.check_per_token_loss(args)
    except ValueError as error:
        return str(error)
say(
    half=said(True, True, 64, 1024), many=said(True, False, 32768, 65536),
    taken=[said(True, False, 32767, 65536), said(False, True, 64, 1024), said(False, False, 32768, 65536)],
)
"""


def test_per_token_loss_when_half_precision_or_32_bits_could_not_hold_it_then_refused_with_the_remedy(
    results,
):
    found = results["per token"]
    assert (
        found["half"].startswith("--fp16 with --calculate-per-token-loss: ")
        and "or use --bf16" in found["half"]
    )
    assert "--global-batch-size 32768 x --seq-length 65536 = 2147483648 positions" in found["many"]
    assert "leave --calculate-per-token-loss out (the gradient is the same)" in found["many"]
    assert found["taken"] == [None] * 3


CASES["packed"] = """
from megatron_rl_corr.mcore import compat
from megatron_rl_corr.mcore.checks import packed_flags


def said(**given):
    args = {
        "transformer_impl": "transformer_engine",
        "cuda_graph_impl": "none",
        "num_experts": 8,
        "fp8": None,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "aux_loss",
        "seq_length": 32,
        "rollout_max_tokens_per_microbatch": None,
    } | given
    try:
        packed_flags.check_packed(types.SimpleNamespace(**args))
    except ValueError as error:
        return str(error)


def packed(stages):
    args = types.SimpleNamespace(
        pipeline_model_parallel_size=stages,
        moe_token_dispatcher_type="allgather",
        variable_seq_lengths=False,
    )
    packed_flags.set_packed(args)
    return [args.variable_seq_lengths, args.moe_token_dispatcher_type]


import torch
from megatron_rl_corr.moe.padding import check_packed_routers


class WithoutMask(torch.nn.Module):
    def __init__(self, coefficient):
        super().__init__()
        self.config = types.SimpleNamespace(
            num_moe_experts=8,
            moe_aux_loss_coeff=coefficient,
            moe_router_load_balancing_type="aux_loss",
            moe_z_loss_coeff=None,
            moe_router_enable_expert_bias=False,
            moe_router_bias_update_rate=1e-3,
        )

    def forward(self, input_ids):
        pass


def learning(coefficient):
    try:
        check_packed_routers([WithoutMask(coefficient)])
    except ValueError as error:
        return str(error)


def train_step(forward_step_func, config, forward_backward_func, iteration=None):
    return forward_backward_func(num_microbatches=4, seq_length=8), iteration


seven = compat.with_microbatches(train_step, 7)


def schedule(**named):
    return named


try:
    compat.with_microbatches(lambda forward_step_func: None, 7)
    unknown = None
except versions.UnsupportedMegatron as error:
    unknown = str(error)
say(
    refused=[
        said(transformer_impl="local"),
        said(moe_token_dispatcher_type="allgather"),
        said(cuda_graph_impl="local"),
        said(experimental_attention_variant="dsa"),
        said(experimental_attention_variant="gated_delta_net", deterministic_mode=True),
        said(fp8="hybrid"),
        said(moe_router_load_balancing_type=["aux_loss", "seq_aux_loss"]),
        said(moe_router_load_balancing_type="global_aux_loss"),
        said(tp_comm_overlap=True),
        said(fine_grained_activation_offloading=True),
        said(external_cuda_graph=True),
        said(overlap_p2p_comm_warmup_flush=True),
        said(rollout_max_tokens_per_microbatch=31),
    ],
    taken=[
        said(),
        said(num_experts=None, moe_token_dispatcher_type="allgather"),
        said(rollout_max_tokens_per_microbatch=32),
    ],
    of_agents=[
        said(moe_router_load_balancing_type="global_aux_loss", **{f"rollout_{name}": "one"})
        for name in ("agent", "agent_command", "environment")
    ],
    lengths=[packed(1), packed(2)],
    unknown=unknown,
    learning=[learning(0.0), learning(0.01)],
    counts=[seven(None, None, schedule, 3), seven(None, None, forward_backward_func=schedule)],
)
"""


def test_packed_when_something_does_not_go_with_it_then_refused_with_the_remedy(results):
    found, but, rows = (
        results["packed"],
        "does not go with packed sequences, as",
        "or give --rollout-pad-sequences",
    )
    assert found["refused"] == [
        f"--transformer-impl local {but} its attention takes whole rows only; use --transformer-impl "
        f"transformer_engine, {rows}",
        f"--moe-token-dispatcher-type allgather {but} it is not proven with microbatches of other lengths; "
        f"use --moe-token-dispatcher-type alltoall, {rows}",
        f"--cuda-graph-impl local {but} it would repeat one microbatch's boundaries; use --cuda-graph-impl "
        f"none, {rows}",
        f"--experimental-attention-variant dsa {but} it is not proven to keep sequences apart; leave it out, "
        f"{rows}",
        f"--deterministic-mode {but} a gated delta net would not keep sequences apart; leave it out, {rows}",
        f"--fp8-format hybrid {but} sequences are not padded to the multiples that it needs; leave it out, "
        f"{rows}",
        f"--moe-router-load-balancing-type aux_loss seq_aux_loss {but} it balances rows or batches, which "
        f"packs are not; use --moe-router-load-balancing-type aux_loss, {rows}",
        f"--moe-router-load-balancing-type global_aux_loss {but} it balances rows or batches, which packs "
        f"are not; use --moe-router-load-balancing-type aux_loss, {rows}",
        f"--tp-comm-overlap {but} its buffers have the size of rows; leave it out, {rows}",
        f"--fine-grained-activation-offloading {but} it plans with the first step's microbatches, and keeps "
        f"pinned buffers of every length that it meets; leave it out, {rows}",
        f"--external-cuda-graph {but} it would repeat one microbatch's boundaries; leave it out, {rows}",
        f"--overlap-p2p-communication-warmup-flush {but} stages tell each other every microbatch's length, "
        f"and in its order wait for each other for ever; leave it out, {rows}",
        "--rollout-max-tokens-per-microbatch 31 must be at least --seq-length 32: a sequence is not cut",
    ]
    *of_agents, of_environment = found["of_agents"]
    assert of_environment.endswith(f"aux_loss, {rows}")
    assert of_agents == 2 * [of_environment.removesuffix(f", {rows}")]  # they have no padded rows
    assert found["taken"] == [None] * 3
    assert found["lengths"] == [[False, "allgather"], [True, "alltoall"]]
    assert found["learning"] == [
        None,
        (
            "--moe-aux-loss-coeff 0.01 with packed sequences: routers would learn from padding, and alike "
            "from packs of other lengths, as megatron-core 0.19.2 can't leave it out; use "
            "--moe-aux-loss-coeff 0, or, without agents, give --rollout-pad-sequences"
        ),
    ]


def test_packed_when_it_has_other_microbatches_than_megatron_counts_then_only_the_schedule_hears_of_them(
    results,
):
    found = results["packed"]
    assert found["counts"] == [
        [{"num_microbatches": 7, "seq_length": 8}, 3],
        [{"num_microbatches": 7, "seq_length": 8}, None],
    ]
    assert "does not take forward_backward_func" in found["unknown"]


CASES["asked"] = """
from megatron_rl_corr.mcore import compat
class Optimizer:
    def step(self):
        return "updated"
def asked(optimizer, answer):
    with compat.asked_before_update(optimizer, lambda: answer):
        return optimizer.step()
plain, wrapped = Optimizer(), Optimizer()
wrapped.step = wrapper = lambda: "replayed by a graph"  # as --optimizer-cuda-graph does
say(
    plain=[asked(plain, True), asked(plain, False), plain.step(), sorted(vars(plain))],
    wrapped=[asked(wrapped, True), asked(wrapped, False), wrapped.step(), wrapped.step is wrapper],
)
"""


def test_update_when_asked_about_then_the_optimizers_step_is_what_it_was_a_graphs_wrapper_too(results):
    found = results["asked"]
    assert found["plain"] == ["updated", [False, None, None], "updated", []]
    assert found["wrapped"] == ["replayed by a graph", [False, None, None], "replayed by a graph", True]


CASES["leaving"] = """
import torch


def fails(*args):
    raise AssertionError("a run that ends to write a checkpoint asks for nothing more")


left, asked = ({}, True, True, True, 17, None, None, 0), []


class Step:
    features = (types.SimpleNamespace(settle=lambda: asked.append("settled"), end_step=fails),)
    step = types.SimpleNamespace(run=lambda train_step, *args: train_step(None, None, 1))


session.start = lambda *args: Step()
run_flags.check_loaded_iteration = lambda args: None
start_checks.check_start = lambda config, options, args: None
hooks.all_reduce_startup = lambda prepare: prepare()
training.get_args = lambda: types.SimpleNamespace(iteration=3, curr_iteration=3)
training.setup_model_and_optimizer = lambda model_provider_func, model_type: (
    "model",
    "optimizer",
    "scheduler",
)


def train_step(
    forward_step_func, data_iterator, model, optimizer, opt_param_scheduler, config, forward_backward_func
):
    return left


training.train_step = train_step
install()
training.setup_model_and_optimizer("provider", "type")
settings = types.SimpleNamespace(calculate_per_token_loss=False)
given = training.train_step(None, None, [], None, None, settings, None)
say(same=given == left, asked=asked)
"""


def test_train_step_when_megatron_leaves_to_write_a_checkpoint_then_its_result_is_handed_on(
    results,
):
    assert results["leaving"]["same"] and results["leaving"]["asked"] == ["settled"]


CASES["qk clip"] = """
import torch
from megatron_rl_corr.mcore import compat

layer = torch.nn.Linear(2, 2)
layer.current_max_attn_logits = torch.ones(2)
unseen = torch.nn.Linear(2, 2)
unseen.current_max_attn_logits = None
layer.register_buffer("expert_bias", torch.zeros(3))
layer.register_buffer("local_tokens_per_expert", torch.zeros(3), persistent=False)
state = compat.RouterState([torch.nn.Sequential(layer, unseen)])
layer.expert_bias += 1
layer.local_tokens_per_expert += 1
state.zero_attention_logits()
state.restore()
with compat.attention_logits_kept([torch.nn.Sequential(layer, unseen)]):
    layer.current_max_attn_logits, unseen.current_max_attn_logits = torch.full((2,), 100.0), torch.ones(2)
say(
    logits=[layer.current_max_attn_logits.tolist(), unseen.current_max_attn_logits],
    bias=layer.expert_bias.tolist(),
    counts=layer.local_tokens_per_expert.tolist(),
)
"""


def test_router_state_when_put_back_then_what_a_checkpoint_holds_and_no_logits_to_clip_weights_by(results):
    found = results["qk clip"]
    assert (
        found["logits"] == [[0.0] * 2, None] and found["bias"] == [0.0] * 3 and found["counts"] == [1.0] * 3
    )


CASES["warnings"] = """
import tempfile
from pathlib import Path
from tests.test_launch import write_inputs


def with_files(flags):
    names = {"m": "model", "p": "prompts.jsonl", "r.py:r": "reward.py:reward"}
    write_inputs(folder := Path(tempfile.mkdtemp()))
    return [str(folder / names[flag]) if flag in names else flag for flag in flags]


import asyncio, contextlib, dataclasses, io, logging
import torch.distributed as dist
from megatron_rl_corr.events import EVENTS
from megatron_rl_corr import plugin
from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.engines.errors import SampleFailure
from megatron_rl_corr.features.evaluation.options import EvaluationSet
from megatron_rl_corr.features.evaluation import evaluation
from megatron_rl_corr.mcore.batch import server_collector as collect
from megatron_rl_corr.mcore.batch.rollout_batch import BatchShape
from megatron_rl_corr.mcore.batch.server_collector import SampleSource
from megatron_rl_corr.observability.catalogue import spec_of
from megatron_rl_corr.rollout import Prompt, PromptDataset
from megatron_rl_corr.rollout.begun_groups import BegunGroup
from megatron_rl_corr.rollout.cursor import Drawn, SavedCursor
from megatron_rl_corr.rollout.failures import CAUSES, FailedPrompts

failure = SampleFailure("protocol", "what `top_p` kept is unknown")


async def generate(*prompts, **how):
    raise failure


client = types.SimpleNamespace(
    generate=generate, vocab_size=10, counts=dict, check_sampling=lambda sampling: None
)
source = SampleSource(
    client, None, PromptDataset([Prompt(3, [1])], seed=0), types.SimpleNamespace(check_labels=print)
)
_, options = parse([*FLAGS, "--rollout-group-size", "2", "--rollout-max-new-tokens", "4"])
layout = types.SimpleNamespace(dp_size=1, dp_rank=0)
errors = io.StringIO()
logging.getLogger("megatron_rl_corr").addHandler(logging.StreamHandler(errors))
with contextlib.redirect_stderr(errors):
    plugin.prepare(with_files(FLAGS))()
    logging.getLogger("megatron_rl_corr.weight_sync.verify").warning("`verify_push` is %s", "off")
    held_out = evaluation.HeldOut(EvaluationSet("", "p", 1), PromptDataset([Prompt(3, [1])]))
    running = types.SimpleNamespace(failed=0)
    asyncio.run(
        evaluation.Evaluation(layout, source, [held_out], None, 1, 1.0)._scored(held_out, 0, 0, running)
    )
    collector = collect.Collector(options, layout, BatchShape(4, 2, 2, 16), source, batches=(0, 1))
    collector._failures.failed(failure, "sample 0 of row 3")
    evaluated = dict(EVENTS.counts)
with contextlib.redirect_stderr(io.StringIO()):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    collector._layout = types.SimpleNamespace(dp_cp_group=dist.group.WORLD)
    for number in range(3):  # of the only row: the third time it is left out, for this epoch and the next
        collector._failures.dropped(source.prompts.at(number), number, [])
        collector._share_failed_prompts()
saved = SavedCursor.of([Drawn(0)], source.prompts, FailedPrompts(1), 1, [{"ended": 90.0, "refused": 40.0}])
others = dataclasses.replace(source, prompts=None)  # on a rank that draws none
judged = [
    collect.Collector(
        options, layout, BatchShape(4, 2, 2, 16), one, batches=(0, 1), saved=saved
    )._failed_fraction.exceeded([10.0] + [0.0] * len(CAUSES))
    for one in (source, others)
]
other_seed = dataclasses.replace(saved, seed=1, again=(4, 8))
with contextlib.redirect_stderr(io.StringIO()):
    collect.Collector(options, layout, BatchShape(4, 2, 2, 16), source, batches=(0, 1), saved=other_seed)
begun = {4: BegunGroup(4, whole=types.SimpleNamespace(oldest_version=0))}
restored = types.SimpleNamespace(read=lambda *numbers, **how: [], read_begun=lambda *numbers, **how: begun)
place = SavedCursor.of([Drawn(8, again=(4, 5))], source.prompts, FailedPrompts(1), 0)
leader = types.SimpleNamespace(dp_size=1, dp_rank=0, is_data_leader=True, dp_cp_group=dist.group.WORLD)
alone = dataclasses.replace(source, loop=types.SimpleNamespace(call=asyncio.run))
late = collect.Collector(
    options, leader, BatchShape(4, 2, 2, 16), alone, batches=(0, 2), saved=place, restored=restored
)
begins_late = []
for trained in (0, 1):
    drawn = late.cursor_of_all_replicas(trained, with_last=False)
    begins_late.append([drawn.again, [one.number for one in late.take_open().begun]])
idle = RolloutCorrectionConfig(clip_ratio_low=0.3)
say(
    begins_late=begins_late,
    judged=[share for share, _ in judged],
    evaluated=evaluated,
    told=dict(EVENTS.counts),
    undescribed=[name for name in hooks.CONSOLE if spec_of(name) is None],
    printed=errors.getvalue().splitlines(),
    start=scoring.describe_start(idle, (), 1),
)
"""


def test_events_when_held_out_samples_fail_or_a_prompt_is_left_out_for_an_epoch_then_each_is_told_once(
    results,
):
    assert results["warnings"]["evaluated"] == {"sample_failed": 2}  # one held out, one trained
    assert results["warnings"]["told"] == {
        "sample_failed": 2,
        "group_dropped": 3,
        "prompt_left_out": 1,
        "groups_forgotten": 1,
        "groups_sampled_again": 1,
    }


def test_checkpoint_when_a_group_could_not_begin_in_time_then_it_has_nothing_of_it(results):
    # of version 0, and without lag the next checkpoint's run would begin and train it at version 1
    assert results["warnings"]["begins_late"] == [[[4, 5], [4]], [[4, 5], []]]


def test_metrics_of_megatrons_own_log_line_then_the_catalogue_describes_them(results):
    assert results["warnings"]["undescribed"] == []


def test_warnings_of_a_run_when_the_library_names_fields_then_the_flags_are_printed(results):
    logged, held_out, sampled = results["warnings"]["printed"]
    assert logged == "--rollout-verify-push is off"
    why = "what --rollout-top-p kept is unknown"
    assert held_out == f"[rollout] row 3 of --rollout-eval-prompts failed for good (protocol): {why}"
    assert sampled == (
        f"[rollout] sample 0 of row 3 failed for good (protocol; further ones are only counted): {why}"
    )
    _, idle = results["warnings"]["start"]
    assert idle.startswith("--rollout-clip-ratio-low 0.3 of the configuration can't act")


def test_failures_before_a_checkpoint_then_every_rank_judges_them_or_they_would_part(results):
    assert results["warnings"]["judged"] == ["40 of the 100 samples of the last 2 batches"] * 2


CASES["loading"] = """
from megatron_rl_corr.mcore.updates import Updates


def fails(*args):
    raise ValueError("the checkpoint has no tensor lm_head.weight")


session.HFCheckpoint = lambda path: types.SimpleNamespace(config={"vocab_size": 4}, path="m")
session.sample_source = lambda *args: "source"
session.check_model = session.parameter_names = session.local_parameters = lambda *args, **kwargs: []
session.load_shards = fails
closed, opened = [], session.ExitStack()
collector = types.SimpleNamespace(sampling=None, close=lambda: closed.append("collector"))
session.Collector = lambda *args, **kwargs: collector
session.LoopThread = lambda: types.SimpleNamespace(close=lambda: closed.append("loop"))
megatron = types.SimpleNamespace(
    args=types.SimpleNamespace(
        iteration=0,
        finetune=False,
        train_iters=1,
        num_experts=None,
        expert_model_parallel_size=1,
        padded_vocab_size=4,
        rollout_model_provider="auto",
    ),
    model=[],
)
try:
    layout = types.SimpleNamespace(shard=None)
    session._prepare(parse(FLAGS)[1], megatron, layout, None, None, Updates(), None, None, (), opened)
    said = ""
except ValueError as error:
    said = str(error)
opened.close()
say(said=said, closed=closed)
"""


def test_weights_when_they_can_not_be_loaded_then_the_flag_and_the_folder_are_named(results):
    assert (
        results["loading"]["said"] == "--rollout-hf-checkpoint m: the checkpoint has no tensor lm_head.weight"
    )


def test_start_when_it_fails_after_sampling_was_prepared_then_what_it_had_opened_is_there_to_be_closed(
    results,
):
    assert results["loading"]["closed"] == ["collector", "loop"]


CASES["scoring"] = """
from megatron_rl_corr.mcore.scoring import describe_scoring, scoring_reasons

lines = {}
for flags in json.loads(FLAG_SETS):
    config, options = parse([*FLAGS, *flags.split()])
    saves, experts = (
        ("--rollout-save-trajectories",) * (options.save_trajectories is not None),
        ("--expert-statistics",) * options.expert_statistics,
    )
    lines[flags] = describe_scoring(config, scoring_reasons(config, features=saves, routes=experts))
say(lines=lines)
""".replace(
    "FLAG_SETS",
    repr(
        json.dumps(
            [
                "",
                "--rollout-correction-preset decoupled_seq_is --rollout-loss gspo",
                "--rollout-correction-preset bypass_pg_geo_rs",
                "--rollout-correction-preset decoupled_geo_rs_token_tis --rollout-save-trajectories there",
                "--rollout-correction-preset decoupled_token_is --rollout-is-batch-normalize "
                "--expert-statistics",
                "--rollout-m2-threshold 0.04 --rollout-batch-filter-kl 0.1 --rollout-loss-denominator kept",
                "--rollout-advantage otb --rollout-group-size 4",
            ]
        )
    ),
)


def test_scoring_pass_when_something_needs_the_whole_batch_then_it_is_named_else_the_pass_is_left_out(
    results,
):
    of_one_update = "with one update a batch pi_old is the policy that is trained, known in the loss"
    assert list(results["scoring"]["lines"].values()) == [
        *[f"scoring pass: left out ({of_one_update})"] * 2,
        "scoring pass: left out (bypass mode: pi_rollout stands in for pi_old)",
        "scoring pass: kept for --rollout-rs seq_mean_ratio, --rollout-save-trajectories",
        "scoring pass: kept for --rollout-is-batch-normalize, --expert-statistics",
        "scoring pass: kept for --rollout-m2-threshold, --rollout-batch-filter-kl, "
        "--rollout-loss-denominator kept",
        "scoring pass: kept for --rollout-advantage otb",
    ]


CASES["updates"] = """
def said(check, **given):
    args = {
        "rollout_updates_per_batch": 2,
        "rollout_epochs_per_batch": 2,
        "train_iters": 16,
        "train_samples": None,
        "global_batch_size": 8,
        "exit_interval": None,
        "save": None,
        "save_interval": None,
        "non_persistent_save_interval": None,
        "rollout_eval_prompts": (),
        "eval_interval": 1000,
        "adlr_autoresume": False,
        "adlr_autoresume_interval": 1000,
        "iteration": 8,
        "load": "DIR",
        "rollout_save_hf_interval": None,
    } | given
    try:
        check(types.SimpleNamespace(**args))
    except ValueError as error:
        return str(error)


check, loaded = run_flags.check_updates, run_flags.check_loaded_iteration
say(
    refused=[
        said(check, **given)
        for given in (
            {"train_iters": 18},
            {"train_iters": None, "train_samples": 8 * 17},
            {"exit_interval": 6},
            {"save": "S", "save_interval": 2},
            {"save": "S", "non_persistent_save_interval": 1},
            {"rollout_eval_prompts": ("p",), "eval_interval": 1002},
            {"adlr_autoresume": True, "adlr_autoresume_interval": 2},
            {"phase_transition_iterations": [4, 7]},
            {"rollout_save_hf_interval": 3},
        )
    ],
    taken=[
        said(check),
        said(check, save_interval=3),
        said(check, eval_interval=1001),
        said(check, train_iters=None, train_samples=8 * 16 + 7),
        said(check, save="S", save_interval=12),
        said(check, train_iters=17, rollout_updates_per_batch=1, rollout_epochs_per_batch=1),
    ],
    loaded=[said(loaded), said(loaded, iteration=10)],
)
"""


def test_updates_of_a_batch_when_a_run_would_save_or_end_within_one_then_refused_with_the_flag(results):
    found = results["updates"]
    flags = [
        "--train-iters 18",
        "--train-samples / --global-batch-size 17",
        "--exit-interval 6",
        "--save-interval 2",
        "--non-persistent-save-interval 1",
        "--eval-interval 1002",
        "--adlr-autoresume-interval 2",
        "--phase-transition-iterations 7",
        "--rollout-save-hf-interval 3",
    ]
    for said, flag in zip(found["refused"], flags, strict=True):
        assert said == (
            f"{flag} must be a multiple of 4, the updates that a batch makes (--rollout-updates-per-batch 2 "
            "x --rollout-epochs-per-batch 2): a run saves, evaluates and ends between two batches"
        )
    assert found["taken"] == [None] * 6
    taken, refused = found["loaded"]
    assert taken is None
    assert refused.startswith(
        "--load DIR: iteration 10 of the checkpoint is not a multiple of 4, the updates that a "
    )


CASES["save hf"] = """
import pathlib, tempfile
from megatron_rl_corr.features.export.feature import ExportFeature

root = pathlib.Path(tempfile.mkdtemp())
(root / "link").symlink_to(root / "saved")


def said(folder, save=None, load=None, source="m"):
    options = types.SimpleNamespace(save_hf=folder and str(root / folder), hf_checkpoint=str(root / source))
    try:
        ExportFeature.check_folders(
            options, types.SimpleNamespace(save=save and str(root / save), load=load and str(root / load))
        )
    except ValueError as error:
        return str(error).replace(str(root), "ROOT")


say(
    refused=[
        said("saved", save="saved"),
        said("saved/", load="saved"),
        said("link", save="there/../saved"),
        said("hf", source="hf/iter_0000040"),
    ],
    taken=[said(None, save="saved"), said("saved/hf", save="saved", load="saved", source="hf/iter_0000040")],
)
"""


def test_hf_folders_when_they_would_replace_megatrons_checkpoints_or_the_start_then_refused(results):
    found = results["save hf"]
    *megatrons, start = found["refused"]
    for said, (folder, flag) in zip(
        megatrons, [("saved", "--save"), ("saved", "--load"), ("link", "--save")], strict=True
    ):
        assert said.startswith(f"--rollout-save-hf ROOT/{folder} is the folder of {flag}, where Megatron's ")
    assert start.startswith(
        "--rollout-save-hf ROOT/hf holds --rollout-hf-checkpoint ROOT/hf/iter_0000040, which a "
    )
    assert found["taken"] == [None, None]


CASES["end of a batch"] = """
asked = []
args = types.SimpleNamespace(iteration=3, curr_iteration=3, exit_interval=None)


class Step:
    features, step = (), types.SimpleNamespace(leaves_after_batch=False)


session.start = lambda *args: Step()
run_flags.check_loaded_iteration = lambda args: None
start_checks.check_start = lambda config, options, args: None
hooks.all_reduce_startup = lambda prepare: prepare()
training.get_args = lambda: args
training.setup_model_and_optimizer = lambda model_provider_func, model_type: (
    "model",
    "optimizer",
    "scheduler",
)


def checkpoint_and_decide_exit(model, optimizer, opt_param_scheduler, iteration, *rest):
    asked.append([iteration, args.exit_interval])
    return True


training.checkpoint_and_decide_exit = checkpoint_and_decide_exit
FLAGS += ["--rollout-updates-per-batch", "4"]
install()
before = training.checkpoint_and_decide_exit(None, None, None, 2)
training.setup_model_and_optimizer("provider", "type")
found = [training.checkpoint_and_decide_exit(None, None, None, iteration) for iteration in (5, 6, 7, 8)]
Step.step.leaves_after_batch = True
found += [
    training.checkpoint_and_decide_exit(None, None, None, iteration=iteration) for iteration in (10, 12)
]
say(before=before, found=found, asked=asked, interval=args.exit_interval)
"""


def test_end_when_asked_for_within_a_batch_then_it_waits_for_the_batchs_last_update(results):
    found = results["end of a batch"]
    assert found["before"] is True and found["found"] == [False, False, False, True, False, True]
    # Where the rerun state machine asked to leave, as at an --exit-interval.
    assert found["asked"] == [[2, None], [8, None], [12, 1]] and found["interval"] is None
