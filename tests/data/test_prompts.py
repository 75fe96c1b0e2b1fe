"""The sequence of prompts: which number draws which prompt, and what is done about rows that have none."""

import pytest

from megatron_rl_corr.data.rows import BadRow, ChangedFile, LongPrompt
from megatron_rl_corr.data.skipped import HOPELESS_SKIPS, NAMED_ROWS, TooManyBadRows
from megatron_rl_corr.rollout import Prompt, PromptDataset


def dataset(size, seed=0):
    return PromptDataset([Prompt(i, [i + 1]) for i in range(size)], seed=seed)


def indices(prompts):
    return [prompt.index for prompt in prompts]


def test_batch_when_the_epoch_is_not_a_multiple_of_it_then_each_epoch_still_has_every_prompt_once():
    data = dataset(5)
    dealt = [i for step in range(5) for i in indices(data.batch(step, 3))]  # 15 prompts: 3 epochs
    epochs = [dealt[0:5], dealt[5:10], dealt[10:15]]
    assert all(sorted(epoch) == [0, 1, 2, 3, 4] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1


def test_batch_when_larger_than_the_data_set_then_runs_over_several_epochs():
    dealt = indices(dataset(3).batch(0, 7))
    assert sorted(dealt[:3]) == sorted(dealt[3:6]) == [0, 1, 2] and len(dealt) == 7


def test_batch_when_asked_out_of_order_or_again_then_depends_on_seed_and_step_only():
    ahead = [indices(dataset(50).batch(step, 8)) for step in range(10)]
    again = dataset(50)
    assert [indices(again.batch(step, 8)) for step in (9, 3, 3)] == [ahead[9], ahead[3], ahead[3]]
    assert indices(dataset(50, seed=1).batch(0, 8)) != ahead[0]


def test_batch_when_numpy_is_upgraded_then_the_order_stays():
    # Noted down once: a resumed run must go on with the same prompts.
    assert indices(dataset(8, seed=3).batch(0, 8)) == [1, 4, 2, 0, 3, 5, 7, 6]


def test_at_when_asked_in_any_order_then_the_sequence_of_the_batches():
    data = dataset(5, seed=2)
    sequence = indices(prompt for step in range(4) for prompt in data.batch(step, 5))
    assert [data.at(number).index for number in range(20)] == sequence
    assert [data.at(number).index for number in (19, 0, 7, 12)] == [sequence[n] for n in (19, 0, 7, 12)]
    assert [data.index_at(number) for number in range(20)] == sequence


@pytest.mark.parametrize("step, n", [(-1, 1), (0, 0)])
def test_batch_when_step_or_size_is_out_of_bounds_then_error(step, n):
    with pytest.raises(ValueError, match="step must be at least 0 and n at least 1"):
        dataset(2).batch(step, n)


def test_dataset_when_empty_or_the_seed_is_out_of_bounds_then_error():
    with pytest.raises(ValueError, match="at least one prompt"):
        PromptDataset([])
    with pytest.raises(ValueError, match="seed must be in"):
        dataset(1, seed=-1)


class Rows(list):
    """Prompts of which some raise; `made` counts."""

    def __init__(self, size, errors):
        super().__init__(range(size))
        self.errors, self.made = errors, []

    def __getitem__(self, index):
        self.made.append(index)
        if index in self.errors:
            raise self.errors[index]
        return Prompt(index, [1])


def drawn(data, numbers):
    return [number for number in numbers if data.can_be_drawn(number)]


def test_can_be_drawn_when_rows_are_bad_or_too_long_then_they_are_counted_by_cause_and_named_once():
    lines = []
    rows = Rows(
        10, {3: BadRow("p:4: not JSON"), 5: LongPrompt("p:6: 9 tokens"), 6: LongPrompt("p:7: 8 tokens")}
    )
    data = PromptDataset(rows, seed=1, warn=lines.append)
    order = [data.index_at(number) for number in range(30)]
    assert drawn(data, range(20)) == [number for number in range(20) if order[number] not in (3, 5, 6)]
    first_long = next(index for index in order if index in (5, 6))
    assert sorted(lines) == sorted(
        [
            "p:4: not JSON; the row is left out",
            f"{rows.errors[first_long]}; the row is left out; further ones are only counted",
        ]
    )
    assert data.skipped.since_last() == {"skipped_bad": 2, "skipped_long": 4, "skipped_label": 0}
    assert data.skipped.since_last() == {"skipped_bad": 0, "skipped_long": 0, "skipped_label": 0}
    drawn(data, range(20, 30))
    assert (
        data.skipped.since_last() == {"skipped_bad": 1, "skipped_long": 2, "skipped_label": 0}
        and len(lines) == 2
    )


def test_at_when_the_prompt_was_drawn_then_its_row_is_not_read_again():
    data = PromptDataset(rows := Rows(10, {}))
    assert data.can_be_drawn(4) and data.at(4).index == data.index_at(4)
    assert rows.made == [data.index_at(4)]


def test_can_be_drawn_when_more_than_half_of_the_rows_are_bad_then_the_run_ends_with_the_last():
    lines = []
    data = PromptDataset(
        Rows(1000, {i: BadRow(f"p:{i + 1}: not JSON") for i in range(0, 1000, 3)}), warn=lines.append
    )
    drawn(data, range(1000))  # a third: never
    data.at(0 if data.index_at(0) % 3 else 1)
    assert len(lines) == NAMED_ROWS and lines[-1].endswith(
        "; the row is left out; further ones are only counted"
    )
    bad = {i: BadRow(f"p:{i + 1}: not JSON") for i in range(1000) if i % 3}
    data = PromptDataset(Rows(1000, bad), warn=lines.append)
    number = next(n for n in range(1000) if data.can_be_drawn(n) and n >= 99)
    with pytest.raises(
        TooManyBadRows,
        match=r"of the last 100 prompts drawn are bad rows; the last: p:\d+: not JSON; "
        r"mend the data, or the flags",
    ):
        data.at(number)


@pytest.mark.parametrize("size, read", [(40, 40), (5000, HOPELESS_SKIPS)])
def test_can_be_drawn_when_all_rows_are_too_long_then_the_run_ends_after_an_epoch_or_a_thousand(size, read):
    rows = Rows(size, {i: LongPrompt("p: 9 tokens") for i in range(size)})
    data = PromptDataset(rows, warn=lambda line: None)
    assert drawn(data, range(read)) == [read - 1]
    with pytest.raises(
        TooManyBadRows, match=f"the last {read} prompts drawn were all left out; the last: p: 9 tokens"
    ):
        data.at(read - 1)


def test_can_be_drawn_when_the_label_can_not_be_read_then_counted_apart_and_no_end_of_the_run():
    lines = []
    data = PromptDataset(rows := Rows(1000, {}), warn=lines.append)
    data.leave_out(dict.fromkeys(range(0, 1000, 3), "the label 'x2': why"))
    drawn_rows = {data.index_at(number) for number in drawn(data, range(1000))}
    assert drawn_rows == {row for row in range(1000) if row % 3} and drawn_rows == set(rows.made)
    assert data.skipped.since_last() == {"skipped_bad": 0, "skipped_long": 0, "skipped_label": 334}
    assert len(lines) == 1 and lines[0].endswith(
        "'x2': why; the row is left out; further ones are only counted"
    )
    data.leave_out(dict.fromkeys(range(1000), "why"))
    drawn(data, range(1000))
    with pytest.raises(TooManyBadRows, match="the last 1000 prompts drawn were all left out"):
        data.at(0)


def test_label_when_asked_for_then_no_prompt_is_made():
    rows = Rows(10, {3: BadRow("p:4: not JSON")})
    assert PromptDataset(rows, labels=lambda row: 7 * row).label(4) == 28 and rows.made == []
    assert PromptDataset([Prompt(0, [1], label="a")]).label(0) == "a"


def test_can_be_drawn_when_a_file_was_changed_then_it_is_told_where_the_prompt_is_used():
    data = PromptDataset(Rows(4, dict.fromkeys(range(4), ChangedFile("p.jsonl"))))
    assert data.can_be_drawn(0)  # the queue draws where nobody would see an error
    with pytest.raises(
        ChangedFile, match="p.jsonl changed while the run reads it: .*; restore it, or start anew"
    ):
        data.at(0)
    assert data.skipped.since_last() == {"skipped_bad": 0, "skipped_long": 0, "skipped_label": 0}
