"""Published chat templates, which TRL's wheel in .venv-agents has, and what is known of each beside its text:
what ends a turn, and how the models behind it write thoughts and calls.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parents[3]
FOLDER = next(ROOT.glob(".venv-agents/lib/python3*/site-packages/trl/chat_templates"), None)
PREFIX = "trl/"
CONTROL = [
    "<|begin_of_text|>",
    "<|eom_id|>",
    "<|python_tag|>",
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<|constrain|>",
    "<|turn>",
    "<turn|>",
    "<|tool>",
    "<tool|>",
    "<|tool_call>",
    "<tool_call|>",
    "<|tool_response>",
    "<tool_response|>",
    '<|"|>',
    "<|channel>",
    "<channel|>",
    "<|think|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<|START_OF_TURN_TOKEN|>",
    "<|END_OF_TURN_TOKEN|>",
    "<|SYSTEM_TOKEN|>",
    "<|USER_TOKEN|>",
    "<|CHATBOT_TOKEN|>",
    "<|tool_call_start|>",
    "<|tool_call_end|>",
    "<|tool_response_start|>",
    "<|tool_response_end|>",
    "<end_of_utterance>",
    "<|eot|>",
    "<|eom|>",
]
"""Control tokens of these models, beside those that the stand-ins have too."""
MARKS = ["<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"]
MARKS += ["<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"]
"""Tokens of their own that are no control tokens."""


@dataclass(frozen=True)
class Family:
    """What its models do."""

    end: str = "<|im_end|>"
    """Ends a turn; "": what the next message begins with does."""
    eos: str | None = None
    """The tokenizer's own end, where that is another one."""
    others: tuple[str, ...] = ("<|endoftext|>",)
    """Other control tokens with which an answer may end."""
    call_end: str | None = None
    """Ends an answer that has a call, where that is another one."""
    tail: str = "\n"
    """What the template writes behind the end of a whole conversation."""
    calls: str | None = None
    """How calls are written, one of CALLS; None: the template does not show tools."""
    parser: str | None = None
    """The format that is detected."""
    thoughts: tuple[str, str] | None = ("<think>\n", "\n</think>\n\n")
    """What stands around them."""
    opens: bool = False
    """The prompt opens them."""
    thoughts_key: str | None = "reasoning_content"
    """The key of a message by which the template shows them; None: it has none."""
    arguments_as_text: bool = False
    empty_as_null: bool = False
    """The content of a call without words is none."""


def coder(**known):
    return Family(calls="coder", parser="qwen3_coder", **known)


def hermes(**known):
    return Family(calls="hermes", parser="hermes", **known)


PLAIN = Family(thoughts_key=None)
GEMMA_4 = Family(
    end="<turn|>",
    others=("<|tool_response>",),
    call_end="<|tool_response>",
    calls="gemma4",
    parser="gemma4",
    thoughts=("<|channel>thought\n", "\n<channel|>"),
)
LFM = Family(calls="pythonic", thoughts=("<think>", "</think>"), thoughts_key=None)
LFM_2_5 = replace(LFM, thoughts_key="thinking")
LLAMA = Family(
    end="<|eot_id|>", others=("<|eom_id|>",), tail="", calls="llama3", parser="llama3", thoughts_key=None
)
COHERE_2 = Family(
    end="<|END_RESPONSE|><|END_OF_TURN_TOKEN|>", eos="<|END_OF_TURN_TOKEN|>", tail="", thoughts_key=None
)
COHERE = Family(end="<|END_OF_TURN_TOKEN|>", tail="", thoughts_key=None)
GEMMA = Family(end="<end_of_turn>", thoughts_key=None)
PHI = Family(end="<|end|>", eos="<|endoftext|>", tail="\n<|endoftext|>", thoughts_key=None)
DEEPSEEK = Family(end="<｜end▁of▁sentence｜>", tail="", opens=True, thoughts_key=None, arguments_as_text=True)
THINKS = coder(opens=True)
FAMILIES = {
    "cohere": COHERE,
    "cohere2": COHERE_2,
    "deepseek_r1_distill": replace(DEEPSEEK, empty_as_null=True),
    "deepseekv3": DEEPSEEK,
    "deepseekv3_training": replace(DEEPSEEK, arguments_as_text=False),
    "diffusion_gemma": GEMMA_4,
    "gemma": GEMMA,
    "gemma3": GEMMA,
    "gemma4": GEMMA_4,
    "gemma4_v2": GEMMA_4,
    "gemma4_v3": GEMMA_4,
    "gemma4_v4": GEMMA_4,
    "gemma4_v5": GEMMA_4,
    "glm4moe": Family(end="", others=("<|user|>", "<|observation|>"), tail="", calls="glm", parser="glm45"),
    # The one that TRL trains with writes the beginning of the next message with the answer.
    "glm4moe_training": Family(
        end="<|user|>",
        others=("<|system|>",),
        call_end="<|observation|>",
        tail="",
        calls="glm",
        parser="glm45",
    ),
    "gptoss": Family(
        end="<|end|>",
        others=("<|return|>",),
        call_end="<|call|>",
        tail="",
        calls="harmony",
        parser="gpt_oss",
        thoughts=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
        thoughts_key="thinking",
    ),
    "lfm2": LFM,
    "lfm2_2_5": LFM_2_5,
    "lfm2_2_5_v2": LFM_2_5,
    "lfm2_2_5_vl": LFM_2_5,
    "lfm2_v2": LFM,
    "llama3": Family(end="<|eot_id|>", tail="", thoughts_key=None),
    "llama3_1": LLAMA,
    "llama3_2": LLAMA,
    "muse_glimmer": Family(end="<|eot|>", others=("<|eom|>",), tail="", calls="muse"),
    "nemotron_3_5_lightning": THINKS,
    "nemotron_3_nano": THINKS,
    "nemotron_3_super": THINKS,
    "nemotron_3_ultra": THINKS,
    "phi3": PHI,
    "phi3_5": PHI,
    "qwen2_5": hermes(thoughts_key=None),
    "qwen2_5_vl": PLAIN,
    "qwen3": hermes(),
    "qwen3_5_nothink": coder(),
    "qwen3_5_think": THINKS,
    "qwen3_6": THINKS,
    "qwen3_8": THINKS,
    "qwen3_instruct_2507": hermes(thoughts_key=None),
    "qwen3_vl": hermes(),
}
"""By the name of the file. Those that show no content that is text are not here."""
UNUSABLE = ("idefics3", "llava_next", "smolvlm")
"""They show content as a list of parts alone."""


def family(name):
    name = name.removeprefix(PREFIX)
    return FAMILIES[name] if name in FAMILIES else FAMILIES[name.removesuffix("_training")]


def text_of_template(name):
    return (FOLDER / f"{name.removeprefix(PREFIX)}.jinja").read_text()


def _json(value, pick):
    separators = pick.choice([None, (",", ":"), (", ", ":")])
    return json.dumps(value, ensure_ascii=pick.random() < 0.3, separators=separators)


def _hermes(calls, pick):
    return "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {_json(arguments, pick)}}}\n</tool_call>'
        for name, arguments in calls
    )


def _as_words(value, pick):
    return value if isinstance(value, str) else _json(value, pick)


def _coder(calls, pick):
    return "\n".join(
        f"<tool_call>\n<function={name}>\n"
        + "".join(
            f"<parameter={key}>\n{_as_words(value, pick)}\n</parameter>\n" for key, value in arguments.items()
        )
        + "</function>\n</tool_call>"
        for name, arguments in calls
    )


def _glm(calls, pick):
    line = pick.choice(["\n", "\n", ""])
    return "\n".join(
        f"<tool_call>{name}\n"
        + "".join(
            f"<arg_key>{key}</arg_key>{line}<arg_value>{_as_words(value, pick)}</arg_value>\n"
            for key, value in arguments.items()
        )
        + "</tool_call>"
        for name, arguments in calls
    )


def _llama3(calls, pick):
    tag = "<|python_tag|>" if pick.random() < 0.2 else ""
    made = [f'{{"name": "{name}", "parameters": {_json(arguments, pick)}}}' for name, arguments in calls]
    return tag + "; ".join(made)


def _gemma4(calls, pick):
    def shown(value):
        if isinstance(value, dict):
            return "{" + ",".join(f"{key}:{shown(one)}" for key, one in value.items()) + "}"
        if isinstance(value, list):
            return "[" + ",".join(map(shown, value)) + "]"
        return f'<|"|>{value}<|"|>' if isinstance(value, str) else json.dumps(value)

    return "".join(f"<|tool_call>call:{name}{shown(arguments)}<tool_call|>" for name, arguments in calls)


def _harmony(calls, pick):
    """One call, as the template has one an answer; it stands behind "<|start|>assistant"."""
    name, arguments = calls[0]
    ways = [
        f" to=functions.{name}<|channel|>commentary json<|message|>",
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>",
        f" to=functions.{name}<|channel|>commentary <|constrain|>json<|message|>",
    ]
    return pick.choice(ways) + _json(arguments, pick)


def _pythonic(calls, pick):
    def shown(value):
        return f"'{value}'" if isinstance(value, str) else json.dumps(value)

    made = [
        f"{name}({', '.join(f'{key}={shown(value)}' for key, value in arguments.items())})"
        for name, arguments in calls
    ]
    return f"<|tool_call_start|>[{', '.join(made)}]<|tool_call_end|>"


def _muse(calls, pick):
    return "<|eom|><|start|>assistant".join(
        f' to={name}<|message|><atem:function_calls>\n<atem:invoke name="{name}">\n'
        + "".join(
            f'<atem:parameter name="{key}">{_as_words(value, pick)}</atem:parameter>\n'
            for key, value in arguments.items()
        )
        + "</atem:invoke>\n</atem:function_calls>"
        for name, arguments in calls
    )


def _deepseek(calls, pick):
    made = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{_json(arguments, pick)}\n```"
        "<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{made}<｜tool▁calls▁end｜>"


CALLS = {
    "hermes": _hermes,
    "coder": _coder,
    "glm": _glm,
    "llama3": _llama3,
    "gemma4": _gemma4,
    "harmony": _harmony,
    "pythonic": _pythonic,
    "muse": _muse,
    "deepseek": _deepseek,
}
