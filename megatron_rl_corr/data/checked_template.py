"""The model's chat template, checked: a conversation of which it would leave something out is refused.

Templates pass over what they do not know without a word: a role, a message at a place, tools. So a
conversation is rendered once more with a mark in the place of each content, tool call and tool, and
each mark must show. The result depends on the roles and on what messages have beside their contents, so
it is kept for conversations that are alike in these. Where a content does not show as it is, it is
rendered with marks within. The thoughts of an assistant's earlier answer need not show: templates
shorten these on purpose.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_rl_corr.data import json_text
from megatron_rl_corr.data.messages import Arguments, Chat, Form, function_of, with_function
from megatron_rl_corr.data.tokenizer import Tokenizer

KEPT = 8192
"""Kinds of conversations of which it is kept what the template shows."""
LOOKED_AT = 1000
"""Kinds, from the first one on, in which keys are looked for that it does not show: as many as
rows at the start.
"""
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Keys of thoughts beside a content, which templates show for the last answer alone or not at all."""
_USUAL = {"role", "content", "tool_calls", "tool_call_id", *_THOUGHTS}
"""Keys of messages that may have no effect by their meaning, or that are looked at by themselves."""
_OF_SCHEMAS = {"type", "function", "name", "parameters", "properties", "required", "items", "strict"}
"""Keys of tools that say nothing to the model by themselves."""
_MARKED_ITEMS = 4
"""Items that are marked of a list in a call's arguments: a template shows all of them or none."""
_NUMBER = 7310
"""What numbers in the place of those of a call begin with."""
_CALL_IT = {"developer": "system", "function": "tool", "observation": "tool", "ipython": "tool"}
_PUT_INTO = {"system": "the first message of the user", "tool": "a message of the user"}


@dataclass(frozen=True)
class _Loss:
    """What a template leaves out: a tool, or a message's content or tool call."""

    message: int | None = None
    call: int | None = None
    tool: int | None = None
    is_part: bool = False
    """Only a part of the content, or what a tool is for and takes."""


@dataclass(frozen=True)
class _Finding:
    """What a template does with conversations of one kind."""

    form: Form | None
    """The one that it takes; None: it refuses marks in each."""
    losses: tuple[_Loss, ...] = ()
    shortened: frozenset[int] = frozenset()
    """Messages whose content it leaves out on purpose, since others follow."""


class CheckedTemplate:
    """Renders conversations in the form that the template takes; refuses those that it does not show whole.

    Args:
        tokenizer: with the template.
        variables: of the template.
    """

    def __init__(self, tokenizer: Tokenizer, variables: Mapping[str, Any]):
        self._tokenizer, self._variables = tokenizer, dict(variables)
        self._found: OrderedDict[bytes, _Finding] = OrderedDict()
        self._reads: dict[str, bool] = {}
        """By key of messages whether the template has shown it anywhere."""
        self._hidden: set[str] = set()
        """Keys of tools of which it has left out a text or a name."""

    @property
    def unread_keys(self) -> list[str]:
        """Keys of messages that have changed no text of the first LOOKED_AT kinds, but for those
        of every format.
        """
        return sorted(name for name, is_read in self._reads.items() if not is_read)

    @property
    def hidden_keys(self) -> list[str]:
        """Keys within tools of which a text or a name did not show, in the first LOOKED_AT kinds."""
        return sorted(self._hidden)

    def form(self, chat: Chat) -> Form | None:
        """The form of calls in which the template shows the most of conversations like this one; None:
        it refuses them.
        """
        return self._finding(chat).form

    def text(self, chat: Chat) -> str:
        """The conversation as text, up to where the assistant begins.

        Raises:
            ValueError: there is no template, it refuses the conversation, or leaves out a part of it.
        """
        found = self._finding(chat)
        if found.form is None:
            form, text = self._first_form(chat)
            losses = self._losses_one_by_one(chat, form, text)
        else:
            text = self._render(chat.in_form(found.form), chat.tools)
            losses = (
                found.losses
                or self._losses_within(chat, found.form, text, found.shortened)
                or _losses_of_texts(chat, found.form, text)
            )
        if losses:
            raise ValueError(f"the chat template leaves out {_named(losses[0], chat)}")
        return text

    def _render(self, messages: Sequence[Mapping[str, Any]], tools: list[dict[str, Any]] | None) -> str:
        return self._tokenizer.render(messages, tools=tools, **self._variables)

    def _finding(self, chat: Chat) -> _Finding:
        """What the template does with conversations that differ from this one in texts alone."""
        marked = _Marked(chat)
        kind = json_text.dumps([marked.chat.messages, marked.chat.tools])
        key = hashlib.blake2b(kind, digest_size=16).digest()
        if key in self._found:
            self._found.move_to_end(key)
            return self._found[key]
        found = _Finding(None)
        for form in chat.forms():
            tried = self._tried(marked, form)
            if tried is not None and (found.form is None or len(tried.losses) < len(found.losses)):
                found = tried
            if found.form is not None and not found.losses:
                break
        self._found[key] = found
        if found.form is not None and len(self._found) <= LOOKED_AT:
            self._look_for_unread_keys(chat, found.form)
        if len(self._found) > KEPT:
            self._found.popitem(last=False)
        return found

    def _look_for_unread_keys(self, chat: Chat, form: Form) -> None:
        messages, text = chat.in_form(form), None
        if chat.tools:
            text = self._render(messages, chat.tools)
            self._hidden |= _hidden(chat.tools, text)
        for name in sorted({name for one in messages for name in one} - _USUAL):
            if self._reads.get(name):
                continue
            without = [{key: value for key, value in one.items() if key != name} for one in messages]
            try:
                text = self._render(messages, chat.tools) if text is None else text
                self._reads[name] = self._render(without, chat.tools) != text
            except ValueError:
                self._reads[name] = True

    def _tried(self, marked: _Marked, form: Form) -> _Finding | None:
        """What the template does with it in one form; None: it refuses it."""
        messages = marked.chat.in_form(form)
        try:
            text = self._render(messages, marked.chat.tools)
        except ValueError:
            return None
        losses = marked.losses(text, form)
        incomplete = {loss.message for loss in losses if loss.call is not None or loss.tool is not None}
        shortened = frozenset(
            loss.message
            for loss in losses
            if loss.message not in incomplete
            and messages[loss.message].get("tool_calls")
            and self._shows_at_the_end(messages[: loss.message + 1], marked)
        )
        return _Finding(form, tuple(loss for loss in losses if loss.message not in shortened), shortened)

    def _shows_at_the_end(self, messages: list[dict[str, Any]], marked: _Marked) -> bool:
        """True if the last message's content shows while none follow, as thoughts before a tool call do."""
        try:
            return messages[-1]["content"] in self._render(messages, marked.chat.tools)
        except ValueError:
            return False

    def _first_form(self, chat: Chat) -> tuple[Form, str]:
        """(form, text) of the first form that the template takes. Raises ValueError where it takes none."""
        first = None
        for form in chat.forms():
            try:
                return form, self._render(chat.in_form(form), chat.tools)
            except ValueError as error:
                first = first or error
        raise first

    def _losses_within(self, chat: Chat, form: Form, text: str, shortened: frozenset[int]) -> list[_Loss]:
        """Contents that do not show as they are, nor all marks within them or most of their words."""
        hidden = [
            number
            for number, message in enumerate(chat.messages)
            if number not in shortened and not _shows(message, text)
        ]
        if not hidden:
            return []
        try:
            losses = self._losses_of(chat, form, hidden)
        except ValueError:
            losses = [loss for number in hidden for loss in self._losses_of_one(chat, form, number)]
        # Marks would not find a template that looks for this very content.
        return losses or [_Loss(number) for number in hidden if not _shows_words(chat.messages[number], text)]

    def _losses_of_one(self, chat: Chat, form: Form, number: int) -> list[_Loss]:
        try:
            return self._losses_of(chat, form, [number])
        except ValueError:  # it refuses marks: what is known is that the content does not show
            return [_Loss(number)]

    def _losses_of(self, chat: Chat, form: Form, numbers: Sequence[int]) -> list[_Loss]:
        messages, marks = chat.in_form(form), {}
        for number in numbers:
            content, marks[number] = _with_marks(chat.messages[number], number)
            messages[number] = {**messages[number], "content": content}
        text = self._render(messages, chat.tools)
        shown = {number: [mark in text for mark in own] for number, own in marks.items()}
        return [_Loss(number, is_part=any(own)) for number, own in shown.items() if not all(own)]

    def _losses_one_by_one(self, chat: Chat, form: Form, text: str) -> list[_Loss]:
        """Losses where the template refuses marks: names and texts must show as they are."""
        losses = self._losses_within(chat, form, text, frozenset())
        for number, message in enumerate(chat.messages):
            for place, call in enumerate(message.get("tool_calls") or []):
                function = function_of(call)
                words = _words([function.get("name"), function["arguments"]])
                if not all(word in text for word in words):
                    losses.append(_Loss(number, call=place))
        for place, tool in enumerate(chat.tools or []):
            if not all(word in text for word in _words([function_of(tool).get("name")])):
                losses.append(_Loss(tool=place))
        return losses


class _Marked:
    """A conversation with marks in the place of its contents, its tool calls and the names of its tools."""

    def __init__(self, chat: Chat):
        self._ids: dict[str, str] = {}
        """Id of a tool call -> what stands in its place, as ids differ from row to row."""
        self._shown: dict[tuple[int, int], list[str]] = {}
        """By message and call, the marks in its arguments."""
        self._numbers = 0
        """Numbers that are marks."""
        self._described: dict[int, list[str]] = {}
        """By tool, those in its description and as names of its parameters."""
        messages = [self._message(message, number) for number, message in enumerate(chat.messages)]
        tools = [self._tool(tool, number) for number, tool in enumerate(chat.tools or [])]
        self.chat = Chat(messages, tools or None)

    def losses(self, text: str, form: Form) -> list[_Loss]:
        """What the template has left out of the text that it made of it."""
        losses = []
        for number, message in enumerate(self.chat.messages):
            if message["content"].strip() and message["content"] not in text:
                losses.append(_Loss(number))
            losses += [
                _Loss(number, call=place)
                for place, call in enumerate(message.get("tool_calls") or [])
                if not self._shows_call(call, number, place, text, form)
            ]
        for place, described in self._described.items():
            named = _mark("tool", place) in text
            if not named or not all(mark in text for mark in described):
                losses.append(_Loss(tool=place, is_part=named))
        return losses

    def _message(self, message: Mapping[str, Any], number: int) -> dict[str, Any]:
        marked = dict(message)
        if message["content"].strip():
            marked["content"] = _mark("content", number)
        for name in _THOUGHTS:
            if isinstance(message.get(name), str) and message[name].strip():
                marked[name] = "thoughts"
        if message.get("tool_calls"):
            marked["tool_calls"] = [
                self._call(call, number, place) for place, call in enumerate(message["tool_calls"])
            ]
        if isinstance(message.get("tool_call_id"), str):
            marked["tool_call_id"] = self._id(message["tool_call_id"])
        return marked

    def _call(self, call: Mapping[str, Any], number: int, place: int) -> dict[str, Any]:
        function = function_of(call)
        self._shown[number, place] = shown = []
        arguments = self._value(dict(function["arguments"]), shown, number, place)
        changed: dict[str, Any] = {"arguments": Arguments(arguments)}
        marked, own_id = dict(call), call.get("id")
        if _has_name(function):
            changed["name"] = _mark("name", number, place)
        if isinstance(own_id, str):
            # A template that shows the id in the place of the name needs an id that has the name.
            if _has_name(function) and function["name"] in own_id:
                self._ids[own_id] = changed["name"]
            marked["id"] = self._id(own_id)
        return with_function(marked, **changed)

    def _value(self, value: Any, shown: list[str], *where: int) -> Any:
        """Arguments of the same types with marks as keys, texts and numbers, all of which are
        added to `shown`.
        """
        if isinstance(value, dict):
            made = {}
            for one in value.values():
                key = _mark("key", *where, len(shown))
                shown.append(key)
                made[key] = self._value(one, shown, *where)
            return made
        if isinstance(value, list):
            return [self._value(one, shown, *where) for one in value[:_MARKED_ITEMS]]
        if not value or value is True:  # a template that leaves these out does so with their keys
            return value
        if isinstance(value, str):
            shown.append(_mark("value", *where, len(shown)))
            return shown[-1]
        self._numbers += 1  # no other call has it
        shown.append(f"{_NUMBER}{self._numbers:04}")
        if isinstance(value, int):
            return int(shown[-1])
        shown[-1] += ".5"
        return float(shown[-1])

    def _id(self, own_id: str) -> str:
        """A number of as many characters."""
        return self._ids.setdefault(own_id, str(len(self._ids)).rjust(len(own_id), "0"))

    def _tool(self, tool: Mapping[str, Any], number: int) -> dict[str, Any]:
        function, mark = function_of(tool), _mark("tool", number)
        self._described[number] = shown = []
        if not _has_name(function):
            return {**tool, mark: mark}
        changed: dict[str, Any] = {"name": mark}
        if isinstance(function.get("description"), str) and function["description"].strip():
            shown.append(_mark("description", number))
            changed["description"] = shown[-1]
        parameters = function.get("parameters")
        if isinstance(parameters, dict) and isinstance(parameters.get("properties"), dict):
            names = {
                name: _mark("parameter", number, place) for place, name in enumerate(parameters["properties"])
            }
            shown += names.values()
            changed["parameters"] = parameters | {
                "properties": {names[name]: one for name, one in parameters["properties"].items()}
            }
            if isinstance(parameters.get("required"), list):
                changed["parameters"]["required"] = [
                    names.get(one, one) if isinstance(one, str) else one for one in parameters["required"]
                ]
        return with_function(tool, **changed)

    def _shows_call(self, call: Mapping[str, Any], number: int, place: int, text: str, form: Form) -> bool:
        function = function_of(call)
        if _has_name(function) and function["name"] not in text:
            return False
        if not function["arguments"]:
            return True
        if form.arguments_as_text:  # one that is made JSON again has other quotation marks
            return function["arguments"].as_text() in text
        is_python = repr(dict(function["arguments"])) in text  # not JSON
        return all(mark in text for mark in self._shown[number, place]) and not is_python


def _has_name(function: Mapping[str, Any]) -> bool:
    return isinstance(function.get("name"), str) and bool(function["name"])


def _mark(*what: str | int) -> str:
    """A word that no template has. Example: "markqcontentq3qz"."""
    return f"mark{''.join(f'q{one}' for one in what)}qz"


def _answer(message: Mapping[str, Any]) -> tuple[int, int]:
    """Begin and end of what must show of a content: the thoughts of an assistant need not."""
    content = message["content"]
    if message["role"] != "assistant":
        return 0, len(content)
    begin = content.rfind("</think>")
    return 0 if begin < 0 else begin + len("</think>"), len(content)


def _shows(message: Mapping[str, Any], text: str) -> bool:
    """True if the content is in the text, as it is or within JSON."""
    begin, end = _answer(message)
    return _is_in(message["content"][begin:end].strip(), text)


def _is_in(content: str, text: str) -> bool:
    in_json = [json.dumps(content, ensure_ascii=only_ascii)[1:-1] for only_ascii in (False, True)]
    return content in text or any(form in text for form in in_json)


def _show_lines(value: Any, text: str) -> bool:
    """True if all lines of the texts within a value, but for keys, are in the text."""
    return all(_is_in(line.strip(), text) for word in _words(value) for line in word.splitlines())


def _losses_of_texts(chat: Chat, form: Form, text: str) -> list[_Loss]:
    """Calls and tools of which a text shows in parts alone, as where a template cuts long ones."""
    losses = []
    for number, message in enumerate(chat.messages):
        for place, call in enumerate(message.get("tool_calls") or []):
            given = function_of(call)["arguments"]
            shows = (
                given.as_text().strip() in text if form.arguments_as_text else _show_lines(dict(given), text)
            )
            losses += [] if shows else [_Loss(number, call=place)]
    for place, tool in enumerate(chat.tools or []):
        if not _show_lines(function_of(tool).get("description"), text):
            losses.append(_Loss(tool=place, is_part=True))
    return losses


def _hidden(value: Any, text: str, name: str = "") -> set[str]:
    """Keys within tools of which a text does not show, or the name that they are of a parameter."""
    if isinstance(value, list):
        return set().union(*(_hidden(one, text, name) for one in value))
    if isinstance(value, dict):
        own = {key for key in value.keys() - _OF_SCHEMAS if key not in text}
        return ({name} if own and name == "properties" else own).union(
            *(_hidden(one, text, key) for key, one in value.items() if key not in own)
        )
    return set() if _show_lines(value, text) else {name} - _OF_SCHEMAS


def _shows_words(message: Mapping[str, Any], text: str) -> bool:
    """True if at least half of the words of the content are in the text."""
    begin, end = _answer(message)
    words = message["content"][begin:end].split()
    return 2 * sum(word in text for word in words) >= len(words)


def _with_marks(message: Mapping[str, Any], number: int) -> tuple[str, list[str]]:
    """(the content with marks within, the marks): at the end of an answer; at three places of other texts."""
    content, (begin, end) = message["content"], _answer(message)
    if message["role"] == "assistant":
        places = [begin + len(content[begin:end].rstrip())]
    else:  # not before or behind it: templates may look at how a content begins and ends
        lead = len(content) - len(content.lstrip())
        gaps = [lead + gap.start() for gap in re.finditer(r"\s+", content.strip())] or [len(content) // 2]
        places = sorted({gaps[0], gaps[len(gaps) // 2], gaps[-1]})
    marks = [_mark("within", number, place) for place in range(len(places))]
    for place, mark in sorted(zip(places, marks, strict=True), reverse=True):
        content = f"{content[:place]} {mark} {content[place:]}"
    return content, marks


def _words(value: Any) -> list[str]:
    """The texts within a value, but for keys."""
    if isinstance(value, dict):
        return _words(list(value.values()))
    if isinstance(value, list):
        return [word for one in value for word in _words(one)]
    return [value] if isinstance(value, str) else []


def _named(loss: _Loss, chat: Chat) -> str:
    """The name of what is left out, and the remedy."""
    if loss.tool is not None:
        name = function_of(chat.tools[loss.tool]).get("name")
        part = "the description or a parameter of " if loss.is_part else ""
        return (
            f'{part}tool {loss.tool}, whose name is "{name}"; use a template that shows it, or drop '
            "`tools_key`"
        )
    if loss.message < chat.added:
        return "the system message of `system_prompt`; put it into the first message of the user"
    message, role = chat.messages[loss.message], chat.messages[loss.message]["role"]
    named = f'message {loss.message - chat.added}, whose role is "{role}"'
    if loss.call is not None:
        call = message["tool_calls"][loss.call]
        name, remedy = function_of(call).get("name"), "use a template that shows it"
        if isinstance(call.get("id"), str) and str(name) not in call["id"]:
            remedy += f", or one that shows its id and ids such as functions.{name}:0"
        if message["content"].strip():
            remedy += ", or drop the text beside it"
        return f'tool call {loss.call} ("{name}") of {named}; {remedy}'
    if loss.is_part:
        return f"a part of {named}; use a template that shows it as a whole"
    if role in _CALL_IT:
        return f'{named}; call it "{_CALL_IT[role]}"'
    if message.get("tool_calls"):
        return f"the text beside the tool calls of {named}; drop it, or use a template that shows it"
    if role in _PUT_INTO:
        return f"{named}; put its text into {_PUT_INTO[role]}, or use a template that shows it"
    remedy = "use a template that shows it"
    return f"{named}; {remedy}" if role in ("user", "assistant") else f'{named}; call it "user", or {remedy}'
