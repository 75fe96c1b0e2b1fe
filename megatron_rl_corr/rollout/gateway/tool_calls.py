"""Reads the tool calls in an answer's text, in the formats that chat templates teach.

An answer with a malformed call has no calls (arguments nested too deeply and numbers beyond a float are
malformed too): all of its text is content, and nothing that the policy left
unfinished is carried out. Functions that the request does not list are called all the same, so that the
harness can say that there are none, as vLLM does and SGLang with SGLANG_FORWARD_UNKNOWN_TOOLS. Content stands
before the first call, without the space around it; where there is no call it is the text as it stands.

Policies in training repeat themselves: the time that a text takes grows as its length does, whatever it is.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from megatron_rl_corr.rollout.gateway.calls import (
    SPACE,
    MalformedCall,
    SampledCall,
    Tools,
    dumps,
    finite_json,
    first_json,
    is_nested,
    loads,
)
from megatron_rl_corr.rollout.gateway.gemma_calls import GEMMA_CALL, read_gemma4
from megatron_rl_corr.rollout.gateway.harmony import read_harmony

MOST_NESTED = 100
"""Arrays and objects of a call's arguments within each other: the harness sends them back within a body, and
what walks through that must come to an end.
"""


@dataclass(frozen=True)
class ToolFormat:
    """How a family of models writes tool calls. Example: TOOL_FORMATS["hermes"]."""

    marker: str
    """Stands in every answer that has a call."""
    in_template: tuple[str, ...]
    """All of these stand in the chat templates of such models."""
    read: Callable[[str, Tools], tuple[str, list[SampledCall]]] = field(repr=False)
    """text, tools -> content, calls; raises MalformedCall."""
    id_prefix: str = "call_"
    id_digits: int = 24
    end: str | None = None
    """Ends a call, and `read` takes one without; None: calls show their end, or are malformed without."""
    before_arguments: str | None = None
    """A call without arguments ends behind it, as may an answer that was cut. None: calls show their end."""


def parse_tool_calls(
    name: str, text: str, tools: Tools, *, turn: str, cut: str | None = None
) -> tuple[str, list[dict[str, Any]]]:
    """(content, tool calls as in OpenAI's chat completions) of an answer.

    Args:
        name: of the format, a key of TOOL_FORMATS.
        text: the answer, special tokens included but for the one that ends the turn.
        tools: of the request; parameters that are written as plain text get the types that these name.
        turn: names the answer within its episode. The ids of calls are made of it, so that they are unique
            there, and the same again where the run is repeated: some templates write them into the prompt.
        cut: what ended the answer, length or stop (a text); None: a control token did. The last call of one
            that its length has cut must have its end.
    """
    form = TOOL_FORMATS[name]
    if form.marker not in text:
        return text, []
    if cut == "length" and form.end is not None and form.end not in text.rpartition(form.marker)[2]:
        return text, []
    if cut and form.before_arguments is not None and text.rstrip().endswith(form.before_arguments):
        return text, []
    try:
        content, calls = form.read(text, tools)
        for call in calls:
            arguments = json.loads(call.arguments)
            if is_nested(arguments, MOST_NESTED):
                raise MalformedCall("too deep")
            # Half of a character, as \ud83d in JSON, has no UTF-8, and 1e400 is no number of JSON's readers.
            json.dumps([call.name, arguments], ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):  # JSON may be too deep to be read
        return text, []
    if not calls:
        return text, []
    digest = hashlib.sha256(turn.encode()).hexdigest()
    made = [
        {
            "id": call.id or f"{form.id_prefix}{_digits(digest, index, form.id_digits)}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for index, call in enumerate(calls)
    ]
    return content.strip(), made


def detect(chat_template: str) -> str | None:
    """The format that a chat template teaches, by the words that it writes around calls; None: unknown."""
    return next(
        (
            name
            for name, form in TOOL_FORMATS.items()
            if all(word in chat_template for word in form.in_template)
        ),
        None,
    )


def split_thoughts(
    text: str, *, begun: bool = False, begin: str = "<think>", end: str = "</think>"
) -> tuple[str, str]:
    """(thoughts, rest) of an answer, both as they were sampled, with the space around them.

    Thoughts without an end are all thoughts. An answer without thoughts is returned as it stands.

    Args:
        begun: the prompt ends with `begin`, as some templates write it.
    """
    head = text.lstrip()
    if head.startswith(begin):
        head = head.removeprefix(begin)
    elif not begun:
        return "", text
    thoughts, _, rest = head.partition(end)
    return thoughts, rest


def _digits(digest: str, index: int, count: int) -> str:
    return hashlib.sha256(f"{digest}{index}".encode()).hexdigest()[:count]


def _called(call: Any) -> SampledCall:
    """{"name": ..., "arguments" or "parameters": ...}; without arguments: {}, as SGLang reads it."""
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        raise MalformedCall("a call is an object with a name")
    return SampledCall(call["name"], dumps(call.get("parameters") or call.get("arguments", {})))


def _hermes(text: str, tools: Tools) -> tuple[str, list[SampledCall]]:
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>: Hermes, Qwen2.5, Qwen3.

    The last end may be missing where the answer has ended. An array is as many calls (SGLang; vLLM takes it
    for malformed). SGLang's parser qwen25 leaves out what is malformed, and wants a line break beside each
    tag.
    """
    content = text.partition("<tool_call>")[0]
    calls = []
    for block in re.findall(r"<tool_call>(.*?)(?:</tool_call>|\Z)", text, re.DOTALL):
        made = loads(block)
        calls += map(_called, made if isinstance(made, list) else [made])
    return content, calls


def _qwen3_coder(text: str, tools: Tools) -> tuple[str, list[SampledCall]]:
    """<tool_call><function=name><parameter=key>value</parameter></function></tool_call>: Qwen3-Coder.

    A function without an end is malformed; both servers take what there is of it, and would carry out half a
    command.
    """
    content, calls = text[: re.search(r"<tool_call>|<function=", text).start()], []
    for function in _spans(text, "<function=", "</function>"):
        name, named, body = function.partition(">")
        if not named or re.search(r"[<\n]", name):
            raise MalformedCall("a function has no name")
        types, arguments = _properties(tools, name), {}
        for key, value in re.findall(
            r"<parameter=([^<>]*)>(.*?)(?:</parameter>|(?=<parameter=)|\Z)", body, re.DOTALL
        ):
            value = value.removeprefix("\n").removesuffix("\n")
            arguments[key] = _typed(value, types.get(key))
        calls.append(SampledCall(name, dumps(arguments)))
    return content, calls


def _glm(text: str, tools: Tools) -> tuple[str, list[SampledCall]]:
    """<tool_call>name <arg_key>key</arg_key><arg_value>value</arg_value></tool_call>: GLM-4.5, 4.6, 4.7.

    A value without a schema is JSON where it can be read so, as in SGLang; vLLM leaves out functions that the
    request does not list.
    """
    calls = []
    for block in _spans(text, "<tool_call>", "</tool_call>"):
        name = re.split(r"\n|\\n|<arg_key>", block.lstrip(), maxsplit=1)[0].strip()
        if not name:
            raise MalformedCall("a call has no name")
        types, arguments = _properties(tools, name), {}
        for key, value in _glm_pairs(block):
            arguments[key] = _typed(value, types.get(key, {"type": "object"}))
        calls.append(SampledCall(name, dumps(arguments)))
    return text.partition("<tool_call>")[0], calls


def _glm_pairs(block: str) -> Iterator[tuple[str, str]]:
    """Keys that a value follows."""
    at = 0
    while (begin := block.find("<arg_key>", at)) >= 0 and (end := block.find("</arg_key>", begin)) >= 0:
        at = end + len("</arg_key>")
        value = re.compile(r"(?:\\n|\s)*<arg_value>").match(block, at)
        if value is None:
            continue
        if (close := block.find("</arg_value>", value.end())) < 0:
            return
        yield block[begin + len("<arg_key>") : end].strip(), block[value.end() : close]
        at = close + len("</arg_value>")


def _llama3(text: str, tools: Tools) -> tuple[str, list[SampledCall]]:
    """{"name": ..., "parameters": {...}}, also after <|python_tag|>; several with ";" between: Llama 3.

    Only an answer that begins so has calls, as in SGLang; vLLM looks for objects anywhere. What follows the
    last call is content.
    """
    before, tag, rest = text.partition("<|python_tag|>")
    if not tag:
        before, rest = "", text
    calls, at = [], SPACE.match(rest).end()
    while rest.startswith("{", at):
        made, at = first_json(rest, at)
        calls.append(_called(made))
        at = SPACE.match(rest, at).end()
        at = SPACE.match(rest, at + rest.startswith(";", at)).end()
    return before + rest[at:], calls


def _mistral(text: str, tools: Tools) -> tuple[str, list[SampledCall]]:
    """[TOOL_CALLS] [{"name": ..., "arguments": {...}}], or [TOOL_CALLS]name[ARGS]{...} of later models.

    Text behind an array is content too, as in SGLang; behind the later form it is malformed.
    """
    content, _, rest = text.partition("[TOOL_CALLS]")
    if rest.lstrip().startswith("["):
        made, end = first_json(rest.lstrip(), 0)
        return f"{content.strip()} {rest.lstrip()[end:].strip()}", [_called(call) for call in made]
    calls = []
    for part in rest.split("[TOOL_CALLS]"):
        name, arguments_follow, arguments = part.partition("[ARGS]")
        if not arguments_follow:  # the latest templates leave [ARGS] out
            name, brace, arguments = part.partition("{")
            arguments = brace + arguments
        name = re.sub(r"\[CALL_ID\].*", "", name).strip()
        if not name or not isinstance(made := loads(arguments), dict):
            raise MalformedCall("a call is a name and an object")
        calls.append(SampledCall(name, dumps(made)))
    return content, calls


_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")


def _deepseek_v3(text: str, tools: Tools) -> tuple[str, list[SampledCall]]:
    """begin function sep name, then the arguments between ```json and ```: DeepSeek-V3 and R1.

    Arguments over several lines are read, and are written anew (SGLang); vLLM hands on what it finds.
    """
    begin, call, sep, end = _DEEPSEEK
    calls = []
    for body in _spans(text.partition(begin)[2], call, end):
        name, fence, arguments = body.partition(sep)[2].partition("\n```json\n")
        arguments, closed, behind = arguments.rpartition("\n```")
        if not fence or not closed or behind.strip():
            raise MalformedCall("not a name and ```json")
        calls.append(SampledCall(name, dumps(loads(arguments))))
    return text.partition(begin)[0], calls


def _deepseek_v31(text: str, tools: Tools) -> tuple[str, list[SampledCall]]:
    """begin name sep arguments: DeepSeek-V3.1."""
    begin, call, sep, end = _DEEPSEEK
    calls = []
    for body in _spans(text.partition(begin)[2], call, end):
        name, _, arguments = body.partition(sep)
        if not name.strip():
            raise MalformedCall("a call has no name")
        calls.append(SampledCall(name.strip(), dumps(loads(arguments))))
    return text.partition(begin)[0], calls


def _kimi_k2(text: str, tools: Tools) -> tuple[str, list[SampledCall]]:
    """Calls with ids such as functions.name:0, which the template writes again, and arguments: Kimi-K2.

    Arguments stay as they were sampled. A call without a name in its id is malformed.
    """
    begin = "<|tool_calls_section_begin|>"
    calls = []
    for body in _spans(text.partition(begin)[2], "<|tool_call_begin|>", "<|tool_call_end|>"):
        label, _, arguments = body.partition("<|tool_call_argument_begin|>")
        found = re.fullmatch(r"(?:functions\.)?([\w.\-]+):\d+", label.strip())
        if found is None or not isinstance(loads(arguments), dict):
            raise MalformedCall("a call is an id and an object")
        calls.append(SampledCall(found[1], arguments.strip(), id=label.strip()))
    if len({call.id for call in calls}) < len(calls):
        raise MalformedCall("two calls have one id")
    return text.partition(begin)[0], calls


def _spans(text: str, begin: str, end: str) -> Iterator[str]:
    """The texts from each begin to the next end."""
    at = 0
    while (at := text.find(begin, at)) >= 0:
        at += len(begin)
        if (close := text.find(end, at)) < 0:
            raise MalformedCall("a call has no end")
        yield text[at:close]
        at = close + len(end)


def _properties(tools: Tools, name: str) -> dict[str, Any]:
    """Schemas of a function's parameters by name."""
    for tool in tools or ():
        function = tool.get("function", {})
        if function.get("name") == name:
            return _merged_properties(function.get("parameters"))
    return {}


def _merged_properties(schema: Any) -> dict[str, Any]:
    if not isinstance(schema, dict):
        return {}
    if isinstance(schema.get("properties"), dict):
        return schema["properties"]
    found: dict[str, Any] = {}
    for word in ("anyOf", "oneOf", "allOf"):
        for branch in schema.get(word) or ():
            found = _merged_properties(branch) | found
    return found


def _typed(text: str, schema: Any) -> Any:
    """The value that a text stands for, by its schema: the first that fits of null, integer, number, boolean,
    object, array and text. Without a schema it is text.
    """
    types = _types(schema)
    if "null" in types and text.lower() == "null":
        return None
    for convert in (_CONVERT[kind] for kind in _CONVERT if kind in types):
        try:
            return convert(text)
        except ValueError:
            continue
    return text


def _types(schema: Any) -> set[str]:
    if not isinstance(schema, dict):
        return set()
    if kind := schema.get("type"):
        return {kind} if isinstance(kind, str) else set(kind)
    if isinstance(values := schema.get("enum"), list):
        return set(itertools.chain(*(_KINDS.get(type(value), ()) for value in values)))
    found = set()
    for word in ("anyOf", "oneOf", "allOf"):
        for branch in schema.get(word) or ():
            found |= _types(branch)
    return found or ({"object"} if "properties" in schema else {"array"} if "items" in schema else set())


_KINDS = {
    type(None): ("null",),
    bool: ("boolean",),
    int: ("integer",),
    float: ("number",),
    list: ("array",),
    dict: ("object",),
    str: ("string",),
}


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return int(value) if value.is_integer() else value


def _boolean(text: str) -> bool:
    word = text.lower().strip()
    if word not in ("true", "1", "false", "0"):
        raise ValueError(text)
    return word in ("true", "1")


_CONVERT: dict[str, Callable[[str], Any]] = {
    "integer": int,
    "number": _number,
    "boolean": _boolean,
    "object": finite_json,
    "array": finite_json,
    "string": str,
}


TOOL_FORMATS = {
    "gpt_oss": ToolFormat(
        "to=", ("<|channel|>analysis<|message|>",), read_harmony, before_arguments="<|message|>"
    ),
    "gemma4": ToolFormat(GEMMA_CALL, ("<|tool_call>call:",), read_gemma4),
    "kimi_k2": ToolFormat("<|tool_calls_section_begin|>", ("<|tool_calls_section_begin|>",), _kimi_k2),
    "deepseek_v3": ToolFormat(_DEEPSEEK[0], (_DEEPSEEK[0], "```json"), _deepseek_v3),
    "deepseek_v31": ToolFormat(_DEEPSEEK[0], (_DEEPSEEK[0],), _deepseek_v31),
    "glm45": ToolFormat("<tool_call>", ("<arg_key>",), _glm),
    "qwen3_coder": ToolFormat("<function=", ("<function=", "<parameter="), _qwen3_coder),
    "hermes": ToolFormat("<tool_call>", ("<tool_call>", "</tool_call>"), _hermes, end="</tool_call>"),
    # Its templates refuse ids of another length.
    "mistral": ToolFormat("[TOOL_CALLS]", ("[TOOL_CALLS]",), _mistral, id_prefix="", id_digits=9),
    "llama3": ToolFormat("{", ('"parameters": dictionary of argument name',), _llama3),
}
"""In the order in which `detect` asks: the first that fits is taken."""
