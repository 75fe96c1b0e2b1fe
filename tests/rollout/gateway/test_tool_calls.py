"""Tool calls in answers: read as SGLang's and vLLM's parsers read them, but where the table says why not."""

import json
from pathlib import Path

import pytest

from megatron_rl_corr.rollout.gateway.answering import answer_rules
from megatron_rl_corr.rollout.gateway.harmony import split_harmony
from megatron_rl_corr.rollout.gateway.tool_calls import (
    TOOL_FORMATS,
    detect,
    parse_tool_calls,
    split_thoughts,
)
from megatron_rl_corr.rollout.sampling import SamplingParams
from tests.preloaded import run_preloaded
from tests.rollout.gateway.published_templates import FAMILIES, FOLDER, family, text_of_template
from tests.rollout.gateway.tool_call_texts import (
    DEEPSEEK_31,
    OTHERWISE,
    TEXTS,
    THOUGHTS,
    TOOLS,
    deepseek,
    kimi,
)
from tools.cpu import gpu_available

HERE = Path(__file__).parent
CALLS = [(name, text) for name, texts in TEXTS.items() for text in texts]


def ours(name, text):
    content, calls = parse_tool_calls(name, text, TOOLS, turn="0")
    return [content, [[call["function"]["name"], call["function"]["arguments"]] for call in calls]]


def theirs(engine, folder):
    given, out = folder / "texts.json", folder / "out.json"
    given.write_text(json.dumps({"tools": TOOLS, "calls": CALLS, "thoughts": THOUGHTS}))
    made = run_preloaded([HERE / f"{engine}_tool_calls.py", given, out], engine=engine)
    assert made.returncode == 0, made.stderr
    return json.loads(out.read_text())


def agree(mine, other):
    """Space around content counts only where nothing is called; a malformed call may leave no content."""
    if mine[1] or other[1]:
        return mine[1] == other[1] and mine[0].strip() == other[0].strip()
    return other[0] in (mine[0], "")


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_calls_when_the_engines_read_them_then_equal_but_for_the_table(engine, tmp_path):
    if engine == "vllm" and gpu_available():
        pytest.skip("make setup-vllm installs vLLM without a GPU only")
    found = theirs(engine, tmp_path)
    compared = [(case, other) for case, other in zip(CALLS, found["calls"], strict=True) if other is not None]
    differ = {case for case, other in compared if not agree(ours(*case), other)}
    assert differ == set(OTHERWISE[engine])
    assert len(compared) > 100
    if engine == "sglang":
        mine = [list(split_thoughts(text, begun=kind == "begun")) for kind, text in THOUGHTS]
        assert mine == found["thoughts"]


def test_calls_when_one_is_malformed_then_all_is_content():
    malformed = [(name, text) for name, text in CALLS if not ours(name, text)[1]]
    assert len(malformed) > 40
    assert all(ours(name, text) == [text, []] for name, text in malformed)


@pytest.mark.parametrize("value", ["[" * 1000 + "]" * 1000, "[" * 200 + "]" * 200, "1e400", "[-1e999]"])
@pytest.mark.parametrize("name", ["hermes", "mistral", "kimi_k2"])
def test_calls_when_nothing_can_send_them_back_then_content(name, value):
    texts = {
        "hermes": '<tool_call>{"name": "add", "arguments": {"a": VALUE}}</tool_call>',
        "mistral": '[TOOL_CALLS]add[ARGS]{"a": VALUE}',
        "kimi_k2": kimi(("functions.add:0", '{"a": VALUE}')),
    }
    text = texts[name].replace("VALUE", value)
    assert ours(name, text) == [text, []]
    assert len(ours(name, texts[name].replace("VALUE", "[[1e30]]"))[1]) == 1


def test_ids_when_made_then_unique_in_the_episode_and_repeated_with_the_run():
    text = TEXTS["hermes"][3]
    first = [
        call["id"] for turn in ("0", "1") for call in parse_tool_calls("hermes", text, TOOLS, turn=turn)[1]
    ]
    again = [
        call["id"] for turn in ("0", "1") for call in parse_tool_calls("hermes", text, TOOLS, turn=turn)[1]
    ]
    assert first == again and len(set(first)) == 4
    assert all(label.startswith("call_") and len(label) == 29 for label in first)


def test_ids_when_the_template_writes_them_then_in_its_form():
    (call,) = parse_tool_calls("mistral", TEXTS["mistral"][0], TOOLS, turn="0")[1]
    assert len(call["id"]) == 9 and call["id"].isalnum()
    (call,) = parse_tool_calls("kimi_k2", kimi(("functions.add:7", "{}")), TOOLS, turn="0")[1]
    assert call["id"] == "functions.add:7"


def test_calls_when_ids_are_twice_the_same_then_content():
    text = kimi(("functions.add:0", "{}"), ("functions.add:0", "{}"))
    assert parse_tool_calls("kimi_k2", text, TOOLS, turn="0") == (text, [])


TEMPLATES = {
    "hermes": '<tool_call>\\n{"name": \' ... </tool_call> {{ tools | tojson }}',
    "qwen3_coder": "<tool_call>\\n<function=' ... <parameter=",
    "glm45": "<tool_call> ... <arg_key> ... <arg_value>",
    "llama3": '{"name": function name, "parameters": dictionary of argument name and its value}',
    "mistral": '"[TOOL_CALLS] ["',
    "deepseek_v3": "<｜tool▁calls▁begin｜> ... ```json",
    "deepseek_v31": "<｜tool▁calls▁begin｜>",
    "kimi_k2": "<|tool_calls_section_begin|>",
    "gemma4": "{{- '<|tool_call>call:' + function['name'] + '{' -}}",
    "gpt_oss": '{{- "<|start|>assistant<|channel|>analysis<|message|>" + message.content }}',
    None: "{% for message in messages %}<|im_start|>",
}


@pytest.mark.parametrize("name", TEMPLATES, ids=str)
def test_format_when_a_template_teaches_it_then_detected(name):
    assert detect(TEMPLATES[name]) == name
    assert {*TEMPLATES} == {*TOOL_FORMATS, None}


def test_deepseek_when_of_the_other_version_then_its_calls_are_not_read():
    assert ours("deepseek_v3", deepseek(("add", "{}"), form=DEEPSEEK_31))[1] == []


def test_calls_when_cut_then_no_half_of_a_command_is_called():
    cut = "<tool_call>\n<function=add>\n<parameter=note>\nrm -rf /tmp/"
    assert ours("qwen3_coder", cut) == [cut, []]
    assert ours("qwen3_coder", f"{cut}x\n</parameter>\n</function>\n</tool_call>")[1] != []
    cut = "<tool_call>add\n<arg_key>note</arg_key>\n<arg_value>rm -rf /tmp/</arg_value>"
    assert ours("glm45", cut) == [cut, []]


@pytest.mark.parametrize("name", [one for one in FAMILIES if not one.endswith("_training")])
def test_format_when_a_template_is_published_then_that_of_its_family_is_detected(name):
    if FOLDER is None:
        pytest.skip("make setup-agents installs TRL's wheel, which has published chat templates")
    known = family(name)
    reads_calls = known.parser or (name.startswith("deepseek") and "deepseek_v3") or None
    assert detect(text_of_template(name)) == reads_calls


def test_thoughts_when_gpt_oss_has_them_then_messages_of_their_own():
    think = "<|channel|>analysis<|message|>{}<|end|><|start|>assistant"
    final = "<|channel|>final<|message|>It is wet."
    for text, thoughts, rest in [
        (think.format("Hm.") + final, "Hm.", "It is wet."),
        (think.format("a") + think.format("b") + final, "a\nb", "It is wet."),
        ("<|channel|>analysis<|message|>cut", "cut", ""),
        (final, "", "It is wet."),
        ("It is wet.", "", "It is wet."),
        ("", "", ""),
    ]:
        assert split_harmony(text) == (thoughts, rest)
    call = " to=functions.add<|channel|>commentary json<|message|>{}"
    before = "<|channel|>commentary<|message|>I add.<|end|>"
    thoughts, rest = split_harmony(think.format("Hm.") + before + "<|start|>assistant" + call)
    assert thoughts == "Hm." and ours("gpt_oss", rest) == ["I add.", [["add", "{}"]]]


def test_rules_when_a_template_refuses_thoughts_in_the_content_then_they_must_be_separate():
    how = {"max_tokens": 9, "max_turns": 9, "tool_format": "gpt_oss", "warn": str}
    with pytest.raises(ValueError, match="`agent_reasoning` must be separate for gpt-oss"):
        answer_rules(None, SamplingParams(9), separate_thoughts=False, **how)
    rules = answer_rules(None, SamplingParams(9), separate_thoughts=True, **how)
    assert rules.thoughts("<|channel|>analysis<|message|>so", begun=False) == ("so", "")
    rules = answer_rules(None, SamplingParams(9), separate_thoughts=True, **how | {"tool_format": "gemma4"})
    assert rules.thoughts("<|channel>thought\nso\n<channel|>a", begun=False) == ("so\n", "a")


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_calls_when_the_policy_repeats_itself_then_read_in_time(name):
    """What grew with the square of the length would take minutes."""
    marks = {
        "hermes": ["<tool_call>", "[", '{"a":', "</tool_call>"],
        "qwen3_coder": ["<function=", "</function>", "<parameter=", "<function=a><parameter=b", ">"],
        "glm45": ["<tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "<tool_call>a<arg_key>", "\n"],
        "llama3": ["{", '{"a":', '{"name": 1};', "[", ";"],
        "mistral": ["[TOOL_CALLS]", "[ARGS]", "[TOOL_CALLS]a[ARGS]{", "[", "[CALL_ID]"],
        "deepseek_v3": ["<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "\n```json\n", "\n```", "[", " "],
        "deepseek_v31": ["<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"],
        "kimi_k2": ["<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>", "a"],
        "gemma4": [
            "<|tool_call>call:",
            "{a:",
            "<|tool_call>call:a{}",
            '<|"|>',
            "[",
            "{",
            " ",
            "<tool_call|>",
        ],
        "gpt_oss": ["<|start|>assistant", "<|channel|>", "to=a", "<|message|>", "{", " ", "<|call|>", "{}"],
    }[name]
    begin = TOOL_FORMATS[name].marker
    for mark in marks:
        for other in ("", *marks):
            text = begin + mark * 20_000 + other * 20_000
            assert ours(name, text) is not None


@pytest.mark.parametrize("name", ["hermes", "kimi_k2"])
def test_calls_when_they_have_half_a_character_then_content(name):
    arguments = '{"a": "\\ud83d"}'
    text = {
        "hermes": f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>',
        "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
        f"{arguments}<|tool_call_end|><|tool_calls_section_end|>",
    }[name]
    assert parse_tool_calls(name, text, None, turn="1") == (text, [])
    whole = text.replace("d83d", "d83d\\ude00")
    assert len(parse_tool_calls(name, whole, None, turn="1")[1]) == 1


def test_calls_when_json_is_none_that_can_be_read_then_content():
    for arguments in ('{"a": NaN}', '{"a": ' + "9" * 5_000 + "}", '{"a": ' + "[" * 100_000):
        text = f'<tool_call>\n{{"name": "add", "arguments": {arguments}}}\n</tool_call>'
        assert ours("hermes", text) == [text, []]
    deep = "[" * 100_000 + "]" * 100_000
    text = f"<tool_call><function=add><parameter=of>{deep}</parameter></function></tool_call>"
    assert ours("qwen3_coder", text) == [text, []]
    wide = f"<tool_call><function=add><parameter=a>{'9' * 5_000}</parameter></function></tool_call>"
    assert json.loads(ours("qwen3_coder", wide)[1][0][1]) == {"a": "9" * 5_000}
