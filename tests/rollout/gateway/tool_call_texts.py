"""Answers with tool calls, good and malformed, by format; and where the engines' parsers read another thing
than ours, with the reason.
"""

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer"},
                    "b": {"type": "number"},
                    "note": {"type": "string"},
                    "exact": {"type": "boolean"},
                    "of": {"type": "array", "items": {"type": "integer"}},
                    "more": {"type": "object"},
                    "maybe": {"type": ["integer", "null"]},
                },
            },
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]

DEEPSEEK_CALL = (
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"
)
DEEPSEEK_31 = "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"
KIMI_CALL = "<|tool_call_begin|>{id}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"

_CUT_KIMI = (
    '<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{"a": 1}'
)


def deepseek(*calls, form=DEEPSEEK_CALL, before=""):
    made = "\n".join(form.format(name=name, arguments=arguments) for name, arguments in calls)
    return f"{before}<｜tool▁calls▁begin｜>{made}<｜tool▁calls▁end｜>"


def kimi(*calls, before=""):
    made = "".join(KIMI_CALL.format(id=label, arguments=arguments) for label, arguments in calls)
    return f"{before}<|tool_calls_section_begin|>{made}<|tool_calls_section_end|>"


def glm(name, *pairs):
    made = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in pairs)
    return f"<tool_call>{name}\n{made}</tool_call>"


def coder(name, *pairs):
    made = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in pairs)
    return f"<tool_call>\n<function={name}>\n{made}</function>\n</tool_call>"


def gemma(name, arguments):
    return f"<|tool_call>call:{name}{{{arguments}}}<tool_call|>"


def harmony(name, arguments, head="<|start|>assistant<|channel|>commentary to={} <|constrain|>json"):
    return f"{head.format(f'functions.{name}')}<|message|>{arguments}<|call|>"


HERMES = [
    '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2.5}}\n</tool_call>',
    '<tool_call>{"name":"add","arguments":{"a":1}}</tool_call>',
    'I add.\n\n<tool_call>\n{"name": "add", "arguments": {"note": "h\u00e9 \u4e2d \\u00e9"}}\n</tool_call>',
    '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n<tool_call>\n{"name": "now", '
    '"arguments": {}}\n</tool_call>',
    '<tool_call>\n{"name": "unknown", "arguments": {"x": [1, {"y": null}]}}\n</tool_call>',
    '<tool_call>\n{"name": "add", "arguments": {"a": 1}}',
    '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call> and then text',
    '<tool_call>\n{"name": "add", "arguments": "{\\"a\\": 1}"}\n</tool_call>',
    '<tool_call>\n{"name": "add", "arguments": {"note": "<b>\\n</b> \\" \\\\"}}\n</tool_call>',
    "no call",
    "",
    "a < b and </tool_call>",
    '<tool_call>\n{"name": "add", "arguments": {"a": 1\n</tool_call>',
    "<tool_call>\n{'name': 'add'}\n</tool_call>",
    '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n<tool_call>\n{"name": \n</tool_call>',
    '<tool_call>\n{"name": "add", "argum',
    "<tool_call>\n3\n</tool_call>",
    '<tool_call>\n"add"\n</tool_call>',
    '<tool_call>\n{"name": "now"}\n</tool_call>',
    '<tool_call>\n{"name": "add", "parameters": {"a": 1}}\n</tool_call>',
    '<tool_call>\n[{"name": "add", "arguments": {"a": 1}}, {"name": "now", "arguments": {}}]\n</tool_call>',
    '<tool_call>\n{"arguments": {"a": 1}}\n</tool_call>',
    "<tool_call>\n</tool_call>",
    "<tool_call>",
]
CODER = [
    coder("add", ("a", "1"), ("b", "2.5"), ("note", "7"), ("exact", "true"), ("of", "[1, 2]")),
    coder("now"),
    "I add.\n" + coder("add", ("note", "two\nlines\n\n  and space  ")),
    coder("add", ("a", "1")) + "\n" + coder("now"),
    coder("add", ("more", '{"x": [1, "y"]}')),
    coder("add", ("note", "<b>&lt;</b> \u4e2d \"q\" 'q' \\n")),
    coder("unknown", ("x", "5"), ("y", "text")),
    coder("add", ("a", "no number")),
    coder("add", ("b", "3.0")),
    coder("add", ("b", "1e3")),
    coder("add", ("exact", "False")),
    coder("add", ("exact", "maybe")),
    coder("add", ("maybe", "null")),
    coder("add", ("maybe", "4")),
    coder("add", ("note", "null")),
    coder("add", ("of", "['a', 'b']")),
    coder("add", ("of", "nothing")),
    coder("add", ("other", "1")),
    "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>",
    "<function=add>\n<parameter=a>\n1\n</parameter>\n</function>",
    "<tool_call>\n<function=add>\n<parameter=a>\n1\n<parameter=b>\n2\n</parameter>\n</function>\n</tool_call>",
    "<tool_call>\n<function=add>\n<parameter=note>\nrm -rf /tmp/",
    "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</tool_call>",
    "<tool_call>\n<function=ad",
    "<tool_call>\nnothing\n</tool_call>",
    "no call",
    "",
]
GLM = [
    glm("add", ("a", "1"), ("b", "2.5"), ("note", "seven"), ("exact", "true"), ("of", "[1, 2]")),
    glm("now"),
    "I add.\n" + glm("add", ("note", "two\nlines")),
    glm("add", ("a", "1")) + "\n" + glm("now"),
    glm("add", ("more", '{"x": [1, "y"]}')),
    glm("unknown", ("y", "text")),
    glm("unknown", ("x", "5")),
    glm("add", ("note", "7")),
    glm("add", ("note", "true")),
    glm("add", ("a", "no number")),
    glm("add", ("maybe", "null")),
    "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>",
    "<tool_call>now</tool_call>",
    "<tool_call>add\\n<arg_key>a</arg_key>\\n<arg_value>1</arg_value>\\n</tool_call>",
    "<tool_call>add\n<arg_key>a</arg_key>\n</tool_call>",
    "<tool_call>add\n<arg_key>note</arg_key>\n<arg_value>rm -rf /tmp/",
    "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n",
    "<tool_call>\n</tool_call>",
    "no call",
    "",
]
LLAMA = [
    '{"name": "add", "parameters": {"a": 1, "b": 2.5}}',
    '{"name": "add", "arguments": {"a": 1}}',
    '<|python_tag|>{"name": "add", "parameters": {"a": 1}}',
    '{"name": "add", "parameters": {"a": 1}};{"name": "now", "parameters": {}}',
    '{"name": "add", "parameters": {"a": 1}}; {"name": "now", "parameters": {}}',
    '{"name": "unknown", "parameters": {"x": {"y": "}{"}}}',
    'I add. <|python_tag|>{"name": "add", "parameters": {"a": 1}}',
    '{"name": "add", "parameters": {"a": 1}} and then text',
    'As JSON: {"name": "add", "parameters": {"a": 1}}',
    '{"answer": 42}',
    '{"name": "now"}',
    '{"name": "add", "parameters": {"a": 1}',
    "{'name': 'add', 'parameters': {'a': 1}}",
    "{not json}",
    '<|python_tag|>brave_search.call(query="x")',
    "no call",
    "",
]
MISTRAL = [
    '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2.5}}]',
    '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]',
    '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}, {"name": "now", "arguments": {}}]',
    'I add. [TOOL_CALLS] [{"name": "add", "arguments": {"note": "]["}}]',
    '[TOOL_CALLS]add[ARGS]{"a": 1}',
    '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]now[ARGS]{}',
    '[TOOL_CALLS]add{"a": 1}',
    '[TOOL_CALLS] [{"name": "unknown", "arguments": {"x": [1]}}]',
    '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}] and then text',
    '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}]',
    '[TOOL_CALLS] [{"name": "add", "argum',
    '[TOOL_CALLS]add[ARGS]{"a": 1',
    "[TOOL_CALLS]",
    "no call",
    "",
]
DEEPSEEK = [
    deepseek(("add", '{"a": 1, "b": 2.5}')),
    deepseek(("add", '{"a": 1}'), ("now", "{}")),
    deepseek(("add", '{"note": "\u4e2d"}'), before="I add."),
    deepseek(("unknown", '{"x": [1, null]}')),
    deepseek(("add", '{\n  "a": 1\n}')),
    deepseek(("add", '{"a":1}')),
    deepseek(("add", '{"a": 1')),
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"a": 1}',
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n{"a": 1}<｜tool▁call▁end｜>',
    "<｜tool▁calls▁begin｜>",
    "no call",
    "",
]
DEEPSEEK_V31 = [
    deepseek(("add", '{"a": 1, "b": 2.5}'), form=DEEPSEEK_31),
    deepseek(("add", '{"a": 1}'), ("now", "{}"), form=DEEPSEEK_31),
    deepseek(("add", '{"note": "\u4e2d"}'), form=DEEPSEEK_31, before="I add."),
    deepseek(("unknown", '{"x": [1, null]}'), form=DEEPSEEK_31),
    deepseek(("add", '{\n  "a": 1\n}'), form=DEEPSEEK_31),
    deepseek(("add", '{"a": 1'), form=DEEPSEEK_31),
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}',
    "<｜tool▁calls▁begin｜>",
    "no call",
    "",
]
KIMI = [
    kimi(("functions.add:0", '{"a": 1, "b": 2.5}')),
    kimi(("functions.add:0", '{"a": 1}'), ("functions.now:1", "{}")),
    kimi(("functions.add:3", '{"note":"\u4e2d"}'), before="I add."),
    kimi(("functions.unknown:0", '{"x": [1, null]}')),
    kimi(("add:0", '{"a": 1}')),
    kimi(("functions.add:0", '{"a": 1')),
    kimi(("functions.add:0", "nothing")),
    kimi(("functions.add:0", '{"a": }')),
    kimi(("0", '{"a": 1}')),
    kimi(("add", '{"a": 1}')),
    _CUT_KIMI,
    "<|tool_calls_section_begin|>",
    "no call",
    "",
]
GEMMA = [
    gemma("add", 'a:1,b:2.5,note:<|"|>seven<|"|>,exact:true,of:[1,2]'),
    gemma("now", ""),
    "I add.\n" + gemma("add", 'note:<|"|>two\nlines, {x}: [y]<|"|>'),
    gemma("add", "a:1") + gemma("now", ""),
    gemma("add", 'more:{x:[1,<|"|>y<|"|>],z:{}}'),
    gemma("unknown", 'x:<|"|>h\u00e9 \u4e2d<|"|>'),
    gemma("add", " a : 1 , b : 2.5 "),
    gemma("add", "a:-7,b:-0.5"),
    gemma("add", "note:bare words"),
    gemma("add", "maybe:null"),
    gemma("add", "b:1e3"),
    gemma("add", 'of:[<|"|>a]b<|"|>,<|"|>c<|"|>]'),
    gemma("add", 'more:{<|"|>x<|"|>:1}'),
    gemma("add", "a:1") + " and then text",
    gemma("add", 'note:<|"|>no end'),
    "<|tool_call>call:add{a:1",
    "<|tool_call>call:add{a:1}",
    gemma("add", "a:"),
    "<|tool_call>call:{a:1}<tool_call|>",
    "<|tool_call>add{a:1}<tool_call|>",
    "<|tool_call>",
    "no call",
    "",
]
_AS_THE_TEMPLATE = " to={}<|channel|>commentary json"
_ALONE = "<|channel|>commentary to={} <|constrain|>json"
HARMONY = [
    harmony("add", '{"a": 1, "b": 2.5}'),
    harmony("add", '{"a":1}'),
    harmony("now", "{}"),
    harmony("now", ""),
    harmony("add", '{"note": "h\u00e9 \u4e2d \\u00e9"}'),
    harmony("unknown", '{"x": [1, null]}'),
    "<|channel|>commentary<|message|>I add.<|end|>" + harmony("add", '{"a": 1}'),
    harmony("add", '{"a": 1}').removesuffix("<|call|>"),
    harmony("add", '{"a": 1}') + harmony("now", "{}"),
    harmony("add", '{"a": 1}', _AS_THE_TEMPLATE),
    harmony("add", '{"a": 1}', _ALONE),
    harmony("add", '{"a": 1'),
    harmony("add", "[1]"),
    "<|start|>assistant<|channel|>commentary to=functions.add",
    "<|channel|>final<|message|>Write to=functions.add {}.",
    "no call",
    "",
]
TEXTS = {
    "hermes": HERMES,
    "qwen3_coder": CODER,
    "glm45": GLM,
    "llama3": LLAMA,
    "mistral": MISTRAL,
    "deepseek_v3": DEEPSEEK,
    "deepseek_v31": DEEPSEEK_V31,
    "kimi_k2": KIMI,
    "gemma4": GEMMA,
    "gpt_oss": HARMONY,
}
THOUGHTS = [
    ("own", "<think>\nI see.\n</think>\n\n4"),
    ("own", "<think>I see"),
    ("own", "<think>a</think>b</think>c"),
    ("begun", "I see.\n</think>\n\n4"),
    ("begun", "I see"),
    ("begun", "<think>I see.</think>4"),
]
"""(own: the answer begins the thoughts itself; begun: the prompt did), text."""


_NAMELESS = "it hands on a call without a name"
_CUT = "it carries out a call that was cut"
_BROKEN = "it hands on arguments that are no JSON"
_NUMBER = "a whole number of a schema's numbers is written with a fraction"
_NO_ARGUMENTS = "a call needs the key arguments"
_UNKNOWN = "a function that is not listed is dropped"
_ENDS = "both tags need line breaks of this form"
_UNFINISHED_CODER = "<tool_call>\n<function=add>\n<parameter=note>\nrm -rf /tmp/"
_UNCLOSED_CODER = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</tool_call>"
OTHERWISE = {
    "sglang": {
        ("hermes", '<tool_call>\n{"arguments": {"a": 1}}\n</tool_call>'): _NAMELESS,
        ("qwen3_coder", coder("add", ("b", "3.0"))): _NUMBER,
        ("qwen3_coder", coder("add", ("b", "1e3"))): _NUMBER,
        ("qwen3_coder", coder("add", ("exact", "maybe"))): "what is no boolean becomes false",
        ("qwen3_coder", coder("add", ("note", "null"))): "the text null becomes none",
        ("qwen3_coder", coder("add", ("of", "['a', 'b']"))): "it reads Python's lists",
        (
            "qwen3_coder",
            "<function=add>\n<parameter=a>\n1\n</parameter>\n</function>",
        ): "it needs <tool_call>",
        ("qwen3_coder", _UNFINISHED_CODER): _CUT,
        ("qwen3_coder", _UNCLOSED_CODER): _CUT,
        ("glm45", glm("add", ("note", "true"))): "the text true becomes Python's True",
        ("glm45", "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>"): _ENDS,
        ("glm45", "<tool_call>now</tool_call>"): _ENDS,
        ("glm45", "<tool_call>\n</tool_call>"): _NAMELESS,
        ("llama3", '{"answer": 42}'): _NAMELESS,
        ("llama3", "{'name': 'add', 'parameters': {'a': 1}}"): "it reads Python's dictionaries",
        ("llama3", '<|python_tag|>brave_search.call(query="x")'): "the tag is dropped",
        ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]'): "it needs a space",
        ("mistral", '[TOOL_CALLS]add{"a": 1}'): "it needs [ARGS]",
        ("kimi_k2", kimi(("functions.add:0", '{"a": }'))): _BROKEN,
        ("kimi_k2", kimi(("0", '{"a": 1}'))): "it guesses the function",
        ("gemma4", gemma("add", "maybe:null")): "null is text",
        ("gemma4", gemma("add", "b:1e3")): "a number with an exponent is text",
        ("gemma4", gemma("add", 'more:{<|"|>x<|"|>:1}')): "the marks of a key belong to it",
        ("gemma4", gemma("add", 'note:<|"|>no end')): _CUT,
        ("gemma4", gemma("add", "a:")): "no value is a text",
        ("gemma4", "<|tool_call>call:{a:1}<tool_call|>"): _NAMELESS,
        ("gpt_oss", harmony("add", '{"a": 1}').removesuffix("<|call|>")): "a call needs its end",
        ("gpt_oss", harmony("add", '{"a": 1}', _AS_THE_TEMPLATE)): "the recipient stands behind the channel",
        ("gpt_oss", harmony("add", '{"a": 1}', _ALONE)): "a message stands before the call",
        ("gpt_oss", harmony("add", "[1]")): "arguments need not be an object",
    },
    "vllm": {
        ("hermes", '<tool_call>\n{"name": "now"}\n</tool_call>'): _NO_ARGUMENTS,
        ("hermes", '<tool_call>\n{"name": "add", "parameters": {"a": 1}}\n</tool_call>'): _NO_ARGUMENTS,
        (
            "hermes",
            '<tool_call>\n[{"name": "add", "arguments": {"a": 1}}, {"name": "now", "arguments": {}}]\n'
            "</tool_call>",
        ): "an array is malformed",
        ("qwen3_coder", _UNFINISHED_CODER): _CUT,
        ("qwen3_coder", _UNCLOSED_CODER): _CUT,
        ("qwen3_coder", "<tool_call>\n<function=ad"): _CUT,
        ("glm45", glm("unknown", ("y", "text"))): _UNKNOWN,
        ("glm45", glm("unknown", ("x", "5"))): _UNKNOWN,
        (
            "glm45",
            "<tool_call>add\\n<arg_key>a</arg_key>\\n<arg_value>1</arg_value>\\n</tool_call>",
        ): "a written line break belongs to the name",
        ("glm45", "<tool_call>add\n<arg_key>note</arg_key>\n<arg_value>rm -rf /tmp/"): _CUT,
        ("glm45", "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n"): _CUT,
        ("llama3", 'I add. <|python_tag|>{"name": "add", "parameters": {"a": 1}}'): "content is dropped",
        ("llama3", '{"name": "add", "parameters": {"a": 1}} and then text'): "content is dropped",
        ("llama3", 'As JSON: {"name": "add", "parameters": {"a": 1}}'): "objects anywhere are calls",
        ("llama3", '{"name": "now"}'): _NO_ARGUMENTS,
        ("deepseek_v3", deepseek(("add", '{\n  "a": 1\n}'))): "arguments are one line",
        ("deepseek_v3", deepseek(("add", '{"a":1}'))): "arguments stay as they were sampled",
        ("deepseek_v3", deepseek(("add", '{"a": 1'))): _BROKEN,
        ("deepseek_v31", deepseek(("add", '{\n  "a": 1\n}'), form=DEEPSEEK_31)): "arguments are one line",
        ("deepseek_v31", deepseek(("add", '{"a": 1'), form=DEEPSEEK_31)): _BROKEN,
        ("kimi_k2", kimi(("functions.add:0", '{"a": 1'))): _BROKEN,
        ("kimi_k2", kimi(("functions.add:0", "nothing"))): _BROKEN,
        ("kimi_k2", kimi(("functions.add:0", '{"a": }'))): _BROKEN,
        (
            "kimi_k2",
            _CUT_KIMI,
        ): _CUT,
    },
}
"""engine -> (format, text) -> what its parser makes of it instead (SGLang 0.5.23, vLLM 0.32)."""
