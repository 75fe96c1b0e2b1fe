"""What a user gets wrong before the first step, by the real launcher: one line with the flag, its
value and the remedy.

Each row is a start of its own, in a fork; none may print a traceback, and what can be known before a model
is made is said before.
"""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.faults.drills import RUNS_ALL, drill, long
from tests.faults.starts import run_starts
from tests.matrix.patched import cpu_flags
from tests.mcore.launched import checksums
from tests.preloaded import PreloadedServer
from tools.cpu import environment, sglang_arguments, vllm_arguments

SCRIPT = "tests/faults/start_script.py"
NOT_WRITABLE = "/sys/kernel/megatron_rl_corr"
"""Where root can make no folder either."""
FOLDERS = {
    "--rollout-log-dir": 2,
    "--tensorboard-dir": 2,
    "--save": 2,
    "--rollout-save-trajectories": 1,
    "--rollout-trace": 1,
    "--rollout-save-hf": 1,
    "--rollout-weight-dir": 1,
}
"""Flags of folders -> status of the start that can't write one: 2 before anything is imported."""
FULL = 300_000
"""Bytes of a file, as on a disk that is nearly full."""


def base(folder, model, **changed):
    """The command line of a run that nothing is wrong with; changed: flags by their words,
    None leaves one out.
    """
    given = {
        "rollout_url": "http://127.0.0.1:9",
        "rollout_hf_checkpoint": model,
        "tokenizer_model": model,
        "rollout_prompts": folder / "prompts.jsonl",
        "rollout_reward_function": f"{folder / 'user.py'}:reward",
        "rollout_group_size": 4,
        "rollout_max_new_tokens": 8,
    } | changed
    words = [
        f"--{name.replace('_', '-')} {value}".split(" ") for name, value in given.items() if value is not None
    ]
    return [SCRIPT, *cpu_flags(model), *(word for pair in words for word in pair)]


USER = """
def reward(prompt, output_ids, finish_reason):
    return 1.0
def advantage(rewards, kept, tokens):
    exit()
def loss(inputs, config):
    raise SystemExit("enough")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("starts")
    (folder / "user.py").write_text(USER)
    (folder / "leaves.py").write_text("import sys\nsys.exit('I leave')\n")
    (folder / "prompts.jsonl").write_text("".join(f'{{"input_ids": [3, 1, 4, {n}]}}\n' for n in range(4, 12)))
    (folder / "file").write_text("")
    return folder


def folder_rows(folder, model):
    """Name -> (row, words of its line, a model may be made before)."""
    rows = {}
    elsewhere = folder / "elsewhere"
    for number, flag in enumerate(FOLDERS):
        name = flag.removeprefix("--").replace("-", "_")
        more = {"rollout_weight_transport": "disk"} if flag == "--rollout-weight-dir" else {}
        under, full = folder / "file/x", folder / f"full{number}"
        cases = {
            "read-only": (NOT_WRITABLE, "can't be made: .*; name another folder", None),
            "under a file": (under, "can't be made: Not a directory; name another folder", None),
            "full": (full, r"can't be written: File too large; raise the limit of a file's size", FULL),
        }
        for kind, (place, words, limit) in cases.items():
            row = {"words": base(folder, model, **more, **{name: place}), "limit": limit}
            rows[f"{flag} {kind}"] = row, f"{flag} {place} {words}"
    linked = folder / "linked"
    linked.mkdir()
    (linked / "metrics.jsonl").symlink_to(elsewhere)
    (linked / ".unfinished").symlink_to(folder)
    (linked / "iter_0000001").symlink_to(folder)
    (folder / "gone").symlink_to(elsewhere)
    through = f"is a link to {folder}, and nothing is written through one; remove it"
    for name, more, words in (
        (
            "rollout_log_dir",
            {},
            f"{linked}/metrics.jsonl: it is a link to {elsewhere}, and nothing is written through",
        ),
        (
            "rollout_weight_dir",
            {"rollout_weight_transport": "disk"},
            f"{linked}: .unfinished in it {through}",
        ),
        ("rollout_save_hf", {}, f"{linked}: iter_0000001 in it {through}"),
    ):
        flag = "--" + name.replace("_", "-")
        rows[f"{flag} link"] = {"words": base(folder, model, **more, **{name: linked})}, f"{flag}:? {words}"
    rows["--rollout-log-dir link to nothing"] = (
        {"words": base(folder, model, rollout_log_dir=folder / "gone")},
        f"--rollout-log-dir {folder / 'gone'} is a link to {elsewhere}, which is not there; make that, or "
        "name another",
    )
    return rows


def changed_model(folder, model, name, change):
    """A copy of the model that `change(its folder)` breaks."""
    copy = folder / name
    shutil.copytree(model, copy)
    change(copy)
    return copy


def cut(model):
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def reshaped(of, rows):
    def change(model):
        tensors = load_file(model / "model.safetensors")
        [name] = [one for one in tensors if one.endswith(of)]
        tensors[name] = torch.zeros(rows, *tensors[name].shape[1:], dtype=tensors[name].dtype)
        save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})

    return change


def checkpoint_rows(folder, model):
    """Name -> (row, words of its line)."""
    changes = {
        "cut": (cut, "can't be read as safetensors .*; copy or save the model anew"),
        "no json": (
            lambda copy: (copy / "config.json").write_text("{"),
            "config.json is not JSON: Expecting",
        ),
        "empty": (lambda copy: (copy / "model.safetensors").unlink(), "has neither model.safetensors nor"),
        "index": (
            lambda copy: (copy / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone"}}'),
            "gone can't be read as safetensors",
        ),
    }
    rows = {}
    for name, (change, words) in changes.items():
        copy = changed_model(folder, model, f"model {name}".replace(" ", "_"), change)
        flags = base(folder, model, rollout_hf_checkpoint=copy)
        rows[f"checkpoint {name}"] = {"words": flags}, f"--rollout-hf-checkpoint.*{copy}.*{words}"
    flags = base(folder, model, rollout_reference_checkpoint=folder / "model_cut", rollout_kl_loss_coef=0.1)
    rows["checkpoint of the reference cut"] = (
        {"words": flags},
        f"--rollout-reference-checkpoint {folder / 'model_cut'}: .*{changes['cut'][1]}",
    )
    return rows


def shape_rows(folder, model):
    rows = {}
    for of in (
        "layers.0.self_attn.q_proj.weight",
        "embed_tokens.weight",
        "layers.1.mlp.experts.1.up_proj.weight",
    ):
        copy = changed_model(folder, model, of, reshaped(of, 200))
        flags = base(folder, model, rollout_hf_checkpoint=copy)
        words = f"--rollout-hf-checkpoint {copy}: {copy}/model.safetensors: \\S*{of} is \\(200, .*needs \\("
        rows[f"shape of {of}"] = {"words": flags}, words
    return rows


def user_rows(folder, model):
    left = r"called exit\('I leave'\) while it was loaded"
    missing, broken = folder / "missing.jsonl", folder / "broken.jsonl"
    broken.write_text('{"input_ids": [1]}\n{"input_ids": [100000]}\n')
    return {
        "prompts missing": (
            {"words": base(folder, model, rollout_prompts=missing)},
            f"--rollout-prompts: {missing}: there is no such file or folder",
        ),
        "prompts a folder": (
            {"words": base(folder, model, rollout_prompts=folder)},
            f"--rollout-prompts: {folder}: neither Parquet files",
        ),
        "prompts with an id beyond the vocabulary": (
            {"words": base(folder, model, rollout_prompts=broken)},
            f"--rollout-prompts: {broken}:2: .*100000",
        ),
        "held-out prompts missing": (
            {"words": base(folder, model, rollout_eval_prompts=missing, eval_interval=2)},
            f"--rollout-eval-prompts: {missing}: there is no such file or folder",
        ),
        "advantage that leaves": (
            {"words": base(folder, model, rollout_advantage=f"{folder / 'user.py'}:advantage")},
            rf"--rollout-advantage {folder / 'user.py'}:advantage failed on made-up numbers: .* called "
            r"exit\(None\)",
        ),
        "loss that leaves": (
            {"words": base(folder, model, rollout_loss=f"{folder / 'user.py'}:loss")},
            rf"--rollout-loss {folder / 'user.py'}:loss failed on made-up numbers: .* called "
            r"exit\('enough'\)",
        ),
        "reward's file that leaves": (
            {"words": base(folder, model, rollout_reward_function=f"{folder / 'leaves.py'}:reward")},
            f"--rollout-reward-function {folder / 'leaves.py'}:reward {left}",
        ),
        "environment's file that leaves": (
            {"words": base(folder, model, rollout_environment=f"{folder / 'leaves.py'}:made")},
            f"--rollout-environment {folder / 'leaves.py'}:made {left}",
        ),
        "loss's file that leaves": (
            {"words": base(folder, model, rollout_loss=f"{folder / 'leaves.py'}:loss")},
            f"--rollout-loss {folder / 'leaves.py'}:loss {left}",
        ),
    }


AFTER_MODEL = ("shape", "prompts", "held-out", "loss", "advantage", "reward", "environment")
"""Rows that may be found once there is a model."""


FEW = (
    "--rollout-log-dir read-only",
    "--rollout-log-dir link",
    "--tensorboard-dir under a file",
    "--save full",
    "--rollout-save-trajectories under a file",
    "--rollout-trace full",
    "--rollout-save-hf link",
    "--rollout-weight-dir full",
    "checkpoint cut",
    "shape of layers.0.self_attn.q_proj.weight",
    "prompts missing",
    "advantage that leaves",
    "loss's file that leaves",
)
"""Rows of `make test`: a start takes a second or two once Megatron is imported."""


@pytest.fixture(scope="module")
def starts(folder, tiny_moe_dir):
    """Name -> (the words that its line must have, its rank, ended)."""
    rows = {}
    for made in (folder_rows, checkpoint_rows, shape_rows, user_rows):
        rows |= made(folder, tiny_moe_dir)
    if not RUNS_ALL:
        rows = {name: row for name, row in rows.items() if name in FEW}
    ended = run_starts({name: row for name, (row, _) in rows.items()}, folder)
    return {name: (rows[name][1], ended[name][0]) for name in rows}


@drill(
    "a folder that can't be written, a broken checkpoint, unusable prompts, or user's functions",
    promised="one line: flag, value, remedy; no traceback; where it can be known, no model",
)
def test_start_when_something_is_wrong_then_one_line_with_its_flag_and_no_model(starts, seen):
    wrong = {}
    for name, (words, rank) in starts.items():
        said = rank.lines
        model = "A MODEL IS MADE" in rank.out
        right = (
            len(said) == 1
            and re.match(words, said[0])
            and rank.status in (1, 2)
            and "Traceback" not in rank.err
            and (not model or name.startswith(AFTER_MODEL))
        )
        if not right:
            wrong[name] = (rank.status, words, said, model, rank.err[-1500:])
    assert not wrong, "\n\n".join(f"{name}: {what}" for name, what in wrong.items())
    seen(f"{len(starts)} starts, the longest {max(rank.seconds for _, rank in starts.values()):.1f} s")


SEVERAL = (
    (["--eval-iters", "2"], "--eval-iters 2: evaluation would score the script's data set"),
    (["--iterations-to-skip", "3"], "--iterations-to-skip [3]: "),
    (
        ["--rollout-group-size", "3"],
        "--global-batch-size 8 must be a multiple of --rollout-group-size 3 times the",
    ),
    (
        ["--rollout-max-new-tokens", "40"],
        "--seq-length 32 with --rollout-max-new-tokens 40 has no room for a prompt",
    ),
    (
        ["--attention-dropout", "0.1", "--num-layers", "3"],
        "Megatron would train another policy than the servers",
    ),
    (
        ["--rollout-advantage", "user.py:advantage"],
        "--rollout-advantage user.py:advantage failed on made-up numbers",
    ),
)
"""What Megatron's arguments are needed for -> how what is told of it begins."""
OF_DATA = (
    (["--rollout-prompts", "beyond.jsonl"], "--rollout-prompts: beyond.jsonl:2: token id 100000"),
    (
        ["--rollout-eval-prompts", "beyond.jsonl", "--eval-interval", "2"],
        "--rollout-eval-prompts: beyond.jsonl:2: ",
    ),
    (
        ["--rollout-environment", "leaves.py:made"],
        "--rollout-environment leaves.py:made called exit('I leave')",
    ),
    (
        ["--rollout-reward-function", "leaves.py:reward"],
        "--rollout-reward-function leaves.py:reward called exit(",
    ),
)
"""The same for what all of the data, or the user's files, are needed for."""


def listed(rank):
    """The problems of a rank's report, a text each."""
    [head], texts = rank.lines, re.split(r"^ +\d+\. ", rank.err, flags=re.MULTILINE)[1:]
    assert head == f"{len(texts)} problems:"
    return texts


@drill("several of these at once", promised="one list, on one rank: each with its flag; nothing twice")
def test_start_when_several_things_are_wrong_then_one_list_and_the_other_rank_only_says_so(
    tiny_moe_dir, folder, seen
):
    (folder / "beyond.jsonl").write_text('{"input_ids": [1]}\n{"input_ids": [100000]}\n')
    plain = base(folder, tiny_moe_dir)

    def words(mistakes):
        flags = [word for words, _ in mistakes for word in words]
        return [
            *plain,
            *(f"{folder}/{word}" if ".py:" in word or ".jsonl" in word else word for word in flags),
        ]

    rows = {"arguments": {"words": words(SEVERAL), "ranks": 2}, "data": {"words": words(OF_DATA)}}
    found = run_starts(rows, folder)
    first, second = found["arguments"]
    [alone] = found["data"]
    for rank, told in ((first, SEVERAL), (alone, OF_DATA)):
        texts = [text.replace(f"{folder}/", "") for text in listed(rank)]
        for _, begins in told:
            assert sum(text.startswith(begins) for text in texts) == 1, (begins, texts)
        assert len(texts) == len(told) and rank.status == 1 and "Traceback" not in rank.err
    assert (
        "--num-layers 3" in rank_text(first, "another policy")
        and "A MODEL IS MADE" not in first.out + second.out
    )
    assert second.status == 1 and second.lines == [
        f"rank 0 failed: StartupError: {len(SEVERAL)} problems, which its own message lists; this is rank 1"
    ]
    seen(f"{len(SEVERAL)} and {len(OF_DATA)} problems, each told once")


def rank_text(rank, words):
    """The problem with these words."""
    return next(text for text in listed(rank) if words in text)


def halved(model):
    """Two of the four layers."""
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    tensors = load_file(model / "model.safetensors")
    left = {name: tensor for name, tensor in tensors.items() if not re.search(r"layers\.[23]\.", name)}
    save_file(left, model / "model.safetensors", metadata={"format": "pt"})


@long
@drill("two servers, one with 2 of the model's 4 layers", promised="named before a byte is sent to either")
@pytest.mark.parametrize("engine, arguments", [("sglang", sglang_arguments()), ("vllm", vllm_arguments())])
def test_start_when_a_server_has_half_of_the_layers_then_named_and_the_other_is_untouched(
    engine, arguments, sglang_server_fp32, tiny_moe_dir, folder, seen
):
    half = changed_model(folder, tiny_moe_dir, f"half {engine}".replace(" ", "_"), halved)
    before = checksums(sglang_server_fp32.url)
    with PreloadedServer(
        half,
        engine=engine,
        dtype="float32",
        log_path=folder / f"{engine}.log",
        extra_arguments=arguments,
        environment=environment(engine),
    ) as server:
        urls = f"{sglang_server_fp32.url} {server.url}"
        hidden = folder / f"hidden_{engine}"
        rows = {"by its folder": {"words": base(folder, tiny_moe_dir, rollout_url=urls)}}
        rows["by its parameters"] = rows["by its folder"]
        found = run_starts({"by its folder": rows["by its folder"]}, folder)
        half.rename(hidden)  # as on another host: the folder can't be read
        found |= run_starts({"by its parameters": rows["by its parameters"]}, folder)
    for name, words in (
        ("by its folder", "num_hidden_layers 2 where"),
        ("by its parameters", "it has none of "),
    ):
        [rank] = found[name]
        [said] = rank.lines
        assert rank.status == 1 and "Traceback" not in rank.err
        assert said.startswith(
            f"--rollout-url {server.url}: it has another model than --rollout-hf-checkpoint"
        )
        assert words in said
    assert checksums(sglang_server_fp32.url) == before
    seen(f"{engine}: named by its folder, and by its parameters where that can't be read")


LATE = """
import os
def loss(inputs, config):
    if inputs.logprobs.numel() > 6 and os.environ["RANK"] == "1":  # of a step, not made up
        exit()
    return -inputs.advantages * inputs.logprobs
"""


@long
@drill(
    "exit() in the user's loss, in the first step, on one rank of two",
    promised="an error that both ranks name",
)
def test_step_when_the_users_loss_calls_exit_on_one_rank_then_both_end_with_its_name(
    trained_server, tiny_moe_dir, folder, seen
):
    (folder / "late.py").write_text(LATE)
    changed = {
        "rollout_url": trained_server.url,
        "rollout_loss": f"{folder / 'late.py'}:loss",
        "rollout_server_check": "off",
    }
    found = run_starts({"loss": {"words": base(folder, tiny_moe_dir, **changed), "ranks": 2}}, folder)
    first, second = found["loss"]
    words = (
        f"rank 1 failed: RuntimeError: --rollout-loss {folder / 'late.py'}:loss called exit(None); a run "
        "ends after"
    )
    assert first.status == second.status == 1, first.err[-2000:] + second.err[-2000:]
    for rank in (first, second):
        assert [line for line in rank.lines if line.startswith(words)] == rank.lines[-1:]
    seen(f"both end {abs(first.seconds - second.seconds):.1f} s apart")


@long
@drill(
    "the disk is full when a Hugging Face folder is written",
    promised="the run ends with its flag, no half folder",
)
def test_step_when_a_disk_is_full_by_then_the_flag_is_named_and_no_folder_looks_whole(
    trained_server, tiny_moe_dir, folder, seen
):
    out = folder / "hf"
    changed = {
        "rollout_url": trained_server.url,
        "rollout_save_hf": out,
        "rollout_save_hf_interval": 1,
        "rollout_server_check": "off",
    }
    row = {"words": base(folder, tiny_moe_dir, **changed), "limit": 1_500_000}  # of 2 MB of weights
    [rank] = run_starts({"full": row}, folder)["full"]
    assert rank.status == 1, rank.err[-2000:]
    assert rank.lines[-1].startswith(f"rank 0 failed: OSError: --rollout-save-hf {out}: "), rank.err[-2000:]
    assert [path.name for path in out.iterdir()] == [".iter_0000001.unfinished"]
    seen(rank.lines[-1].partition(": OSError: ")[2][-60:])
