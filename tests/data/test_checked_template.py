"""Nothing of a conversation is left out unnoticed: templates that behave as published ones, and
every kind of loss.
"""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from examples.quickstart.make_model import make_tokenizer
from megatron_rl_corr.data import checked_template
from megatron_rl_corr.data.prompt_files import open_prompts
from megatron_rl_corr.data.prompt_format import PromptFormat
from megatron_rl_corr.data.rows import BadRow
from megatron_rl_corr.data.tokenizer import Tokenizer

TEMPLATES = Path(__file__).parent / "chat_templates"
NAMES = sorted(path.stem for path in TEMPLATES.glob("*.jinja"))
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string", "default": None}}},
    },
}


class Characters(Tokenizer):
    """A tokenizer of which only the template matters: an id is a character's number."""

    def encode(self, text, *, special_tokens=True):
        return [ord(character) for character in text]


def tokenizer(template):
    made = make_tokenizer()
    made.bos_token = made.eos_token
    made.chat_template = (TEMPLATES / f"{template}.jinja").read_text() if template in NAMES else template
    return Characters(made, "FOLDER")


def said(role, content, **keys):
    return {"role": role, "content": content, **keys}


def called(arguments, content=None, call_id="call12345", **keys):
    function = {"name": "get_weather", "arguments": arguments}
    calls = [{"id": call_id, "type": "function", "function": function}]
    return {"role": "assistant", "content": content, "tool_calls": calls, **keys}


def text(template, messages, tools=None, fills_nulls=False, **how):
    form = PromptFormat(tokenizer(template), tools_key=None if tools is None else "tools", **how)
    row = {"messages": messages} | ({} if tools is None else {"tools": tools})
    return form.prompt(row, 0, "p.jsonl:1", fills_nulls=fills_nulls).text


SYSTEM, USER = said("system", "Be brief."), said("user", "Is it wet in Oslo?")
ANSWER = said("assistant", "<think>So it says.</think>\n\nIt is.")
RESULT = said("tool", 'It says "rain".\n', tool_call_id="call12345")
CALL = called({"city": "Oslo"})
WHOLE = {
    "a question": [USER],
    "a system message": [SYSTEM, USER],
    "thoughts of an earlier answer": [SYSTEM, USER, ANSWER, said("user", "And now?")],
    "white space around": [said("user", "  a\n\n b \n"), said("assistant", "\n\nc \n"), said("user", "\td")],
    "other scripts": [
        said("system", "简明扼要"),
        said("user", "下雨吗？"),
        said("assistant", "是"),
        said("user", "2"),
    ],
    "what templates look for": [
        said("user", "<tool_response>\nrain\n</tool_response>"),
        ANSWER,
        said("user", "0"),
    ],
    "equal messages": [said("user", "a"), said("assistant", "a"), said("user", "a")],
    "no content to lose": [said("user", ""), said("assistant", ""), said("user", "a")],
}
WITH_CALLS = {
    "a call": [USER, CALL, RESULT, said("assistant", "It is."), said("user", "And now?")],
    "a call without arguments": [USER, called({}), said("tool", ""), said("assistant", "It is."), USER],
    "a call with thoughts": [
        USER,
        called({"n": [1]}, reasoning_content="Look.", thinking="Look."),
        RESULT,
        said("assistant", "It is."),
        USER,
    ],
    "text as arguments": [
        USER,
        called('{"city": "Oslo", "unit": null}'),
        RESULT,
        said("assistant", "It is."),
        USER,
    ],
    "arguments of every type": [
        USER,
        called(
            {
                "text": "a b",
                "n": 3,
                "x": 0.5,
                "on": True,
                "off": False,
                "none": None,
                "zero": 0,
                "no text": "",
                "deep": {"a": [1, {"b": "c"}, [2.5]], "e": {}},
                "list": [1, "a", None, False, *range(9)],
                "big": 10**20,
            }
        ),
        RESULT,
        said("assistant", "It is."),
        USER,
    ],
    "no calls in a list of calls": [USER, said("assistant", "It is.", tool_calls=[]), USER],
}


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("template", NAMES)
def test_text_when_a_published_template_shows_all_then_no_alarm(template, name):
    found = text(template, WHOLE[name])
    for message in WHOLE[name]:
        assert message["content"].split("</think>")[-1].strip() in found


@pytest.mark.parametrize("name", WITH_CALLS)
@pytest.mark.parametrize("template", sorted({*NAMES} - {"phi_3", "kimi"}))
def test_text_when_a_published_template_shows_calls_then_no_alarm(template, name):
    tools = None if template == "deepseek_v3" else [TOOL]
    assert "It is." in text(template, WITH_CALLS[name], tools)


def test_text_when_thoughts_before_a_call_show_until_an_answer_follows_then_no_alarm():
    thinks = [USER, called({"city": "Oslo"}, "I look, it seems."), RESULT]
    assert "I look, it seems." in text("gpt_oss", thinks)
    answered = text("gpt_oss", [*thinks, said("assistant", "It is."), said("user", "And now?")])
    assert "I look" not in answered and "It is." in answered and "get_weather" in answered


def test_text_when_a_template_shows_ids_for_names_then_ids_must_have_them():
    named = called({"city": "Oslo"}, call_id="functions.get_weather:0")
    assert "functions.get_weather:0" in text("kimi", [USER, named, RESULT])
    named = r"leaves out tool call 0 \(\"get_weather\"\) of message 1.*functions.get_weather:0"
    with pytest.raises(BadRow, match=named):
        text("kimi", [USER, CALL, RESULT])


def named(number, role):
    return f'"messages": the chat template leaves out message {number}, whose role is "{role}"; '


LOST = {
    "developer, at the start": (
        ("qwen2_5", "qwen3", "deepseek_v3", "glm_4_5", "phi_3"),
        [said("developer", "Be brief."), USER],
        named(0, "developer") + 'call it "system"',
    ),
    "developer, in the middle": (
        ("qwen2_5", "qwen3", "deepseek_v3", "glm_4_5", "phi_3", "gpt_oss"),
        [SYSTEM, USER, said("assistant", "It is."), said("developer", "2"), USER],
        named(3, "developer") + 'call it "system"',
    ),
    "observation": (
        ("qwen2_5", "qwen3", "glm_4_5", "deepseek_v3", "gpt_oss"),
        [USER, CALL, said("observation", "rain")],
        named(2, "observation") + 'call it "tool"',
    ),
    "function": (
        ("qwen2_5", "qwen3", "glm_4_5", "deepseek_v3", "gpt_oss"),
        [USER, CALL, said("function", "rain"), USER],
        named(2, "function") + 'call it "tool"',
    ),
    "ipython": (
        ("qwen2_5", "qwen3", "glm_4_5", "deepseek_v3"),
        [USER, CALL, said("ipython", "1"), USER],
        named(2, "ipython") + 'call it "tool"',
    ),
    "a role of its own": (
        ("qwen2_5", "qwen3", "glm_4_5", "deepseek_v3", "phi_3", "gpt_oss"),
        [said("critic", "no"), USER],
        named(0, "critic") + 'call it "user", or use a template that shows it',
    ),
    "tool": (
        ("phi_3",),
        [USER, said("tool", "rain"), USER],
        named(1, "tool") + "put its text into a message of the u",
    ),
    "a system message of the row": (
        ("gpt_oss",),
        [USER, said("assistant", "It is."), SYSTEM, USER],
        named(2, "system") + "put its text into the first message of the user",
    ),
    "a system message, where a tool answers": (
        ("mistral",),
        [SYSTEM, USER, CALL, RESULT],
        named(0, "system") + "put its text into the first message",
    ),
    "calls": (
        ("phi_3",),
        [USER, CALL, said("user", "rain")],
        r'leaves out tool call 0 ("get_weather") of message 1, ',
    ),
    "calls beside a text": (
        ("deepseek_v3",),
        [USER, called({"city": "Oslo"}, "I look."), RESULT],
        'tool call 0 ("get_weather") of message 1, whose role is "assistant"; use a template that shows it',
    ),
    "a text beside a call": (
        ("llama_3_1",),
        [USER, called({"city": "Oslo"}, "I look."), RESULT],
        'leaves out the text beside the tool calls of message 1, whose role is "assistant"; drop it, or use '
        "a",
    ),
    "a second call": (
        ("gpt_oss",),
        [USER, {**CALL, "tool_calls": [*CALL["tool_calls"]] * 2}, RESULT],
        "leaves out tool call 1 (",
    ),
}


@pytest.mark.parametrize(
    "name, template", [(name, one) for name, (templates, _, _) in LOST.items() for one in templates]
)
def test_text_when_a_template_leaves_a_part_out_then_error_names_it_and_the_remedy(name, template):
    _, messages, message = LOST[name]
    with pytest.raises(BadRow) as raised:
        text(template, messages)
    assert message in str(raised.value)


def test_text_when_the_remedy_is_followed_then_the_row_is_a_prompt():
    assert "rain" in text("qwen2_5", [USER, CALL, said("tool", "rain")])
    assert "Be brief." in text("phi_3", [said("system", "Be brief."), USER])


@pytest.mark.parametrize(
    "role, right",
    [
        ("User", "user"),
        (" system", "system"),
        ("TOOL", "tool"),
        ("Human", "user"),
        ("Assistant", "assistant"),
        ("Developer", "developer"),
    ],
)
def test_row_when_a_role_is_spelt_in_another_way_then_error_names_the_right_one(role, right):
    for template in ("qwen2_5", "llama_3_1"):  # the second would write the role as it is
        with pytest.raises(BadRow, match=f'message 1 of "messages" has the role "{role}"; call it "{right}"'):
            text(template, [USER, said(role, "a"), USER])


@pytest.mark.parametrize(
    "template, messages, message",
    [
        ("{{ messages[-1].content }}", [USER, said("assistant", "a"), said("user", "wet")], named(0, "user")),
        ("{{ messages[0].content }}", [USER, said("assistant", "a"), USER], named(1, "assistant")),
        # The last "2" is left out, and is in another message.
        (
            "{{ messages[0].content }}",
            [said("user", "12"), said("assistant", "2"), said("user", "2")],
            named(1, "assistant"),
        ),
        (
            "{% for m in messages if m.content != '/secret' %}{{ m.content }}{% endfor %}",
            [said("user", "/secret"), said("assistant", "a"), said("user", "b")],
            named(0, "user"),
        ),
        (
            "{% for m in messages[(1 if messages[0].role == 'system' else 0):] %}{{ m.content }}{% endfor %}",
            [SYSTEM, USER],
            named(0, "system"),
        ),
        (
            "{% for m in messages %}{{ m.content.split('\n')[0] }}{% endfor %}",
            [said("user", "Line one\nLine two"), said("assistant", "a"), said("user", "b")],
            'leaves out a part of message 0, whose role is "user"',
        ),
        (
            "{% for m in messages %}{{ m.content[:8] }}{% endfor %}",
            [said("user", "12 + 30 = ?")],
            named(0, "user"),
        ),
        (
            "{% for m in messages if m.weight != 0 %}{{ m.content }}{% endfor %}",
            [said("user", "a", weight=1), said("assistant", "b", weight=0), said("user", "c")],
            named(1, "assistant"),
        ),
    ],
)
def test_text_when_any_template_leaves_out_by_place_content_or_key_then_error(template, messages, message):
    with pytest.raises(BadRow) as raised:
        text(template, messages)
    assert message in str(raised.value)


def test_text_when_a_system_prompt_is_added_then_messages_keep_the_rows_numbers():
    with pytest.raises(BadRow, match='leaves out message 1, whose role is "observation"'):
        text("qwen2_5", [USER, said("observation", "a"), USER], system_prompt="Be brief.")
    users_alone = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    with pytest.raises(
        BadRow, match="leaves out the system message of `system_prompt`; put it into the first"
    ):
        text(users_alone, [USER], system_prompt="Be brief.")


@pytest.mark.parametrize("template", ["phi_3", "{{ messages[0].content }}{{ (tools or [])[:1] | tojson }}"])
def test_text_when_a_template_leaves_out_a_tool_then_error(template):
    second = {**TOOL, "function": {**TOOL["function"], "name": "get_time"}}
    number, name = (0, "get_weather") if template == "phi_3" else (1, "get_time")
    with pytest.raises(
        BadRow, match=f'leaves out tool {number}, whose name is "{name}"; use a template that '
    ):
        text(template, [USER], [TOOL, second])


CALLS = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}<{{ "
    "c.function.name }}{% for k, v in c.function.arguments.items() %}ARGUMENT{% endfor %}>{% endfor %}{% "
    "endfor %}"
)
SHOWN = " {{ k }}={{ v | tojson }}"


@pytest.mark.parametrize(
    "argument, arguments",
    [
        ("{% if v is string %} {{ k }}={{ v }}{% endif %}", {"city": "Oslo", "n": 3}),
        ("{% if v %}" + SHOWN + "{% endif %}", {"city": "Oslo", "n": 0}),
        ("{% if v %}" + SHOWN + "{% endif %}", {"city": "Oslo", "in": {"none": None}, "on": False}),
        ("{% if v is not none %}" + SHOWN + "{% endif %}", {"city": "Oslo", "unit": None}),
        ("{% if loop.first %}" + SHOWN + "{% endif %}", {"city": "Oslo", "unit": "C"}),
        (" {{ k }}={{ v.values() | list | tojson if v is mapping else v }}", {"city": {"name": "Oslo"}}),
        (" {{ k }}={{ v | first if v is sequence and v is not string else v }}", {"cities": [1, 2]}),
        (" {{ k }}={{ v | int if v is number else v }}", {"city": "Oslo", "n": 2.25}),
        (" {{ k }}={{ v | upper }}", {"city": "Oslo"}),
    ],
)
def test_text_when_a_template_leaves_out_an_argument_by_its_type_or_place_then_error(argument, arguments):
    messages = [USER, called(arguments), RESULT, said("assistant", "It is."), USER]
    with pytest.raises(BadRow, match='leaves out tool call 0 .*"get_weather". of message 1'):
        text(CALLS.replace("ARGUMENT", argument), messages)
    assert all(
        f"{key}={json.dumps(one)}" in text(CALLS.replace("ARGUMENT", SHOWN), messages)
        for key, one in arguments.items()
    )


@pytest.mark.parametrize(
    "tools, message",
    [
        ("{{ t.function.name }}", "the description or a parameter of tool 0, whose name is .get_weather"),
        ("{{ t.function.name }}: {{ t.function.description }}", "the description or a parameter of tool 0"),
        (
            "{{ t.function.name }}{{ t.function.parameters | tojson }}",
            "the description or a parameter of tool 0",
        ),
        ("{{ t.function.description }}", "leaves out tool 0"),
    ],
)
def test_text_when_a_template_leaves_out_what_a_tool_is_for_or_takes_then_error(tools, message):
    template = (
        "{% for t in tools or [] %}"
        + tools
        + "{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    with pytest.raises(BadRow, match=message):
        text(template, [USER], [TOOL])


@pytest.mark.parametrize(
    "shown", ["{{ t.function.name }}", "{{ t.function.name }}: {{ t.function.description }}"]
)
def test_text_when_a_tool_has_a_name_alone_then_no_template_leaves_out_more(shown):
    template = (
        "{% for t in tools or [] %}"
        + shown
        + "{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    assert "now" in text(template, [USER], [{"type": "function", "function": {"name": "now"}}])


def test_text_when_a_template_leaves_out_the_number_of_a_second_call_then_error():
    messages = [
        USER,
        called({"n": 3}),
        RESULT,
        called({"n": 4}, call_id="call67890"),
        said("tool", "dry", tool_call_id="call67890"),
        USER,
    ]
    number = " {{ k }}={{ v if m is sameas messages[1] }}"
    with pytest.raises(BadRow, match='leaves out tool call 0 .*"get_weather". of message 3'):
        text(CALLS.replace("ARGUMENT", number), messages)
    assert "n=3" in text(CALLS.replace("ARGUMENT", SHOWN), messages)


@pytest.mark.parametrize(
    "key, value",
    [
        ("images", ["a.png"]),
        ("image", "a.png"),
        ("videos", [{"bytes": None}]),
        ("audio", {"path": "a.wav"}),
        ("image_url", {"url": "a"}),
        ("input_audio", {"data": "x"}),
    ],
)
def test_row_when_a_message_has_more_than_text_then_error_names_message_and_key(key, value):
    with pytest.raises(
        BadRow, match=f'message 1 of "messages" has "{key}", and prompts are text alone; leave'
    ):
        text("qwen3", [SYSTEM, {**USER, key: value}])
    for nothing in (None, [], "", {}):
        assert text("qwen3", [SYSTEM, {**USER, key: nothing}]) == text("qwen3", [SYSTEM, USER])


@pytest.mark.parametrize("place, key", [("<image>", "images"), ("<image>", "image"), ("<video>", "videos")])
@pytest.mark.parametrize("column", ["messages", "prompt"])
def test_row_when_its_text_has_a_place_for_an_image_beside_it_then_error(place, key, column):
    form = PromptFormat(tokenizer("qwen3"))
    question = f"What is in {place}?"
    value = [SYSTEM, said("user", question)] if column == "messages" else question
    row = {column: value, key: [{"path": "a.png"}]}
    with pytest.raises(
        BadRow, match=f'"{column}" has {place} for the row.s "{key}", and prompts are text alone'
    ):
        form.prompt(row, 0, "p.jsonl:1")
    for alone in (row | {key: None}, row | {key: []}, {column: value}):
        assert question in form.prompt(alone, 0, "p.jsonl:1").text


def test_keys_of_messages_when_the_template_shows_them_nowhere_then_they_are_known():
    form = PromptFormat(
        tokenizer("{% for m in messages %}{{ m.name if m.role == 'tool' }}{{ m.content }}{% endfor %}")
    )
    form.prompt({"messages": [USER]}, 0, "p.jsonl:1")
    assert form.unread_keys == []
    form.prompt({"messages": [{**USER, "name": "ada", "id": 7, "weight": 0}]}, 0, "p.jsonl:1")
    assert form.unread_keys == ["id", "name", "weight"]
    form.prompt(
        {"messages": [USER, {**RESULT, "name": "weather", "reasoning": "none"}, USER]}, 0, "p.jsonl:1"
    )
    # a name is shown somewhere; thoughts and ids of calls are not told
    assert form.unread_keys == ["id", "weight"]


@pytest.mark.parametrize(
    "content, message",
    [
        ([{"type": "text", "text": "a"}], r"\(it has text\): store them as one text"),
        (
            [{"type": "text", "text": "a"}, {"type": "image_url"}],
            r"\(it has image_url, text\): leave such rows out",
        ),
        ([{"type": "input_audio"}], r"\(it has input_audio\): leave such rows out"),
        (["a"], r"\(it has text\): store them as one text"),
        ({"text": "a"}, "got dict"),
    ],
)
def test_row_when_a_content_is_in_parts_then_error_names_message_role_and_remedy(content, message):
    with pytest.raises(
        BadRow, match=f'message 1 of "messages", whose role is "assistant", must have text .*{message}'
    ):
        text("qwen3", [USER, said("assistant", content), USER])


def test_row_when_a_call_is_in_the_old_form_then_error_names_the_new_one():
    with pytest.raises(
        BadRow, match='message 1 of "messages" has a "function_call", .* write it as "tool_calls"'
    ):
        text("qwen3", [USER, said("assistant", "", function_call={"name": "f", "arguments": "{}"}), USER])


ARGUMENTS = {
    "qwen2_5": '"arguments": {"city": "Oslo", "unit": null}}',
    "qwen3": '"arguments": {"city": "Oslo", "unit": null}}',
    "deepseek_v3": '```json\n{"city": "Oslo", "unit": null}\n```',
    "llama_3_1": '{"city": "Oslo", "unit": null}}',
    "glm_4_5": "<arg_key>unit</arg_key><arg_value>null</arg_value>",
    "gpt_oss": '{"city": "Oslo", "unit": null}<|call|>',
    "mistral": '"arguments": {"city": "Oslo", "unit": null}}',
    "kimi": '{"city": "Oslo", "unit": null}<|tool_call_end|>',
}


@pytest.mark.parametrize("arguments", ['{"city": "Oslo", "unit": null}', {"city": "Oslo", "unit": None}])
@pytest.mark.parametrize("template", ARGUMENTS)
def test_arguments_when_text_or_an_object_then_each_template_gets_what_it_takes(template, arguments):
    call_id = "call12345" if template == "mistral" else "get_weather"
    assert ARGUMENTS[template] in text(template, [USER, called(arguments, call_id=call_id), RESULT])


def test_arguments_when_a_template_takes_text_then_the_rows_own_or_that_of_the_object():
    own = '{ "n":1.50, "at" : 123456789012345678901 }'
    assert f"```json\n{own}\n```" in text("deepseek_v3", [USER, called(own), RESULT])
    assert '{"at": 123456789012345678901}' in text(
        "qwen2_5", [USER, called('{"at": 123456789012345678901}'), RESULT]
    )
    assert '{"ort": "Tromsø"}' in text("deepseek_v3", [USER, called({"ort": "Tromsø"}), RESULT])


def test_arguments_when_a_template_takes_text_and_makes_json_of_it_again_then_error():
    twice = (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
        "{{ c.function.arguments.strip() | tojson }}{% endfor %}{% endfor %}"
    )
    with pytest.raises(BadRow, match=r'leaves out tool call 0 \("get_weather"\) of message 1, whose role is'):
        text(twice, [USER, CALL, RESULT])


def test_arguments_when_a_template_writes_objects_as_python_does_then_it_gets_text():
    template = (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name ~ '(' ~ "
        "c.function.arguments ~ ')' }}{% endfor %}{% endfor %}"
    )
    found = text(template, [USER, called({"city": "Oslo", "rain": True}), RESULT])
    assert 'get_weather({"city": "Oslo", "rain": true})' in found


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("", "its arguments are text and not JSON: .*{} for none.*, got ''"),
        ("{'city': 'Oslo'}", "its arguments are text and not JSON"),
        ('{"city": "Oslo"', "its arguments are text and not JSON"),
        ('{"n": NaN}', "its arguments are text and not JSON: .*NaN is not a number in JSON: write null"),
        ('"Oslo"', "its arguments must be an object, or its JSON text, got "),
        ("null", "its arguments must be an object"),
        ([1], "its arguments must be an object"),
        (5, "its arguments must be an object"),
    ],
)
@pytest.mark.parametrize("template", ["qwen2_5", "deepseek_v3", "kimi"])
def test_arguments_when_not_an_object_or_its_json_then_error_names_the_call(template, arguments, message):
    with pytest.raises(BadRow, match=rf'p.jsonl:1: tool call 0 of message 1 of "messages": {message}'):
        text(template, [USER, called(arguments), RESULT])


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"function": {"name": "f", "parameters": {"city": "Oslo"}}}, 'has "parameters", which templates'),
        ({"function": {"name": "f", "input": '{"city": "Oslo"}'}}, 'has "input", which templates leave out'),
        ({"function": {"name": "f"}, "arguments": {"city": "Oslo"}}, 'has "arguments", which templates'),
        ({"function": {"name": "f", "arguments": {}}, "arguments": {"city": "Oslo"}}, 'has "arguments"'),
        (
            {"function": {"name": "f", "arguments": {}, "id": "7"}},
            'has "id", .*; a call is {"id": ..., "type"',
        ),
        ({"function": "f", "arguments": {"city": "Oslo"}}, 'has "function", which templates leave out'),
        ({"name": "f", "args": {"city": "Oslo"}}, 'has "args", which templates leave out'),
        ({"name": "f", "function": {"name": "f", "arguments": {}}}, 'has "name", which templates leave out'),
        ({"function": {"arguments": {"city": "Oslo"}}}, 'has no "name" of its function, got'),
        ({"arguments": {"city": "Oslo"}}, 'has no "name" of its function, got'),
    ],
)
@pytest.mark.parametrize("template", ["qwen3", "deepseek_v3"])
def test_calls_when_a_part_is_where_templates_do_not_look_then_error_names_it(template, changed, message):
    call = {"id": "call12345", "type": "function", **changed}
    with pytest.raises(BadRow, match=f'p.jsonl:1: tool call 0 of message 1 of "messages" {message}'):
        text(template, [USER, said("assistant", None, tool_calls=[call]), RESULT])


def test_calls_when_without_a_function_of_their_own_then_read():
    call = {"id": "call12345", "index": 0, "name": "f", "arguments": {"city": "Oslo"}}
    assert "Oslo" in text("qwen2_5", [USER, said("assistant", None, tool_calls=[call]), RESULT])


def test_answer_when_it_has_a_literal_mark_of_thoughts_that_does_not_end_then_all_of_it_must_show():
    said_so = said("assistant", "The tag <think> opens thoughts.")
    assert "opens thoughts" in text("qwen3", [USER, said_so, USER])
    cut = "{% for m in messages %}[{{ m.role }}]{{ m.content.split('<think>')[0] }}{% endfor %}"
    with pytest.raises(BadRow, match="leaves out message 1, whose role is .assistant"):
        text(cut, [USER, said_so, USER])


CUT = (
    "{% for t in tools or [] %}{{ t.function.name }}: {{ t.function.description.split('\n')[0] }} "
    "{{ t.function.parameters.properties | list }}{% endfor %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<{{ c.function.name }}{% for k, v in c.function.arguments.items() %} "
    "{{ k }}={{ v[:40] if v is string else v }}{% endfor %}>{% endfor %}{% endfor %}"
)
"""Shows the first line of a description, the names of parameters, and 40 characters of an argument."""


def test_texts_when_a_template_cuts_long_ones_then_what_shows_whole_passes_and_what_does_not_is_named():
    assert "code=print(1)" in text(CUT, [USER, called({"code": "print(1)\n  print(2)"}), RESULT])
    with pytest.raises(BadRow, match=r'leaves out tool call 0 \("get_weather"\) of message 1'):
        text(CUT, [USER, called({"code": "print(1)\n" * 9 + "secret"}), RESULT])
    with pytest.raises(BadRow, match=r'leaves out tool call 0 \("get_weather"\) of message 1'):
        text(CUT, [USER, called({"code": ["a", {"b": "x" * 30}], "of": "y" * 50}), RESULT])
    one = {**TOOL, "function": {**TOOL["function"], "description": "The weather.\nNot of Oslo."}}
    assert "The weather" in text("qwen3", [USER], [one])
    with pytest.raises(BadRow, match="leaves out the description or a parameter of tool 0, whose name is"):
        text(CUT, [USER], [one])


@pytest.mark.parametrize(
    "template, named", [(CUT, ["description", "input_schema", "properties"]), ("qwen3", [])]
)
def test_tools_when_parts_of_their_parameters_do_not_show_then_their_keys_are_named(template, named):
    inner = {"type": "object", "properties": {"unit": {"type": "string", "enum": ["celsius", "kelvin"]}}}
    city = {"type": "string", "description": "Where it is.\nBy name."}
    parameters = {"type": "object", "properties": {"city": city, "how": inner}, "required": ["city"]}
    function = {"name": "f", "description": "Looks.", "parameters": parameters, "input_schema": {"x": 1}}
    form = PromptFormat(tokenizer(template), tools_key="tools")
    form.prompt({"messages": [USER], "tools": [{"type": "function", "function": function}]}, 0, "p.jsonl:1")
    line = f"tools have {', '.join(named)}, which the chat template does not show to the model"
    assert form.notes == ([line] if named else [])


def test_calls_when_not_a_list_of_objects_then_error_names_them():
    for calls in ("[]", [3], {"name": "f"}):
        with pytest.raises(BadRow, match='"tool_calls" of message 1 of "messages" must be a list of objects'):
            text("qwen3", [USER, said("assistant", "", tool_calls=calls), USER])


def test_nulls_when_json_lines_wrote_them_then_kept_and_when_columns_filled_them_then_dropped():
    call = called({"city": "Oslo", "unit": None, "days": [None, {"at": None}]}, name=None, call_id=None)
    lines = text("qwen2_5", [USER, call, RESULT], [TOOL])
    assert (
        '{"city": "Oslo", "unit": null, "days": [null, {"at": null}]}' in lines and '"default": null' in lines
    )
    columns = text("qwen2_5", [USER, call, RESULT], [TOOL], fills_nulls=True)
    assert '{"city": "Oslo", "days": [null, {}]}' in columns and '"default"' not in columns
    texts = text("qwen2_5", [USER, called('{"unit": null}'), RESULT], json.dumps([TOOL]), fills_nulls=True)
    assert '{"unit": null}' in texts and '"default": null' in texts  # written, for a text has no columns


def test_nulls_when_rows_are_read_from_files_then_the_files_kind_decides(tmp_path):
    messages = [USER, called({"city": None, "n": 1}, ""), RESULT]
    (tmp_path / "p.jsonl").write_text(json.dumps({"messages": messages}))
    pq.write_table(pa.Table.from_pylist([{"messages": messages}] * 2), tmp_path / "p.parquet")
    for name, arguments in (("p.jsonl", '{"city": null, "n": 1}'), ("p.parquet", '{"n": 1}')):
        found = open_prompts([str(tmp_path / name)], PromptFormat(tokenizer("qwen2_5"))).rows[0]
        assert f'"arguments": {arguments}}}' in found.text


def test_template_when_conversations_are_alike_then_they_are_rendered_with_marks_once(monkeypatch):
    made, rendered = tokenizer("mistral"), []
    render = made.render
    monkeypatch.setattr(
        made, "render", lambda messages, **how: rendered.append(messages) or render(messages, **how)
    )
    form = PromptFormat(made)
    for number in range(100):
        own_id = f"{number:09d}"
        call = called({"city": f"city {number}"}, call_id=own_id, thinking=f"I think {number}.")
        messages = [said("user", f"{number}?"), call, said("tool", f"{number}", tool_call_id=own_id)]
        form.prompt({"messages": messages}, number, "p.jsonl:1")
    assert len(rendered) == 101
    monkeypatch.setattr(checked_template, "KEPT", 2)
    for number in range(4):
        form.prompt({"messages": [said("user", "a", turn=number)]}, 0, "p.jsonl:1")
    assert len(form._template._found) == 2


def test_template_when_it_refuses_marks_then_what_is_written_must_show():
    template = (
        "{% for m in messages %}{% if m.role == 'user' and not m.content in ('a b', 'c d') %}{{ "
        "raise_exception('no') }}{% endif %}{% if m.content != 'c d' %}{{ m.content }}{% endif %}{% for c "
        "in m.tool_calls or [] %}{{ c.function.name + c.function.arguments.code }}{% endfor %}{% endfor %}"
    )
    run = called({"code": "1 + 1"})
    assert text(template, [said("user", "a b"), run, RESULT]) == 'a bget_weather1 + 1It says "rain".\n'
    with pytest.raises(BadRow, match='leaves out message 0, whose role is "user"'):
        text(template, [said("user", "c d"), run, RESULT])
    with pytest.raises(BadRow, match=r'leaves out tool call 0 \("get_weather"\) of message 1'):
        text(template, [said("user", "a b"), called({"code": "1", "then": "stop"}), RESULT])
    with pytest.raises(BadRow, match="refuses the messages: no"):
        text(template, [said("user", "e"), run, RESULT])
