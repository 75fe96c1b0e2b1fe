"""Sampling settings of a row: what it may set, and what is refused with the row and the key."""

import pytest

from megatron_rl_corr.data.prompt_format import PromptFormat, PromptLimits
from megatron_rl_corr.data.rows import BadRow
from megatron_rl_corr.engines.trajectory import SamplingParams
from megatron_rl_corr.rollout.sampling import sampling_of_row


class Letters:
    """A tokenizer without a template."""

    bos_id, eos_id, has_template = None, None, False

    def encode(self, text):
        return [ord(letter) - ord("a") for letter in text]


def prompt(own, **row):
    form = PromptFormat(
        tokenizer=Letters(), sampling_key="meta.sampling", limits=PromptLimits(30, max_new_tokens=8)
    )
    return form.prompt({"prompt": "abc", "meta": {"sampling": own}, **row}, 4, "p.jsonl:5")


def test_sampling_of_a_row_when_it_sets_some_then_these_beside_those_of_the_run():
    run = SamplingParams(8, temperature=0.7, stop=("x",), stop_token_ids=(1,))
    # Parquet writes nulls
    own = prompt({"max_new_tokens": 3, "stop": "yz", "stop_token_ids": [2], "seed": None})
    assert sampling_of_row(run, own) == SamplingParams(
        3, temperature=0.7, stop=("x", "yz"), stop_token_ids=(1, 2)
    )
    assert sampling_of_row(run, prompt({"stop": ["a", "b"]})).stop == ("x", "a", "b")
    for none in (None, {}, {"stop": None}):
        assert sampling_of_row(run, prompt(none)) is run


@pytest.mark.parametrize(
    ("own", "named"),
    [
        ("greedy", '"meta.sampling" must be an object of settings, got str'),
        (
            {"temperature": 0.5},
            "can not set temperature: the training log-probs of a batch are of one temperature",
        ),
        ({"top_p": 0.5}, "can not set top_p: the training samples every prompt from one distribution"),
        ({"min_p": 0.5}, "can not set min_p"),
        ({"ignore_eos": True}, "can not set ignore_eos: the end of a response is the policy's to learn"),
        ({"seed": 3}, "can not set seed: seeds are made from --seed and the place of the prompt"),
        (
            {"max_tokens": 3},
            "has 'max_tokens', which is no setting; a row may have max_new_tokens, stop, stop_token",
        ),
        ({"max_new_tokens": 9}, "max_new_tokens must be a whole number from 1 to that of the run, 8, got 9"),
        ({"max_new_tokens": True}, "got True"),
        ({"stop": ["a", ""]}, "stop must be a text or a list of texts, none of them empty"),
        ({"stop": 3}, "stop must be a text or a list of texts"),
        ({"stop_token_ids": [30]}, r"stop_token_ids must be a list of ids in \[0, 30\), got \[30\]"),
        ({"stop_token_ids": 3}, "stop_token_ids must be a list of ids"),
    ],
)
def test_sampling_of_a_row_when_it_is_wrong_then_the_row_and_the_key_are_named(own, named):
    with pytest.raises(BadRow, match=f"^p.jsonl:5: .*{named}"):
        prompt(own)


def test_sampling_key_when_a_row_lacks_it_then_an_error_as_a_mistyped_one_would_set_nothing():
    with pytest.raises(BadRow, match='p.jsonl:5: no key "meta.sampling"; the row has'):
        prompt(None, meta={})
    plain = PromptFormat(sampling_key="own", limits=PromptLimits(30))
    with pytest.raises(BadRow, match='"own" stop needs a tokenizer'):
        plain.prompt({"input_ids": [1], "own": {"stop": "a"}}, 0, "p.jsonl:1")
