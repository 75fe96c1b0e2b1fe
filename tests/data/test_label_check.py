"""Labels are judged before the first sample: in the workers, by row, all of them or those drawn first."""

import asyncio
import json

import pytest

from megatron_rl_corr.config.flags import parse
from megatron_rl_corr.data import label_check
from megatron_rl_corr.data.label_check import unread_labels
from megatron_rl_corr.data.prompt import Prompt
from megatron_rl_corr.data.prompt_files import open_prompts
from megatron_rl_corr.data.prompt_format import PromptFormat
from megatron_rl_corr.data.prompts import PromptDataset
from megatron_rl_corr.data.rewards import Rewards
from megatron_rl_corr.data.tokenizer import Tokenizer
from tests.data.test_reward_text import Letters

LABELS = [42, "1 1/2", "12 34", None, 0.5, "7", "12 34", ["1", "x2"], True, "-3.5", "C"]
UNREAD = [2, 3, 6, 7, 8]


def data(labels=LABELS):
    return PromptDataset(
        [Prompt(row, [1], label=label) for row, label in enumerate(labels)], warn=lambda line: None
    )


def checked(labels=LABELS, reward="math", workers=None, **how):
    async def scenario():
        rewards = Rewards(reward, limit_s=60.0, workers=workers, tokenizer=Tokenizer(Letters(), "letters"))
        await rewards.start()
        try:
            await rewards.check_readable(prompts, "--rollout-prompts", **how)
        finally:
            await rewards.close()

    prompts = data(labels)
    asyncio.run(scenario())
    return prompts


@pytest.mark.parametrize("workers", [0, 1])
def test_labels_when_not_read_whole_then_counted_and_named(workers):
    with pytest.raises(ValueError) as raised:
        checked(workers=workers, drop=False)
    said = str(raised.value)
    assert said.startswith(
        "--rollout-prompts: `reward_function` math can't read the label of 5 of the 11 rows that were "
        "looked at; row 2 has the label '12 34': there is nothing between the numbers '12' and '34'; row 3 "
        "has the label None: row 3 of the data set has the label None; it must be text, a number, or a list "
    )
    assert "; row 6 has the label '12 34': " in said
    assert "row 7 has the label ['1', 'x2']: a digit stands behind a letter in 'x2'" in said
    assert "row 8 has the label True: " in said
    assert said.endswith("use exact or f1, or train without these rows with `unread_labels` drop")


def test_labels_when_dropped_then_a_line_and_never_drawn(capsys):
    prompts = checked(workers=1, drop=True)
    assert (
        "of 5 of the 11 rows" in (line := capsys.readouterr().err) and "--rollout-unread-labels drop" in line
    )
    kept = {prompts.index_at(number) for number in range(11) if prompts.can_be_drawn(number)}
    assert kept == set(range(11)) - set(UNREAD)
    assert prompts.skipped.since_last()["skipped_label"] == 5


def test_labels_when_many_are_unread_then_the_first_five_named():
    with pytest.raises(ValueError) as raised:
        checked([*[f"{row} 34" for row in range(12, 20)], "1"], workers=0, drop=False)
    assert "of 8 of the 9 rows" in str(raised.value) and str(raised.value).count("has the label") == 5


def test_labels_when_all_are_unread_then_refused_though_dropped():
    with pytest.raises(ValueError, match="of 2 of the 2 rows"):
        checked(["12 34", "x2"], workers=0, drop=True)


def test_labels_when_held_out_then_no_remedy_that_leaves_rows_out():
    with pytest.raises(ValueError, match="Mend the labels, or use exact or f1$"):
        checked(workers=0)


def test_labels_when_all_are_read_or_the_reward_reads_none_then_nothing_is_said(capsys):
    checked([42, "1 1/2", "C", ["1", "2"]], workers=0, drop=False)
    checked(reward="exact", workers=0, drop=False)
    assert capsys.readouterr().err == ""


def test_labels_when_a_worker_hangs_on_one_then_that_one_is_named():
    async def problems_of(labels):
        if len(labels) > 1:
            return [problem for label in labels for problem in await problems_of([label])]
        return [None if labels == [["1/2"]] else f"asked {labels[0]}"]

    read, problems = asyncio.run(unread_labels(data(["1/2", "3/4", "3/4", 5]), problems_of))
    assert read == 4 and problems == {1: ("3/4", "asked ['3/4']"), 2: ("3/4", "asked ['3/4']")}


def test_labels_when_there_are_more_rows_than_are_read_then_those_drawn_first(monkeypatch):
    asked = []

    async def problems_of(labels):
        asked.extend(text for [text] in labels)
        return [None] * len(labels)

    monkeypatch.setattr(label_check, "LABELS_READ", 5)
    prompts = data([f"{row}/7" for row in range(40)])
    assert asyncio.run(unread_labels(prompts, problems_of)) == (5, {})
    assert set(asked) == {f"{prompts.index_at(number)}/7" for number in range(5)}


def test_labels_when_in_files_then_read_without_their_prompts(tmp_path):
    path = tmp_path / "p.jsonl"
    rows = [
        {"prompt": 5, "reward": {"truth": "1/2"}},
        {"input_ids": [1], "reward": {"truth": "x2"}},
        {"input_ids": [1]},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = open_prompts([str(path)], PromptFormat(label_key="reward.truth"))

    async def problems_of(labels):
        return [f"not {texts}" for texts in labels]

    read, problems = asyncio.run(unread_labels(prompts, problems_of))
    assert read == 2 and problems == {0: ("1/2", "not ['1/2']"), 1: ("x2", "not ['x2']")}


def test_flag_when_no_reward_reads_labels_then_without_effect():
    given = [
        "--rollout-url",
        "http://127.0.0.1:9",
        "--rollout-hf-checkpoint",
        "m",
        "--rollout-max-new-tokens",
        "8",
        "--rollout-prompts",
        "p.jsonl",
        "--rollout-unread-labels",
        "drop",
        "--rollout-reward-function",
    ]
    assert parse([*given, "math"])[1].unread_labels == "drop"
    with pytest.raises(ValueError, match="unread.labels.* drop has no effect without .*math"):
        parse([*given, "exact"])
