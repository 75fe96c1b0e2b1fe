"""Prompts: rows of the file, errors with file and line, and which prompts a step gets."""

import pytest

from megatron_rl_corr.rollout import Prompt, PromptDataset


def dataset(size, seed=0):
    return PromptDataset([Prompt(i, [i + 1]) for i in range(size)], seed=seed)


def indices(prompts):
    return [prompt.index for prompt in prompts]


def test_from_jsonl_when_rows_hold_ids_or_text_then_their_other_keys_are_metadata(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"input_ids": [3, 1], "answer": "4"}\n\n{"prompt": "ab", "level": 2}\n')
    first, second = PromptDataset.from_jsonl(path, lambda text: [ord(c) for c in text]).prompts
    assert first == Prompt(0, [3, 1], {"answer": "4"})
    assert second == Prompt(1, [97, 98], {"prompt": "ab", "level": 2}, "ab")


@pytest.mark.parametrize(
    "row, named",
    [
        ('{"input_ids": [1]', "not JSON"),
        ("[1, 2]", "expected a JSON object, got list"),
        ('{"text": "a"}', "one of .* got the keys ..text"),
        ('{"prompt": "a", "input_ids": [1]}', "one of .* got the keys"),
        ('{"prompt": 5}', '"prompt" must be text, got int'),
        ('{"prompt": "a"}', "there is no tokenizer"),
        ('{"input_ids": []}', '"input_ids" must be a non-empty list'),
        ('{"input_ids": [1, -1]}', "integers of at least 0"),
        ('{"input_ids": [1.0]}', "integers of at least 0"),
        ('{"input_ids": [true]}', "integers of at least 0"),
    ],
)
def test_from_jsonl_when_a_row_is_malformed_then_error_names_file_line_and_rule(tmp_path, row, named):
    path = tmp_path / "p.jsonl"
    path.write_text('{"input_ids": [1]}\n\n' + row + "\n")
    with pytest.raises(ValueError, match=f"p.jsonl:3: .*{named}"):
        PromptDataset.from_jsonl(path)


def test_from_jsonl_when_the_tokenizer_returns_nothing_then_error_names_the_line(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": ""}\n')
    with pytest.raises(ValueError, match="p.jsonl:1: the tokenizer's output must be a non-empty list"):
        PromptDataset.from_jsonl(path, lambda text: [])


def test_from_jsonl_when_the_file_is_empty_then_error_names_it(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text("\n")
    with pytest.raises(ValueError, match="p.jsonl: no prompts"):
        PromptDataset.from_jsonl(path)


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


@pytest.mark.parametrize("step, n", [(-1, 1), (0, 0)])
def test_batch_when_step_or_size_is_out_of_bounds_then_error(step, n):
    with pytest.raises(ValueError, match="step must be at least 0 and n at least 1"):
        dataset(2).batch(step, n)


def test_dataset_when_empty_or_the_seed_is_out_of_bounds_then_error():
    with pytest.raises(ValueError, match="at least one prompt"):
        PromptDataset([])
    with pytest.raises(ValueError, match="seed must be in"):
        dataset(1, seed=-1)
