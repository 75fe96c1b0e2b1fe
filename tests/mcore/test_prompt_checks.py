"""What is looked at in the prompts before a run starts."""

import json
import types

import pytest

from megatron_rl_corr.config.flags import parse
from megatron_rl_corr.features.evaluation.held_out import held_out_prompts
from megatron_rl_corr.mcore.checks.prompt_checks import CHECKED_ROWS, check_rows, training_prompts
from megatron_rl_corr.rollout import Prompt, PromptDataset
from tests.data.test_prompts import Rows

FLAGS = [
    "--rollout-url",
    "http://127.0.0.1:9",
    "--rollout-hf-checkpoint",
    "m",
    "--rollout-reward-function",
    "r.py:r",
    "--rollout-max-new-tokens",
    "8",
]


def opened(tmp_path, lengths, *flags, make=training_prompts, leader=True, largest=1):
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps({"input_ids": [largest] * length}) + "\n" for length in lengths))
    _, options = parse([*FLAGS, "--rollout-prompts", str(path), "--rollout-eval-prompts", str(path), *flags])
    args = types.SimpleNamespace(seq_length=32, seed=1)
    layout = types.SimpleNamespace(is_data_leader=leader, dp_rank=0)
    if make is held_out_prompts:
        return make(options.evaluation_sets()[0].path, options, args, layout, None, 10)
    return make(options, args, layout, None, 10)


def refusal(tmp_path, lengths, *flags, **how):
    with pytest.raises(ValueError) as raised:
        opened(tmp_path, lengths, *flags, **how)
    return str(raised.value).replace(str(tmp_path), "DIR")


def test_prompts_when_one_is_too_long_then_it_is_left_out_with_a_line_and_never_drawn(tmp_path, capsys):
    prompts = opened(tmp_path, [25, 26, 3])  # 25 + 8 - 1 = 32: the last sampled token is no input
    assert capsys.readouterr().err == (
        "[rollout] --rollout-prompts: 1 of the 3 rows that were looked at are left out, as "
        f"--rollout-long-prompts drop says; the first: {tmp_path}/p.jsonl:2: 26 tokens are too many; "
        "--seq-length 32 with --rollout-max-new-tokens 8 leaves 25\n"
    )
    assert {prompts.index_at(n) for n in range(30) if prompts.can_be_drawn(n)} == {0, 2}
    assert opened(tmp_path, [25, 26, 3], leader=False) is None


@pytest.mark.parametrize(
    "lengths, flags, how, said",
    [
        (
            [25, 26],
            ("--rollout-long-prompts", "error"),
            {},
            "--rollout-prompts: DIR/p.jsonl:2: 26 tokens are too many; --seq-length 32 with `max_new_tokens` "
            "8 leaves 25",
        ),
        (
            [5, 6],
            ("--rollout-long-prompts", "error", "--rollout-max-prompt-tokens", "5"),
            {},
            "--rollout-prompts: DIR/p.jsonl:2: 6 tokens are too many; `max_prompt_tokens` 5 leaves 5",
        ),
        (
            [25, 26],
            (),
            {"make": held_out_prompts},
            "--rollout-eval-prompts: DIR/p.jsonl:2: 26 tokens are too many; --seq-length 32 with "
            "`max_new_tokens` 8 leaves 25",
        ),
        (
            [26, 27],
            (),
            {},
            "--rollout-prompts: all of the 2 rows that were looked at are too long; DIR/p.jsonl:1: 26 "
            "tokens are too many; --seq-length 32 with `max_new_tokens` 8 leaves 25",
        ),
        (
            [1],
            ("--rollout-max-prompt-tokens", "26"),
            {},
            "`max_prompt_tokens` 26 has no effect: --seq-length 32 with `max_new_tokens` 8 leaves 25; drop "
            "it, or use --seq-length 33",
        ),
        (
            [1],
            ("--rollout-max-new-tokens", "33"),
            {},
            "--seq-length 32 with `max_new_tokens` 33 has no room for a prompt; use --seq-length 33 or "
            "more, and add the length of the prompts to it",
        ),
        (
            [1],
            (),
            {"largest": 10},
            "--rollout-prompts: DIR/p.jsonl:1: token id 10; ids must be in [0, 10), the vocabulary of "
            "--rollout-hf-checkpoint: were the prompts tokenised for this model?",
        ),
    ],
)
def test_prompts_when_they_do_not_fit_then_refused_at_the_start(tmp_path, lengths, flags, how, said):
    assert refusal(tmp_path, lengths, *flags, **how) == said


def test_held_out_prompts_when_their_responses_have_a_length_of_their_own_then_rows_do_not_bound_them(
    tmp_path,
):
    prompts = opened(tmp_path, [25, 40], "--rollout-eval-max-new-tokens", "99", make=held_out_prompts)
    assert len(prompts) == 2


@pytest.mark.parametrize(
    "size, text, looked_at",
    [(CHECKED_ROWS, "t", CHECKED_ROWS), (50_000, None, 50_000), (50_000, "t", None), (100_001, None, None)],
)
def test_check_rows_when_there_are_many_then_the_first_the_last_and_a_thousand_at_random(
    size, text, looked_at
):
    class Texts(Rows):
        def __getitem__(self, index):
            super().__getitem__(index)
            return Prompt(index, [1], text=text)

    rows = Texts(size, {})
    counted, _ = check_rows(PromptDataset(rows, seed=3), "--rollout-prompts")
    made = set(rows.made)
    if looked_at is not None:
        assert made == set(range(size)) and counted == looked_at
    else:
        assert {0, size - 1} <= made and CHECKED_ROWS <= len(made) == counted <= CHECKED_ROWS + 2
        assert 400 < sum(row < size / 2 for row in made) < 600


def test_prompts_when_the_first_rows_are_too_long_then_all_ids_of_the_others_are_looked_at(tmp_path):
    said = []
    for bad in range(1500, 1520):  # one in two would be among a thousand of 2000 at random
        path = tmp_path / "p.jsonl"
        rows = [[1] * 30, [1] * 30, *([1] for _ in range(1998))]
        rows[bad] = [10]
        path.write_text("".join(json.dumps({"input_ids": ids}) + "\n" for ids in rows))
        _, options = parse([*FLAGS, "--rollout-prompts", str(path)])
        layout = types.SimpleNamespace(is_data_leader=True, dp_rank=0)
        with pytest.raises(ValueError) as raised:
            training_prompts(options, types.SimpleNamespace(seq_length=32, seed=1), layout, None, 10)
        said.append(str(raised.value))
    assert all(f"p.jsonl:{bad + 1}: token id 10; ids must be" in one for bad, one in enumerate(said, 1500))


def tokenizer_with(has_template):
    return types.SimpleNamespace(
        has_template=has_template,
        bos_id=None,
        eos_id=None,
        encode=lambda text, special_tokens=True: [1, 2],
        render=lambda messages, tools: f"<user>{messages[0]['content']}{tools or ''}",
        check_variables=lambda variables, with_tools: None,
    )


@pytest.mark.parametrize(
    "has_template, flags, told",
    [
        (True, (), True),
        (False, (), False),
        (True, ("--rollout-apply-chat-template",), False),
    ],
)
def test_prompts_when_text_is_not_rendered_though_there_is_a_template_then_a_line_says_so(
    tmp_path, capsys, has_template, flags, told
):
    (tmp_path / "p.jsonl").write_text('{"prompt": "1+1"}')
    _, options = parse([*FLAGS, "--rollout-prompts", str(tmp_path / "p.jsonl"), *flags])
    layout = types.SimpleNamespace(is_data_leader=True, dp_rank=0)
    tokenizer = tokenizer_with(has_template)
    training_prompts(options, types.SimpleNamespace(seq_length=32, seed=1), layout, tokenizer, 10)
    line = (
        "[rollout] --rollout-prompts: text is tokenised as it is, though the tokenizer has a chat template; "
    )
    assert (
        capsys.readouterr().err
        == (line + "--rollout-apply-chat-template makes a user's message of it\n") * told
    )


def test_prompts_when_rows_differ_then_lines_are_of_all_that_were_looked_at(tmp_path, capsys):
    messages = [{"role": "user", "content": "1+1"}]
    rows = [
        {"messages": messages},
        {"messages": messages, "tools": [{"name": "f"}]},
        {"prompt": "1+1"},
        {"input_ids": [1] * 40},
    ]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    _, options = parse([*FLAGS, "--rollout-prompts", str(tmp_path / "p.jsonl")])
    layout = types.SimpleNamespace(is_data_leader=True, dp_rank=0)
    training_prompts(options, types.SimpleNamespace(seq_length=32, seed=1), layout, tokenizer_with(True), 10)
    said = capsys.readouterr().err
    assert "1 of the 4 rows that were looked at are left out" in said
    assert "rows have `tools`, which the model does not see" in said and "text is tokenised as it is" in said


@pytest.mark.parametrize(
    "tools, flags, told",
    [
        ([{"name": "f"}], (), True),
        ([{"name": "f"}], ("--rollout-tools-key", "tools"), False),
        ([], (), False),
    ],
)
def test_prompts_when_rows_have_tools_that_no_flag_names_then_a_line_says_so(
    tmp_path, capsys, tools, flags, told
):
    row = {"messages": [{"role": "user", "content": "1+1"}], "tools": tools}
    (tmp_path / "p.jsonl").write_text(json.dumps(row))
    _, options = parse([*FLAGS, "--rollout-prompts", str(tmp_path / "p.jsonl"), *flags])
    layout = types.SimpleNamespace(is_data_leader=True, dp_rank=0)
    training_prompts(options, types.SimpleNamespace(seq_length=32, seed=1), layout, tokenizer_with(True), 10)
    line = (
        "[rollout] --rollout-prompts: rows have `tools`, which the model does not see; "
        "--rollout-tools-key tools "
    )
    assert capsys.readouterr().err == (line + "shows them\n") * told


def test_prompts_when_messages_have_keys_that_the_template_does_not_show_then_a_line_names_them(
    tmp_path, capsys
):
    message = {"role": "user", "content": "1+1", "weight": 1, "id": "a"}
    (tmp_path / "p.jsonl").write_text(json.dumps({"messages": [message]}))
    _, options = parse([*FLAGS, "--rollout-prompts", str(tmp_path / "p.jsonl")])
    layout = types.SimpleNamespace(is_data_leader=True, dp_rank=0)
    training_prompts(options, types.SimpleNamespace(seq_length=32, seed=1), layout, tokenizer_with(True), 10)
    assert capsys.readouterr().err == (
        "[rollout] --rollout-prompts: messages have id, weight, which the chat template does not show to the "
        "model\n"
    )
