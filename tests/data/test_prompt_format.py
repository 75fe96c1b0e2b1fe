"""A row becomes a prompt: its keys, messages in the tokenizer's own template, and every way
to be a bad row.
"""

import json
import types
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from examples.quickstart.make_model import make_tokenizer
from megatron_rl_corr.config.prompts import PromptsConfig
from megatron_rl_corr.data.prompt_files import open_prompts
from megatron_rl_corr.data.prompt_format import PromptFormat, PromptLimits
from megatron_rl_corr.data.rows import BadRow, LongPrompt
from megatron_rl_corr.data.tokenizer import Tokenizer

SAVED = Path(__file__).parent / "saved_dataset"
TEMPLATE = """
{%- for message in messages %}
{%- if message.role == "refused" %}{{ raise_exception("no such role here") }}{% endif %}
{%- if message.role == "tool" and "name" in message and not message.name is string %}
{{- 1 + message.name }}
{%- endif %}
{{- "<" + message.role + ">" + message.content + "#" }}
{%- for call in message.tool_calls or [] %}{{ call.function.name }}{% endfor %}
{%- endfor %}
{%- for tool in tools or [] %}{{ tool.name }} {{ tool.type is defined }}{% endfor %}
{%- if think %}!{% endif %}
{%- if add_generation_prompt %}<answer>{% endif %}"""
USER = {"role": "user", "content": "1+1"}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """Name -> tokenizer: with a template, without one, one that begins every text and template with <eos>,
    and one that ends texts with it.
    """
    found = {}
    for name, template in (
        ("template", TEMPLATE),
        ("plain", None),
        ("bos", "{{ bos_token }}" + TEMPLATE),
        ("eos", TEMPLATE),
    ):
        folder = tmp_path_factory.mktemp(name)
        made = make_tokenizer()
        made.chat_template = template
        if name in ("bos", "eos"):
            from tokenizers.processors import TemplateProcessing

            made.bos_token = "<eos>" if name == "bos" else None
            made.backend_tokenizer.post_processor = TemplateProcessing(
                single="<eos> $A" if name == "bos" else "$A <eos>",
                special_tokens=[("<eos>", made.eos_token_id)],
            )
        made.save_pretrained(folder)
        found[name] = Tokenizer.from_folder(folder)
    return found


def prompt(row, tokenizer=None, **how):
    return PromptFormat(tokenizer, **how).prompt(row, 0, "p.jsonl:1")


def test_prompt_when_rows_hold_ids_or_text_then_their_other_keys_are_metadata(tokenizers):
    found = prompt({"input_ids": [3, 1], "label": "4", "level": 2})
    assert (found.input_ids, found.text, found.label) == ([3, 1], None, "4")
    assert found.metadata == {"label": "4", "level": 2}
    found = prompt({"prompt": "ab", "level": 2}, tokenizers["template"])
    assert (
        found.text == "ab" and tokenizers["template"].decode(found.input_ids) == "ab" and found.label is None
    )
    assert found.metadata == {"prompt": "ab", "level": 2}


def test_prompt_when_rows_hold_messages_then_the_ids_are_those_of_transformers(tokenizers):
    from transformers import AutoTokenizer

    messages = [{"role": "system", "content": "add"}, USER, {"role": "assistant", "content": "2"}, USER]
    tools = [{"name": "f", "type": None}]
    for name in ("template", "bos"):
        tokenizer = tokenizers[name]
        form = PromptFormat(tokenizer, tools_key="tools", template_variables={"think": True})
        found = form.prompt({"messages": messages, "tools": tools}, 0, "p.parquet: row 0", fills_nulls=True)
        reference = AutoTokenizer.from_pretrained(tokenizer._folder)
        expected = reference.apply_chat_template(
            messages, tools=[{"name": "f"}], think=True, add_generation_prompt=True, return_dict=False
        )
        assert found.input_ids == expected and len(found.input_ids) > 20
        assert found.text.endswith("<user>1+1#f False!<answer>")


def test_prompt_when_text_and_template_have_a_first_token_then_it_is_there_once(tokenizers):
    tokenizer = tokenizers["bos"]
    [first] = tokenizer.encode("")
    assert first == tokenizer.bos_id
    for row in ({"prompt": "1+1"}, {"messages": [USER]}):
        assert prompt(row, tokenizer).input_ids.count(first) == 1
    assert prompt({"messages": [USER]}, tokenizer).input_ids[0] == first


def test_prompt_when_given_in_other_projects_formats_then_keys_are_enough(tokenizers, tmp_path):
    chat = tokenizers["template"]
    verl = PromptFormat(chat, input_key="prompt", label_key="reward_model.ground_truth")
    pq.write_table(pa.Table.from_pylist(saved_rows()), tmp_path / "verl.parquet")
    for path in (SAVED / "train", tmp_path / "verl.parquet"):
        data = open_prompts([str(path)], verl)
        second = data.rows[1]
        assert second.text == "<system>Answer with a number.#<user>0 + 1 =#<answer>" and second.label == "1"
        assert second.metadata["extra_info"] == {"index": 0, "split": "train"}
        assert second.metadata["data_source"] == "sums"
    slime = PromptFormat(chat, input_key="prompt", label_key="label", apply_chat_template=True)
    (tmp_path / "slime.jsonl").write_text(
        json.dumps({"prompt": "1+1", "label": "2"})
        + "\n"
        + json.dumps({"prompt": [USER], "label": "2"})
        + "\n"
    )
    data = open_prompts([str(tmp_path / "slime.jsonl")], slime)
    assert [(row.text, row.label) for row in data.rows] == [("<user>1+1#<answer>", "2")] * 2


def saved_rows():
    from megatron_rl_corr.data.sources import open_rows

    found = open_rows(SAVED / "train")
    return [found.read(row) for row in range(len(found))]


def test_prompt_when_a_system_prompt_is_given_then_only_messages_without_one_get_it(tokenizers):
    how = {"system_prompt": "be brief", "tokenizer": tokenizers["template"]}
    assert prompt({"messages": [USER]}, **how).text.startswith("<system>be brief#<user>1+1#")
    late = [USER, {"role": "system", "content": "be brief, or not"}, USER]
    assert prompt({"messages": late}, **how).text.startswith("<user>1+1#<system>be brief, or not#<user>")
    own = [{"role": "system", "content": "be brief, or not"}, USER]
    assert prompt({"messages": own}, **how).text.startswith("<system>be brief, or not#<user>")


def test_prompt_when_columns_fill_messages_with_nulls_then_the_template_does_not_see_them(tokenizers):
    call = {"id": None, "function": {"name": "f", "arguments": None}}
    messages = [
        {**USER, "tool_calls": None, "name": None},
        {"role": "assistant", "content": None, "tool_calls": [call], "name": None},
        {"role": "tool", "content": "2", "tool_calls": None, "name": None},
    ]
    found = prompt({"messages": messages}, tokenizers["template"])
    assert found.text == "<user>1+1#<assistant>#f<tool>2#<answer>"


def test_prompt_when_the_users_code_changes_a_copy_then_the_row_stays(tokenizers):
    found = prompt({"messages": [dict(USER)], "label": ["a"]}, tokenizers["template"])
    copy = found.copied()
    copy.metadata["messages"][0]["content"], copy.label[0] = "x", "y"
    copy.input_ids.append(0)
    assert (
        found.metadata["messages"] == [USER]
        and found.label == ["a"]
        and len(copy.input_ids) > len(found.input_ids)
    )


@pytest.mark.parametrize("text", ["[1, 2, 3]", '{"a": 1}', "[{", '[{"a": 1}]', '{"messages": 1}', "[]"])
def test_prompt_when_text_is_other_json_then_it_is_the_text(text):
    words = types.SimpleNamespace(
        has_template=False, bos_id=None, eos_id=None, encode=lambda text, special_tokens=True: [1, 2]
    )
    assert prompt({"prompt": text}, words).text == text


def test_prompt_when_the_tokenizer_has_no_id_for_a_part_of_it_then_bad_and_the_part_is_named():
    from tokenizers import Tokenizer as Words
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = Words(WordLevel({"<unk>": 0, "what": 1, "is": 2, "2": 3}, unk_token="<unk>"))
    words.pre_tokenizer = WhitespaceSplit()
    made = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>"), "FOLDER")
    assert prompt({"prompt": "what is 2"}, made).input_ids == [1, 2, 3]
    assert prompt({"prompt": "what is <unk>"}, made).input_ids == [1, 2, 0]
    with pytest.raises(
        BadRow,
        match="the tokenizer of FOLDER has no id for a part of 'SECRET', which would become <unk>; leave",
    ):
        prompt({"prompt": "what is SECRET 2"}, made)


BAD = {
    "not JSON": ('{"input_ids": [1]', {}, "not JSON: "),
    "pretty JSON": ("{", {}, "not JSON: .*; write each row on one line"),
    "an array": ("[1, 2]", {}, "expected a JSON object, got list; write its objects on lines of their own"),
    "no key": (
        {"text": "a"},
        {},
        r"expected one of input_ids, prompt, messages, got the keys \['text'\]; `input_key`",
    ),
    "two keys": (
        {"prompt": "a", "input_ids": [1]},
        {},
        r"expected one of .* got the keys \['input_ids', 'prompt'\]",
    ),
    "missing key": ({"a": {"b": "x"}}, {"input_key": "a.c"}, r'no key "a.c"; the row has \[\'a\'\]'),
    "missing label": ({"prompt": "a"}, {"label_key": "reward_model.ground_truth"}, 'no key "reward_model.gr'),
    "null label": ({"prompt": "a", "x": None}, {"label_key": "x"}, '"x" is null'),
    "a number": ({"prompt": 5}, {}, '"prompt" must be text, a list of ids or of messages, got int'),
    "columns of messages": (
        {"prompt": {"role": ["user"], "content": ["a"]}},
        {},
        '"prompt" must be .* got dict; a',
    ),
    "no ids": ({"input_ids": []}, {}, '"input_ids" must be a non-empty list of integers of at least 0, got'),
    "a negative id": ({"input_ids": [1, -1]}, {}, "integers of at least 0"),
    "ids as numbers": ({"input_ids": [1.0]}, {}, "integers of at least 0"),
    "a bool": ({"input_ids": [True]}, {}, "integers of at least 0"),
    "empty text": ({"prompt": ""}, {}, '"prompt" has no tokens'),
    "unknown character": ({"prompt": "a\u00e4"}, {}, "the tokenizer of .* can't encode 'a\u00e4': "),
    "messages as text": (
        {"prompt": json.dumps([USER])},
        {},
        '"prompt" is messages as JSON text; store the list',
    ),
    **{
        f"messages as text {number}": (
            {"prompt": text},
            {"apply_chat_template": True},
            f'"prompt" is {what}; st',
        )
        for number, (text, what) in enumerate(
            [
                ('[ {"role": "user", "content": "a"}]', "messages as JSON text"),
                (json.dumps([USER], indent=2), "messages as JSON text"),
                (" " + json.dumps({"messages": [USER], "id": 1}), "messages as JSON text"),
                (json.dumps(USER), "messages as JSON text"),
                (str([USER]), "messages as Python writes them"),
                (str({"messages": [USER]}), "messages as Python writes them"),
            ]
        )
    },
    "no role": (
        {"messages": [{"from": "user"}]},
        {},
        r"message 0 of \"messages\" must be an object .* got \['from'\]",
    ),
    "another role": (
        {"messages": [{"role": "human", "content": "a"}]},
        {},
        'has the role "human"; call it "user"',
    ),
    "parts": (
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
        {},
        "list; parts, such .*image.*: l",
    ),
    "no content": (
        {"messages": [{"role": "user", "content": None}]},
        {},
        "must have text as its content, got None",
    ),
    "an answer": (
        {"messages": [USER, {"role": "assistant", "content": "2"}]},
        {},
        "is the assistant's, which is to",
    ),
    "template refuses": (
        {"messages": [{"role": "refused", "content": "a"}]},
        {},
        "refuses the messages: no such role",
    ),
    "template breaks": (
        {"messages": [{"role": "tool", "content": "a", "name": []}]},
        {},
        "refuses the messages: uns",
    ),
    "tools": ({"messages": [USER], "t": "{"}, {"tools_key": "t"}, '"t" is text and not JSON'),
    "no tools": ({"messages": [USER], "t": [3]}, {"tools_key": "t"}, '"t" must be a list of objects'),
    "system without messages": (
        {"prompt": "a"},
        {"system_prompt": "b"},
        "`system_prompt` has no effect on .* text",
    ),
    "template of ids": (
        {"input_ids": [1]},
        {"apply_chat_template": True},
        "`apply_chat_template` has no effect .* id",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_row_when_it_is_malformed_then_error_names_file_line_key_and_remedy(tmp_path, tokenizers, name):
    row, how, named = BAD[name]
    line = row if isinstance(row, str) else json.dumps(row)
    (tmp_path / "p.jsonl").write_text('{"input_ids": [1]}\n\n' + line + "\n")
    data = open_prompts([str(tmp_path / "p.jsonl")], PromptFormat(tokenizers["template"], **how))
    with pytest.raises(BadRow, match=rf"p.jsonl:3: .*{named}"):
        data.rows[1]


@pytest.mark.parametrize(
    "name, row, how, named",
    [
        (
            "plain",
            {"messages": [USER]},
            {},
            '"messages": the tokenizer of .*plain.* has no chat template; put the model\'s '
            "chat_template.jinja there, or give rows of text",
        ),
        (
            "plain",
            {"prompt": "a"},
            {"apply_chat_template": True},
            '"prompt": the tokenizer of .* has no chat template',
        ),
        (
            None,
            {"messages": [USER]},
            {},
            '"messages" is messages and there is no tokenizer in --rollout-hf-checkpoint',
        ),
        (
            None,
            {"prompt": "a"},
            {},
            '"prompt" is text and there is no tokenizer in --rollout-hf-checkpoint; put one',
        ),
        (
            "bos",
            {"prompt": "<eos>1+1"},
            {},
            '"prompt" begins with the token that the tokenizer puts before every text',
        ),
        (
            "eos",
            {"prompt": "1+1"},
            {},
            '"prompt" gets the end token, which the tokenizer puts behind every text, and',
        ),
    ],
)
def test_row_when_the_tokenizer_can_not_make_a_prompt_of_it_then_error(tokenizers, name, row, how, named):
    with pytest.raises(BadRow, match=f"^p.jsonl:1: {named}"):
        prompt(row, tokenizers.get(name), **how)


def test_row_when_the_template_drops_what_it_is_given_then_error(tokenizers, tmp_path):
    made = make_tokenizer()
    made.chat_template = "{{ (messages | selectattr('role', 'eq', 'user') | first).content }}?"
    made.save_pretrained(tmp_path)
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert prompt({"messages": [USER]}, tokenizer).text == "1+1?"
    for messages, how, named in (
        (
            [USER, {"role": "user", "content": "2+2"}],
            {},
            'leaves out message 1, whose role is "user"; use a ',
        ),
        (
            [USER],
            {"system_prompt": "be brief"},
            "leaves out the system message of `system_prompt`; put it into",
        ),
    ):
        with pytest.raises(BadRow, match=f'"messages": the chat template .*{named}'):
            prompt({"messages": messages}, tokenizer, **how)


def test_limits_when_an_id_or_the_length_is_out_of_them_then_error():
    limits = PromptLimits(10, 3, "`max_prompt_tokens` 3")
    assert prompt({"input_ids": [9, 1, 2]}, limits=limits).input_ids == [9, 1, 2]
    with pytest.raises(BadRow, match=r"^p.jsonl:1: token id 10; ids must be in \[0, 10\)"):
        prompt({"input_ids": [1, 10]}, limits=limits)
    with pytest.raises(LongPrompt, match="^p.jsonl:1: 4 tokens are too many; `max_prompt_tokens` 3 leaves 3"):
        prompt({"input_ids": [1] * 4}, limits=limits)
    with pytest.raises(BadRow) as raised:
        prompt({"input_ids": [1] * 4}, limits=PromptLimits(10, 3, drop_long=False))
    assert not isinstance(raised.value, LongPrompt)


def config(**given):
    return PromptsConfig(prompts=("p",), **given)


@pytest.mark.parametrize(
    "name, given, named",
    [
        (
            "template",
            {"chat_template_kwargs": '{"thinks": true}'},
            "has thinks, which the chat template of .* does not use; drop it, or use .*think",
        ),
        ("plain-tools", {"tools_key": "tools"}, "`tools_key`: the chat template of .* does not show tools"),
        ("broken", {"tools_key": "t"}, "the chat template of .* cannot be used"),
    ],
)
def test_format_when_the_template_has_no_place_for_an_option_then_refused_at_the_start(
    tmp_path, tokenizers, name, given, named
):
    tokenizer = tokenizers.get(name)
    if tokenizer is None:
        made = make_tokenizer()
        made.chat_template = "{{ messages }}" if name == "plain-tools" else "{% if messages %}"
        made.save_pretrained(tmp_path)
        tokenizer = Tokenizer.from_folder(tmp_path)
    with pytest.raises(ValueError, match=named):
        PromptFormat.of(config(**given), tokenizer, PromptLimits())


@pytest.mark.parametrize(
    "given, named",
    [
        ({"chat_template_kwargs": "{"}, "`chat_template_kwargs` is not JSON"),
        ({"chat_template_kwargs": "[1]"}, "`chat_template_kwargs` must be an object"),
        ({"chat_template_kwargs": '{"a": 1, "a": 2}'}, 'is not JSON: the key "a" comes twice; keep one'),
        (
            {"chat_template_kwargs": '{"a": {"b": NaN}}'},
            "is not JSON: NaN is not a number in JSON; write null",
        ),
        (
            {"chat_template_kwargs": '{"tools": []}'},
            "`chat_template_kwargs` can't set tools; use `tools_key`",
        ),
        ({"prompts_weights": ("1",)}, "`prompts_weights` has no effect with one of `prompts`; drop it"),
        ({"prompts_weights": ("1", "2")}, "`prompts_weights` has 2 numbers for 1 of `prompts`"),
        ({"prompts_weights": ("0",)}, "`prompts_weights` must be positive numbers, got 0"),
        ({"prompts_weights": ("nan",)}, "`prompts_weights` must be positive numbers, got nan"),
        ({"prompts_weights": ("x",)}, "`prompts_weights` must be positive numbers, got x"),
    ],
)
def test_config_when_an_option_is_wrong_then_error(given, named):
    with pytest.raises(ValueError, match=named):
        config(**given)


@pytest.mark.parametrize("again", ["p", "./p", "q/../p"])
def test_config_when_a_path_is_given_twice_then_error(again):
    with pytest.raises(
        ValueError, match="`prompts` names a path twice; to draw one more often, use `prompts_weights`"
    ):
        PromptsConfig(prompts=("p", "q", again))


def test_tokenizer_when_it_comes_with_code_then_it_is_not_run(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "Evil",
                "auto_map": {"AutoTokenizer": ["evil.Evil", None]},
            }
        )
    )
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe"}')
    with pytest.raises(
        ValueError, match=r"its tokenizer cannot be loaded \(code that comes with a checkpoint is not"
    ):
        Tokenizer.from_folder(tmp_path)
    assert not (tmp_path / "ran").exists()
