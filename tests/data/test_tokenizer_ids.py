"""The ids of a text: those of transformers, whichever way they are made."""

import pytest
from tokenizers import AddedToken, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Rust
from transformers import PreTrainedTokenizerFast

from megatron_rl_corr.data.tokenizer import Tokenizer

LONG = "aaaa " * 200
PLAIN = ("", "a", "  b c\n", LONG)
SPELLED = ("<|end|>", "a<|end|> b", "<s>a", "<|end|><|end|>")


def rust():
    """Letters and bytes, a control token, and one that every text begins with."""
    letters = "abc\u0120\u010a"
    made = Rust(
        models.BPE(
            {one: place for place, one in enumerate([*letters, "aa", "<unk>"])},
            [("a", "a")],
            unk_token="<unk>",
        )
    )
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.add_special_tokens([AddedToken("<s>", special=True), AddedToken("<|end|>", special=True)])
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", made.token_to_id("<s>"))]
    )
    return made


class More(PreTrainedTokenizerFast):
    """Does something of its own to a text."""

    def _encode_plus(self, text, **how):
        return super()._encode_plus(text.replace("b", "c"), **how)


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize(
    ("kind", "changes", "is_fast"),
    [
        (PreTrainedTokenizerFast, {}, True),
        (PreTrainedTokenizerFast, {"truncated": True}, True),
        (PreTrainedTokenizerFast, {"split_special_tokens": True}, False),
        (More, {}, False),
    ],
)
def test_ids_then_those_of_transformers(kind, changes, is_fast, special):
    given, how = rust(), dict(changes)
    if how.pop("truncated", False):
        given.enable_truncation(3)
        given.enable_padding(length=5)
    own = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "<|end|>"}
    made, twin = (kind(tokenizer_object=given, **own, **how) for _ in range(2))
    tokenizer = Tokenizer(made, "FOLDER")
    assert (tokenizer._rust is not None) == is_fast
    for text in PLAIN if made.split_special_tokens else PLAIN + SPELLED:
        ids = tokenizer.encode(text, special_tokens=special)
        assert type(ids) is list and ids == twin.encode(text, add_special_tokens=special), text
    assert len(tokenizer.encode(LONG, special_tokens=False)) == 600  # nothing is cut


def test_text_when_the_vocabulary_lacks_a_part_then_it_is_named():
    made = PreTrainedTokenizerFast(tokenizer_object=rust(), unk_token="<unk>", bos_token="<s>")
    with pytest.raises(ValueError, match=r"of FOLDER has no id for a part of 'd'"):
        Tokenizer(made, "FOLDER").encode("a d")


def test_added_tokens_then_all_as_they_are_spelled_by_their_ids():
    made = PreTrainedTokenizerFast(tokenizer_object=rust(), unk_token="<unk>", bos_token="<s>")
    made.add_tokens(["<think>"])
    added = Tokenizer(made, "FOLDER").added_tokens
    assert added[-1] == "<think>" and {"<unk>", "<s>"} <= set(added) and len(added) == len(set(added))
