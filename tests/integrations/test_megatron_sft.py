"""The flags of a fine-tuning by Megatron's --sft; tests/matrix/test_sft_run.py runs some."""

from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatron_rl_corr.config.problems import Problems
from megatron_rl_corr.integrations import megatron_sft

SFT = ["--sft", "--lr", "1e-5"]
MODEL = ["--rollout-hf-checkpoint", "/models/a"]


def read(*words):
    problems = Problems()
    options = megatron_sft.read(words, problems)
    return options, problems.found


def test_flags_when_read_then_those_of_the_model_and_of_the_export():
    options, found = read(*SFT, *MODEL, "--rollout-save-hf", "out", "--rollout-save-hf-interval", "20")
    assert not found
    assert options.hf_checkpoint == "/models/a" and not options.allow_model_differences
    assert options.save_hf == "out" and options.save_hf_interval == 20


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "--rollout-hf-checkpoint is required"),
        ([*MODEL, "--rollout-url", "http://a:1"], "--rollout-url has no effect with --sft"),
        ([*MODEL, "--rollout-is=token"], "--rollout-is has no effect with --sft"),
        ([*MODEL, "--router-replay", "R3"], "--router-replay has no effect with --sft"),
        ([*MODEL, "--rollout-save-hf-interval", "2"], "`save_hf_interval`"),
        ([*MODEL, "--rollout-save-hf", "out", "--rollout-save-hf-interval", "0"], "`save_hf_interval`"),
        (["--rollout-hf-checkpoint"], "--rollout-hf-checkpoint"),
    ],
)
def test_flags_when_wrong_then_told_by_name(words, told):
    [found] = read(*SFT, *words)[1]
    assert told in found


@pytest.mark.parametrize(
    ("rows", "vocabulary", "ranks", "told"),
    [
        (151936, 151936, 2, None),
        (151680, 151936, 1, "give 151936"),
        (151936, 151669, 4, "give 37918"),
        (151680, None, 1, None),  # a flag that lacks is told of with all others of the model
        (151672, 151669, 4, None),  # the fewest that four ranks can hold
    ],
)
def test_embedding_when_of_other_rows_than_the_model_then_the_divisor_that_makes_them(
    rows, vocabulary, ranks, told
):
    args = SimpleNamespace(
        padded_vocab_size=rows,
        vocab_size=vocabulary,
        tensor_model_parallel_size=ranks,
        make_vocab_size_divisible_by=128,
    )
    if told is None:
        return megatron_sft.check_vocabulary(args)
    with pytest.raises(ValueError, match=told):
        megatron_sft.check_vocabulary(args)


TEMPLATE = "{% for one in messages %}{{ one.role + ' ' + one.content + ' <end> ' }}{% endfor %}"
WORDS = [
    "<pad>",
    "<eos>",
    "<end>",
    "user",
    "assistant",
    "How",
    "much",
    "is",
    "7",
    "5",
    "+",
    "?",
    "It",
    "12",
    ".",
]


def saved(folder, words=WORDS, template=TEMPLATE, pad="<pad>"):
    """The folder of a tokenizer with these words and this template."""
    made = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="<eos>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    own = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>", pad_token=pad)
    own.add_special_tokens({"additional_special_tokens": ["<end>"]})
    own.chat_template = template
    own.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, None),
        ({"pad": "<end>"}, "its chat template writes its padding token"),
        ({"template": TEMPLATE.replace("' <end> '", "' <end> <end> '")}, "it makes other ids"),
        ({"words": WORDS[:5] + WORDS[:4:-1]}, "it makes other ids"),
    ],
)
def test_tokenizer_when_of_other_ids_than_the_models_or_with_padding_in_them_then_refused(
    given, told, tmp_path
):
    pytest.importorskip("megatron.core.tokenizers.text.libraries.sft_tokenizer")
    from megatron.core.tokenizers.text.libraries.sft_tokenizer import SFTTokenizer

    copy = SFTTokenizer(str(saved(tmp_path / "copy", **given)), "default")
    args = SimpleNamespace(tokenizer_model="copy", rollout_hf_checkpoint=str(saved(tmp_path / "model")))
    # Megatron's own wrapper has it by this name
    tokenizer = SimpleNamespace(pad=copy.pad_id, tokenize_conversation=copy.tokenize_conversation)
    if told is None:
        return megatron_sft.check_rendering(args, tokenizer)
    with pytest.raises(ValueError, match=told):
        megatron_sft.check_rendering(args, tokenizer)


@pytest.mark.parametrize(
    ("iteration", "written", "refused"), [(2, False, True), (2, True, False), (1, False, False)]
)
def test_run_whose_steps_are_all_made_when_its_folder_is_not_there_then_refused(
    iteration, written, refused, tmp_path
):
    options = SimpleNamespace(save_hf=str(tmp_path / "hf"), hf_checkpoint="model", save_hf_interval=None)
    if written:
        (tmp_path / "hf/iter_0000002").mkdir(parents=True)
    made = megatron_sft._FineTuning(options)
    settings = SimpleNamespace(iteration=iteration, train_iters=2, iterations_to_skip=[1])
    if not refused:
        return made._check_left(settings)
    with pytest.raises(ValueError, match="has made all 2 steps, so none would write iter_0000002"):
        made._check_left(settings)


def test_last_step_when_it_is_skipped_then_refused_where_a_folder_is_asked_for(tmp_path):
    settings = SimpleNamespace(iteration=0, train_iters=2, iterations_to_skip=[2])
    options = SimpleNamespace(save_hf=tmp_path, hf_checkpoint="model", save_hf_interval=0)
    with pytest.raises(ValueError, match="--iterations-to-skip 2: .* or give one --train-iters less"):
        megatron_sft._FineTuning(options)._check_left(settings)
    options.save_hf = None
    megatron_sft._FineTuning(options)._check_left(settings)
