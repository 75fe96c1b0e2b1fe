"""Conversations as text and ids, by the checkpoint's own chat template.

A text here is *shielded*: where a message or a tool spells a control token (`<|im_end|>` in a tool's result,
say), two halves of characters stand for the spelling, so that the template's own control tokens can be told
from those that somebody wrote: no text has such halves, whatever a policy samples. Spellings become the ids
of their characters, never the control token. Servers that tokenise a rendered conversation make control
tokens of both. Where nobody spells one, the ids are the same as theirs. Spellings in the assistant's own
messages are left as they are: the policy may have sampled the token itself.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import orjson
import torch
from torch import Tensor

from megatron_rl_corr.config.prompts import RESERVED
from megatron_rl_corr.data import json_text
from megatron_rl_corr.data.checked_template import CheckedTemplate
from megatron_rl_corr.data.messages import Arguments, Chat, Form
from megatron_rl_corr.data.tokenizer import Tokenizer

LONG_TEXT = 16_384
"""Characters; a text beyond is tokenised in a thread, as it would keep the event loop for 10 ms and more."""
FIRST_HALF, HALVES = 0xDC00, 0x400
"""Second halves of characters. Two of them are no character, and stand for a spelling of a control token."""
KEPT_PROMPTS = 64
"""First prompts whose ids are kept: a group's episodes begin with the same."""
KEPT_TOOLS = 64
"""Lists of tools whose form is kept."""
_MARK = "qmarkq"
_THOUGHTS_KEYS = ("reasoning_content", "reasoning", "thinking")
_SHOWN_KEYS = ("name", "tool_call_id", "reasoning_content")


@dataclass(frozen=True)
class Message:
    """A message of a request, in the forms that are needed."""

    plain: dict[str, Any]
    """With the keys of `ChatRequest.messages` alone, content as text."""
    key: bytes
    """Equal for messages that are the same history: of one role, content, thoughts and calls. Not in it: the
    ids of calls, names of speakers and keys that no template knows. Content None is "", text parts are one
    text, and the arguments of calls are compared as JSON values; white space is not forgiven.
    """
    shown: dict[str, Any]
    """As the template gets it."""
    literal: dict[str, Any] | None
    """As `shown`, not shielded; None: they are the same."""


@dataclass(frozen=True)
class Continuation:
    """What the template writes from an answer on."""

    answer: str
    """The answer as the template renders it, without the end of the turn."""
    glue: str
    """What is behind the sampled ids, up to where the assistant begins again."""
    full: str
    """The whole conversation."""


class Templates:
    """The chat template of a run's checkpoint, for all of its episodes.

    Args:
        tokenizer: of the checkpoint, with a template.
        variables: of the template, by name; a request may bring others.

    Raises:
        ValueError: there is no template, or it does not show what the assistant says.
    """

    def __init__(self, tokenizer: Tokenizer, variables: Mapping[str, Any] | None = None):
        self.tokenizer, self._variables = tokenizer, dict(variables or {})
        self._prompts: OrderedDict[bytes, asyncio.Task[tuple[str, Tensor]]] = OrderedDict()
        self._tools: dict[bytes, list[dict[str, Any]]] = {}
        self._token_texts: dict[int, str] = {}
        self._checked: set[tuple] = set()
        self._spellings = sorted(tokenizer.control_tokens, key=lambda one: (-len(one), one))
        self._spelled = re.compile("|".join(map(re.escape, self._spellings)) or r"(?!)")
        self._last_control = re.compile(f"({self._spelled.pattern})\\s*\\Z")
        self._shield_of = {text: _shield(number) for number, text in enumerate(self._spellings)}
        self._shields = re.compile("[\udc00-\udfff]{2}")
        self._text_of_shield = {shield: text for text, shield in self._shield_of.items()}
        self._last_suffix = self._behind_an_answer()
        """What the template writes behind the assistant's last message."""
        self.end = self._end_of_turn()
        """What ends the assistant's turn where others follow, up to its last control token; "": nothing
        does.
        """

    @property
    def end_id(self) -> int | None:
        """The control token that ends the assistant's last turn; None where there is none."""
        found = self._spelled.search(self._last_suffix)
        return self.tokenizer.control_tokens[found[0]] if found else None

    @cached_property
    def variables(self) -> set[str]:
        """The names of the variables that the template uses."""
        return self.tokenizer.variables_used(with_tools=False)

    # messages

    def message(self, given: Mapping[str, Any]) -> Message:
        """A message in its forms.

        Raises:
            ValueError: it is no message of text.
        """
        role, calls = given.get("role"), given.get("tool_calls") or []
        if not isinstance(role, str):
            raise ValueError(f"a message must have a role, got {str(given)[:100]}")
        plain = {"role": role, "content": _text(given.get("content"))}
        plain |= {name: given[name] for name in _SHOWN_KEYS if given.get(name)}
        if calls:
            plain["tool_calls"] = [_call(one) for one in calls]
        said = [role, plain["content"], plain.get("reasoning_content", "")]
        functions = [one["function"] for one in plain.get("tool_calls", ())]
        said += [[one["name"], _value(one["arguments"])] for one in functions]
        key = json.dumps(said, sort_keys=True).encode()
        literal = self._in_form(plain)
        _check_whole(literal)
        shown = literal if role == "assistant" else self._shielded(literal)
        key = hashlib.blake2b(key, digest_size=16).digest()
        return Message(plain, key, shown, None if shown == literal else literal)

    def _in_form(self, plain: Mapping[str, Any]) -> dict[str, Any]:
        """The message as the template takes it."""
        made = dict(plain)
        if "reasoning_content" in made:
            made[self._thoughts_key] = made.pop("reasoning_content")
        if plain["role"] == "developer" and self._developer_is_system:
            made["role"] = "system"
        if "tool_call_id" in made and self._ids_are_short:
            made["tool_call_id"] = _short(made["tool_call_id"])
        if "tool_calls" not in made:
            return made
        chat = Chat([{**made, "tool_calls": [self._argued(one) for one in made["tool_calls"]]}])
        (shown,) = chat.in_form(self._form)
        return shown

    def _argued(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function, number = call["function"], call.get("id")
        text = function["arguments"]
        value = _value(text)
        arguments: Any = text
        if isinstance(value, dict):
            arguments = Arguments(json_text.loads(text or "{}", unique_keys=False))
            arguments.text = text
        elif self._form.arguments_as_text:
            arguments = Arguments()
            arguments.text = text
        made = {**call, "function": {**function, "arguments": arguments}}
        if number is not None and self._ids_are_short:
            made["id"] = _short(number)
        return made

    @cached_property
    def _form(self) -> Form:
        """The one that the template takes of calls, found once: conversations differ in no more."""
        return (
            CheckedTemplate(self.tokenizer, self._variables).form(
                Chat(_called("call12345", Arguments(a="b")))
            )
            or Form()
        )

    @cached_property
    def _ids_are_short(self) -> bool:
        """True if the template takes ids of calls of nine letters or digits alone, as Mistral's do: others
        get such ones by their hash.
        """
        chat = Chat(_called("call_0123456789abcdef", Arguments(a="b")))
        return self._refuses(chat.in_form(self._form)) and not self._refuses(
            Chat(_called("call12345", Arguments(a="b"))).in_form(self._form)
        )

    @cached_property
    def _thoughts_key(self) -> str:
        """The key by which the template shows the thoughts of an answer."""
        for key in _THOUGHTS_KEYS:
            for more in ({}, {"tool_calls": _called("call12345", Arguments(a="b"))[1]["tool_calls"]}):
                chat = Chat([_said("user", "a"), {**_said("assistant", ""), key: _MARK, **more}])
                try:
                    text = self._render_shown(
                        chat.in_form(self._form) if more else chat.messages, None, {}, asks=False
                    )
                except ValueError:
                    continue
                if _MARK in text:
                    return key
        return _THOUGHTS_KEYS[0]

    @cached_property
    def _developer_is_system(self) -> bool:
        """True if the template leaves out or refuses what a developer says, and shows a system message."""
        shows = []
        for role in ("developer", "system"):
            try:
                shows.append(_MARK in self._render_shown([_said(role, _MARK), _said("user", "a")], None, {}))
            except ValueError:
                shows.append(False)
        return shows == [False, True]

    def _refuses(self, messages: Sequence[Mapping[str, Any]]) -> bool:
        try:
            self._render_shown(messages, None, {})
        except ValueError:
            return True
        return False

    # rendering

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
        *,
        asks: bool,
    ) -> str:
        """The conversation as shielded text.

        Args:
            messages: of the conversation.
            tools: shown by the template; None: none.
            variables: of the template, beside the run's.
            asks: up to where the assistant begins to answer; False: up to the last message's end.

        Raises:
            ValueError: the template refuses it, does not show tools, or has no use for a variable; or a
                variable spells a control token, or a message does where the template acts on it.
        """
        self._check_variables(variables, bool(tools))
        shown_tools = self._shielded_tools(tools) if tools else None
        text = self._render_shown([one.shown for one in messages], shown_tools, variables, asks=asks)
        if shown_tools != tools or any(one.literal is not None for one in messages):
            literal = [one.shown if one.literal is None else one.literal for one in messages]
            if self.spelled_out(text) != self._render_shown(literal, tools, variables, asks=asks):
                raise ValueError(
                    "a message spells a control token of the model, and the chat template acts on it, so it "
                    "can't be told from the template's own; leave it out of the message"
                )
        return text

    async def first(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
    ) -> tuple[str, Tensor]:
        """(text, ids) of a conversation up to where the assistant begins to answer; made once, and kept,
        where it has not said anything yet.

        Raises:
            ValueError: as `render`, or the template leaves out a message.
        """
        what = [[one.plain for one in messages], tools, dict(variables)]
        key = digest(what)
        making = self._prompts.get(key)
        if making is None:
            making = asyncio.ensure_future(self._made_first(messages, tools, variables))
            if all(one.plain["role"] != "assistant" for one in messages):
                self._prompts[key] = making
                if len(self._prompts) > KEPT_PROMPTS:
                    self._prompts.popitem(last=False)
        else:
            self._prompts.move_to_end(key)
        try:
            return await asyncio.shield(making)  # others may wait for it too
        except ValueError:
            self._prompts.pop(key, None)
            raise

    async def _made_first(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
    ) -> tuple[str, Tensor]:
        text = self.render(messages, tools, variables, asks=True)
        check_shown(messages, text)
        return text, await ids_of(self.encode, text)

    def continuation(
        self,
        messages: Sequence[Message],
        history: int,
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
        *,
        follows: Callable[[str], int | None],
        text: str,
        ended: str | None,
    ) -> Continuation | None:
        """What follows an answer that was sampled; None: the template writes the history another way now.

        F is the conversation with the assistant's beginning. It must begin with the text that the answer was
        sampled behind. If the answer stands there as it was sampled, the glue is what F has behind it. Else
        the template writes the answer another way (other JSON spacing, say); then P, the history alone, tells
        where it ends, and F must begin with P up to there. Behind it P may end as only a whole conversation
        does.

        The template's end of the turn is left out of the glue where the answer ended with a control token,
        whichever: that stands in its place. In a template without one the next message's beginning ends
        a turn, and the glue begins behind what was sampled of it.

        Args:
            messages: of the request.
            history: how many of them were there with the answer, which is the last of these.
            tools, variables: of the request.
            follows: follows(F) -> how long the text was that the answer was sampled behind; None: F does not
                begin with it.
            text: the answer as it was sampled, without the control token at its end.
            ended: the text of that token; None: the answer was cut.

        Raises:
            ValueError: as `render`, or the template leaves out a message.
        """
        full = self.render(messages, tools, variables, asks=True)
        begin = follows(full)
        if begin is None:
            return None
        behind = full[begin:]
        ends = [""] if ended is None else [ended, self.end] if self.end else [ended]
        end = next((one for one in ends if behind.startswith(text + one)), None)
        if end is not None:
            shown, glue = text, behind[len(text) + len(end) :]
        else:
            before = self.render(messages[:history], tools, variables, asks=False)
            at, end = self._answer_end(before, begin)
            if at < begin or not full.startswith(before[:at]):
                return None
            shown, glue = self.spelled_out(full[begin:at]), full[at:]
            if ended is not None:
                glue = glue.removeprefix(ended if glue.startswith(ended) else end)
        check_shown(messages[history:], glue)
        return Continuation(shown, glue, full)

    def _answer_end(self, text: str, begin: int) -> tuple[int, str]:
        """(where the answer ends that a conversation's text ends with, what ends its turn in a longer
        conversation).
        """
        if text.endswith(self._last_suffix):
            return len(text) - len(self._last_suffix), self.end
        found = self._last_control.search(text, begin)  # calls may end in another way than words
        return (found.start(), found[1]) if found else (len(text), "")

    # ids

    def encode(self, text: str) -> list[int]:
        """The ids of a shielded text that begins a prompt, without any that the tokenizer would add."""
        if not self._shields.search(text):
            return self.tokenizer.encode(text, special_tokens=False)
        ids, at = [], 0
        for found in [*self._spelled.finditer(text), None]:
            piece = text[at : found.start() if found else len(text)]
            if piece:
                ids += self.tokenizer.encode_as_text(self.spelled_out(piece))
            if found:
                ids.append(self.tokenizer.control_tokens[found[0]])
                at = found.end()
        return ids

    def encode_behind(self, text: str, ended: str | None) -> list[int]:
        """The ids of a shielded text that goes on behind sampled ids.

        Some tokenizers begin a text with a blank, or leave out what stands behind a control token: so
        it is tokenised behind the control token that was sampled, or behind another one.

        Args:
            text: what the template has written, or a raw request.
            ended: the control token's text; None: it follows another token.
        """
        before = ended or self._neutral
        if before is None or self._shields.search(text):
            return self.encode(text)
        return self.tokenizer.encode(before + text, special_tokens=False)[1:]

    @cached_property
    def _neutral(self) -> str | None:
        """A control token behind which a text is as it is within another; None: there is none."""
        for one in self._spellings:
            if len(self.tokenizer.encode(f"{one} ", special_tokens=False)) > 1:
                return one
        return None

    def encode_raw(self, text: str) -> list[int]:
        """The ids of a text that is no conversation, with the token that texts begin with, once: as servers
        do with raw prompts. What spells a control token is one.
        """
        ids = self.tokenizer.encode(text, special_tokens=False)
        bos = self.tokenizer.bos_id
        begins = bos is not None and self.tokenizer.encode("")[:1] == [bos]
        return [bos, *ids] if begins and ids[:1] != [bos] else ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, control tokens spelled out."""
        return self.tokenizer.decode_all(ids)

    def control_text(self, token: int) -> str | None:
        """The spelling of a control token; None: it is another token."""
        return self._control_texts.get(token)

    @cached_property
    def _control_texts(self) -> dict[int, str]:
        return {number: text for text, number in self.tokenizer.control_tokens.items()}

    def pieces(self, text: str) -> list[str]:
        """A shielded text without the template's control tokens, cut at each of them."""
        return self._spelled.split(text)

    @cached_property
    def control_ids(self) -> Tensor:
        """The ids of control tokens, int64."""
        return torch.tensor(sorted(self.tokenizer.control_tokens.values()), dtype=torch.int64)

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """R texts that make up the ids' text. A character of several tokens is the text of its last."""
        whole, known = self.decode(ids), self._token_texts
        for token in set(ids):
            if token not in known:
                known[token] = self.decode([token])
        texts = [known[token] for token in ids]
        return texts if "".join(texts) == whole else self._texts_one_by_one(ids, whole)

    def _texts_one_by_one(self, ids: Sequence[int], whole: str) -> list[str]:
        texts, begin, read, said = [], 0, 0, 0
        for count in range(1, len(ids) + 1):
            before, now = self.decode(ids[begin:read]), self.decode(ids[begin:count])
            new = now[len(before) :]
            if count == len(ids):
                new = whole[said:]
            elif now.endswith("\ufffd"):
                new = ""
            else:
                begin, read = read, count
            texts.append(new)
            said += len(new)
        return texts

    def spelled_out(self, text: str) -> str:
        """A shielded text as the template has written it."""
        return self._shields.sub(lambda found: self._text_of_shield[found[0]], text)

    # internals

    def _shielded(self, value: Any) -> Any:
        """The value with shields in its texts."""
        if isinstance(value, str):
            return self._spelled.sub(lambda found: self._shield_of[found[0]], value)
        if isinstance(value, Arguments):
            return value  # of the assistant's calls
        if isinstance(value, dict):
            return {self._shielded(name): self._shielded(one) for name, one in value.items()}
        return [self._shielded(one) for one in value] if isinstance(value, list) else value

    def _shielded_tools(self, tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The tools in the form in which they are shown, kept: all requests have them, in all episodes."""
        key = digest(tools)
        if key not in self._tools:
            _check_whole(tools)
            self._tools[key] = [self._shielded(dict(one)) for one in tools]
            if len(self._tools) > KEPT_TOOLS:
                self._tools.pop(next(iter(self._tools)))
        return self._tools[key]

    def _check_variables(self, variables: Mapping[str, Any], with_tools: bool) -> None:
        for name, value in variables.items():
            if found := next(filter(None, map(self._spelled.search, _texts(value))), None):
                raise ValueError(
                    f"`chat_template_kwargs`: {name} spells {found[0]}, a control token of the model, and "
                    "the prompt would have the token itself; leave it out"
                )
        kind = (*sorted(variables), with_tools)
        if kind in self._checked:
            return
        if reserved := [name for name in RESERVED if name in variables]:
            raise ValueError(
                f"`chat_template_kwargs` can't set {reserved[0]}, which the request itself gives; drop it"
            )
        self.tokenizer.check_variables(variables, with_tools=False)
        if with_tools:
            try:
                self.tokenizer.check_variables({}, with_tools=True)
            except ValueError as error:
                raise ValueError(
                    "`tools`: the checkpoint's chat template does not show tools; describe them in a message"
                ) from error
        self._checked.add(kind)

    def _render_shown(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
        *,
        asks: bool = True,
    ) -> str:
        how = {**self._variables, **variables, "add_generation_prompt": asks}
        return self.tokenizer.render(messages, tools=tools, **how)

    def _behind_an_answer(self, *more: dict[str, Any]) -> str:
        """What the template writes behind the content of an assistant's message, with others behind it."""
        messages = [_said("user", "a"), _said("assistant", _MARK), *more]
        text = self._render_shown(messages, None, {}, asks=False)
        if _MARK not in text:
            raise ValueError("the chat template does not show what the assistant says; use another one")
        return text[text.rindex(_MARK) + len(_MARK) :]

    def _end_of_turn(self) -> str:
        """What ends an assistant's message, whatever follows it; "" where that is nothing."""
        if self.end_id is None:
            return ""
        first = set()
        for role in ("user", "assistant"):
            try:
                followed = self._behind_an_answer(_said(role, "b"))
            except ValueError:
                continue
            ends = list(self._spelled.finditer(os.path.commonprefix([self._last_suffix, followed])))
            if ends:
                return followed[: ends[-1].end()]
            if found := self._spelled.search(followed):
                first.add(followed[: found.end()])
        return first.pop() if len(first) == 1 else ""


def digest(value: Any) -> bytes:
    """The digest of a JSON value."""
    try:
        text = orjson.dumps(value)
    except orjson.JSONEncodeError:  # a whole number beyond 64 bits, half of a character
        text = json.dumps(value).encode()
    return hashlib.blake2b(text, digest_size=16).digest()


async def ids_of(encode: Callable[..., list[int]], text: str, *more: Any) -> Tensor:
    """encode(text, *more) as [R] int64, in a thread where it takes long."""
    ids = await asyncio.to_thread(encode, text, *more) if len(text) > LONG_TEXT else encode(text, *more)
    return torch.tensor(ids, dtype=torch.int64)


def check_shown(messages: Sequence[Message], text: str) -> None:
    """ValueError for a message whose content the template has left out of the text, as many do with roles and
    places that they do not know. An assistant's is not looked for: templates shorten these on purpose.
    """
    for one in messages:
        content = one.shown["content"]
        if one.shown["role"] == "assistant" or not content or content.strip() in text:
            continue
        escaped = [json.dumps(content, ensure_ascii=ascii)[1:-1] for ascii in (False, True)]
        if not any(form in text for form in escaped):
            raise ValueError(
                f'the chat template leaves out a message whose role is "{one.plain["role"]}"; give it '
                f"another role or place, its content begins with {content[:50]!r}"
            )


def _shield(number: int) -> str:
    return "".join(chr(FIRST_HALF + digit) for digit in divmod(number, HALVES))


def _check_whole(value: Any) -> None:
    if any(re.search("[\ud800-\udfff]", text) for text in _texts(value)):
        raise ValueError("a message has half of a character, which is no text; leave it out")


def _texts(value: Any) -> list[str]:
    """All texts in a JSON value, keys too."""
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list):
        return [text for one in value for text in _texts(one)]
    return [value] if isinstance(value, str) else []


def _said(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def _called(number: str, arguments: Arguments) -> list[dict[str, Any]]:
    call = {"id": number, "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [_said("user", "a"), _said("assistant", "") | {"tool_calls": [call]}]


def _text(content: Any) -> str:
    """A content as text: None is "", and parts are one text.

    Raises:
        ValueError: it has parts that are no text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list) and all(isinstance(one, (str, dict)) for one in content):
        texts = [one if isinstance(one, str) else one.get("text") for one in content]
        if all(isinstance(one, str) for one in texts):
            return "".join(texts)
    raise ValueError(f"a message's content must be text, got {str(content)[:100]}")


def _call(given: Any) -> dict[str, Any]:
    function = given.get("function") if isinstance(given, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"a tool call must have a function with a name, got {str(given)[:100]}")
    arguments = function.get("arguments")
    if arguments is None or isinstance(arguments, dict):
        arguments = json.dumps(arguments or {}, ensure_ascii=False)
    if not isinstance(arguments, str):
        raise ValueError(f"a tool call's arguments must be JSON text, got {str(arguments)[:100]}")
    number = {"id": given["id"]} if isinstance(given.get("id"), str) else {}
    return {**number, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _value(arguments: Any) -> Any:
    """What a call's arguments say: their JSON value, with whole numbers as such; the text where it is not
    JSON.
    """
    if not isinstance(arguments, str):
        return arguments or {}
    try:
        return whole_numbers(json_text.loads(arguments or "{}", unique_keys=False))
    except (ValueError, RecursionError):
        return arguments


def whole_numbers(value: Any) -> Any:
    """A JSON value with 1 for 1.0."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {name: whole_numbers(one) for name, one in value.items()}
    return [whole_numbers(one) for one in value] if isinstance(value, list) else value


def _short(number: str) -> str:
    """The id of a call in nine letters or digits."""
    if len(number) == 9 and number.isalnum():
        return number
    return hashlib.blake2b(number.encode("utf-8", "surrogatepass"), digest_size=5).hexdigest()[:9]
