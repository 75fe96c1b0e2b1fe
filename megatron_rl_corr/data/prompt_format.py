"""How a row of the user's data becomes a prompt: its keys, the chat template, and what makes a row a bad one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from megatron_rl_corr.config.prompts import PromptsConfig
from megatron_rl_corr.data.prompts import Prompt
from megatron_rl_corr.data.row_sampling import row_settings
from megatron_rl_corr.data.rows import BadRow, LongPrompt
from megatron_rl_corr.data.tokenizer import Tokenizer

KEYS = ("input_ids", "prompt", "messages")
"""Where the prompt is, unless `input_key` says so."""
_OTHER_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}
"""Names that other data formats give to roles: many templates would write them as they are, and no model knows them."""


@dataclass(frozen=True)
class PromptLimits:
    """What a prompt must keep to. Example: PromptLimits(vocab_size=32000, max_tokens=1024)."""

    vocab_size: int | None = None
    """Ids are below it."""
    max_tokens: int | None = None
    max_tokens_from: str = ""
    """What max_tokens follows from, for messages."""
    max_new_tokens: int | None = None
    """Longest response, which a row may lower for its own."""
    drop_long: bool = True
    """A longer prompt is a LongPrompt; else a BadRow like any other."""


@dataclass(frozen=True)
class PromptFormat:
    """Makes prompts of rows. Its fields are those of `PromptsConfig`, whose docstrings explain them."""

    tokenizer: Tokenizer | None = None
    input_key: str | None = None
    label_key: str | None = None
    tools_key: str | None = None
    system_prompt: str | None = None
    apply_chat_template: bool = False
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    sampling_key: str | None = None
    limits: PromptLimits = PromptLimits()

    @classmethod
    def of(cls, config: PromptsConfig, tokenizer: Tokenizer | None, limits: PromptLimits) -> PromptFormat:
        """The format that a run's flags give.

        Raises:
            ValueError: the chat template has no place for the tools or for a variable of it that is given.
        """
        variables = config.template_variables()
        if tokenizer is not None and tokenizer.has_template and (variables or config.tools_key is not None):
            tokenizer.check_variables(variables, with_tools=config.tools_key is not None)
        return cls(
            tokenizer, config.input_key, config.label_key, config.tools_key, config.system_prompt,
            config.apply_chat_template, variables, config.sampling_key, limits,
        )

    def prompt(self, row: dict[str, Any], index: int, where: str) -> Prompt:
        """The prompt of a row, which becomes its metadata.

        Args:
            row: of the data.
            index: its number, `Prompt.index`.
            where: names it in messages, such as "p.jsonl:3".

        Raises:
            BadRow: it has no prompt that can be used.
            LongPrompt: it is too long, and such rows are left out.
        """
        try:
            return self._with_settings(self._checked(self._made(row, index)), row)
        except LongPrompt as error:
            raise LongPrompt(f"{where}: {error}") from None
        except ValueError as error:
            raise BadRow(f"{where}: {error}") from None

    def is_plain_text(self, prompt: Prompt) -> bool:
        """Whether the prompt is the row's text as it is, without a template."""
        return prompt.text is not None and prompt.text == _at(prompt.metadata, self._key(prompt.metadata))

    def _made(self, row: dict[str, Any], index: int) -> Prompt:
        key = self._key(row)
        value = _at(row, key)
        label = row.get("label") if self.label_key is None else _at(row, self.label_key)
        if isinstance(value, list) and value and isinstance(value[0], dict):
            text, ids = self._rendered(_messages(value, key), row, key)
            return Prompt(index, ids, row, text, label)
        if isinstance(value, str):
            text, ids = self._of_text(value, row, key)
            return Prompt(index, ids, row, text, label)
        if not isinstance(value, list):
            hint = "; a Sequence of `datasets`? store a list of objects" if isinstance(value, dict) else ""
            raise ValueError(f'"{key}" must be text, a list of ids or of messages, got {type(value).__name__}{hint}')
        self._refuse_without_template(key, "ids")
        if not value or not all(type(i) is int and i >= 0 for i in value):
            raise ValueError(f'"{key}" must be a non-empty list of integers of at least 0, got {str(value)[:100]}')
        return Prompt(index, value, {name: other for name, other in row.items() if name != key}, label=label)

    def _with_settings(self, prompt: Prompt, row: Mapping[str, Any]) -> Prompt:
        """The prompt with the row's own sampling settings; a row without has null there, or a wrong key would pass."""
        if self.sampling_key is None:
            return prompt
        limits = self.limits
        settings = row_settings(
            _at_or_null(row, self.sampling_key), key=self.sampling_key, vocab_size=limits.vocab_size,
            max_new_tokens=limits.max_new_tokens, with_tokenizer=self.tokenizer is not None,
        )  # fmt: skip
        return replace(prompt, sampling=settings)

    def _checked(self, prompt: Prompt) -> Prompt:
        limits, ids = self.limits, prompt.input_ids
        if limits.vocab_size is not None and max(ids) >= limits.vocab_size:
            raise ValueError(
                f"token id {max(ids)}; ids must be in [0, {limits.vocab_size}), the vocabulary of "
                "--rollout-hf-checkpoint: were the prompts tokenised for this model?"
            )
        if limits.max_tokens is not None and len(ids) > limits.max_tokens:
            error = LongPrompt if limits.drop_long else ValueError
            raise error(f"{len(ids)} tokens are too many; {limits.max_tokens_from} leaves {limits.max_tokens}")
        return prompt

    def check_keys(self, row: Mapping[str, Any], where: str, *, columns: bool = False) -> None:
        """BadRow where a row has no prompt, or not the label that `label_key` names.

        Args:
            row: of the data.
            where: as `prompt`.
            columns: it has the names of columns alone, whose values are not known.
        """
        try:
            if columns:
                self._check_columns(row)
                return
            _at(row, self._key(row))
            if self.label_key is not None:
                _at(row, self.label_key)
        except ValueError as error:
            raise BadRow(f"{where}: {error}") from None

    def _check_columns(self, names: Mapping[str, Any]) -> None:
        if self.input_key is None and not any(key in names for key in KEYS):
            self._key(names)
        for key in (self.input_key, self.label_key):
            if key is not None and key not in names and key.split(".")[0] not in names:
                raise ValueError(f'no key "{key}"; the row has {sorted(names)}')

    def _key(self, row: Mapping[str, Any]) -> str:
        if self.input_key is not None:
            return self.input_key
        found = [key for key in KEYS if row.get(key) is not None]
        if len(found) != 1:
            raise ValueError(
                f"expected one of {', '.join(KEYS)}, got the keys {sorted(row)}; `input_key` names the prompt's"
            )
        return found[0]

    def _of_text(self, text: str, row: Mapping[str, Any], key: str) -> tuple[str, list[int]]:
        """(the rendered text, its ids) of a row's text."""
        if self.tokenizer is None:
            raise ValueError(
                f'"{key}" is text and there is no tokenizer in --rollout-hf-checkpoint; put one there, or give ids'
            )
        if text.lstrip().startswith("[{") and _is_json_of_messages(text):
            raise ValueError(f'"{key}" is messages as JSON text; store the list itself')
        if self.apply_chat_template:
            return self._rendered([{"role": "user", "content": text}], row, key)
        self._refuse_without_template(key, "text")
        ids = self.tokenizer.encode(text)
        if not ids:
            raise ValueError(f'"{key}" has no tokens: {text[:100]!r}')
        bos = self.tokenizer.bos_id
        if bos is not None and ids[:2] == [bos, bos]:
            raise ValueError(
                f'"{key}" begins with the token that the tokenizer puts before every text, and has it twice then; '
                "leave it out of the text"
            )
        eos = self.tokenizer.eos_id
        if ids[1:][-1:] == [eos] and self.tokenizer.encode(text, special_tokens=False)[-1:] != [eos]:
            raise ValueError(
                f'"{key}" gets the end token, which the tokenizer puts behind every text, and nothing follows an end; '
                "use a tokenizer without it (add_eos_token in tokenizer_config.json), or give messages or ids"
            )
        return text, ids

    def _rendered(self, messages: list[dict[str, Any]], row: Mapping[str, Any], key: str) -> tuple[str, list[int]]:
        """(the rendered text, its ids) of messages."""
        if self.tokenizer is None:
            raise ValueError(f'"{key}" is messages and there is no tokenizer in --rollout-hf-checkpoint; put one there')
        if self.system_prompt is not None and messages[0]["role"] not in ("system", "developer"):
            messages = [{"role": "system", "content": self.system_prompt}, *messages]
        tools = None if self.tools_key is None else _tools(_at(row, self.tools_key), self.tools_key)
        try:
            text, ids = self.tokenizer.apply_chat_template(messages, tools=tools, **self.template_variables)
        except ValueError as error:
            raise ValueError(f'"{key}": {error}') from None
        if not ids:
            raise ValueError(f'"{key}": the chat template makes no tokens of these messages')
        if messages[-1]["role"] == "user" and messages[-1]["content"].strip() not in text:
            raise ValueError(f'"{key}": the chat template leaves the last message out; give one of the model')
        if self.system_prompt is not None and messages[0]["content"].strip() not in text:
            raise ValueError(f'"{key}": the chat template has no system message; put it into the first message')
        return text, ids

    def _refuse_without_template(self, key: str, what: str) -> None:
        """ValueError where an option of the chat template would have no effect on this row."""
        given = {
            "system_prompt": self.system_prompt is not None, "tools_key": self.tools_key is not None,
            "chat_template_kwargs": bool(self.template_variables), "apply_chat_template": self.apply_chat_template,
        }  # fmt: skip
        remedy = "`apply_chat_template`" if what == "text" else "rows of text or messages"
        for name, is_given in given.items():
            if is_given:
                raise ValueError(f'`{name}` has no effect on "{key}", which is {what}; drop it, or use {remedy}')


def _at(row: Mapping[str, Any], key: str) -> Any:
    """The value of a key, or of a path into objects with dots between. Raises ValueError where there is none."""
    value = _at_or_null(row, key)
    if value is None:
        raise ValueError(f'"{key}" is null')
    return value


def _at_or_null(row: Mapping[str, Any], key: str) -> Any:
    if key in row:
        return row[key]
    value: Any = row
    for part in key.split("."):
        if not isinstance(value, dict) or part not in value:
            raise ValueError(f'no key "{key}"; the row has {sorted(row)}')
        value = value[part]
    return value


def _messages(values: list[Any], key: str) -> list[dict[str, Any]]:
    """The messages that a template gets: columns fill what an object lacks with null, which templates do not expect."""
    messages = []
    for number, value in enumerate(values):
        what = f'message {number} of "{key}"'
        if not isinstance(value, dict) or not isinstance(value.get("role"), str):
            keys = sorted(value) if isinstance(value, dict) else type(value).__name__
            raise ValueError(f'{what} must be an object with "role" and "content", got {keys}')
        role, content = value["role"], value.get("content")
        if role in _OTHER_ROLES:
            raise ValueError(f'{what} has the role "{role}"; call it "{_OTHER_ROLES[role]}"')
        if not isinstance(content, str) and not (content is None and value.get("tool_calls")):
            parts = "; parts, such as images, are not supported" if isinstance(content, list) else ""
            raise ValueError(f"{what} must have text as its content, got {type(content).__name__}{parts}")
        messages.append({name: _without_nulls(one) for name, one in value.items() if one is not None})
        messages[-1].setdefault("content", "")
    if messages[-1]["role"] == "assistant":
        raise ValueError(f'the last message of "{key}" is the assistant\'s, which is to be sampled; leave it out')
    return messages


def _tools(value: Any, key: str) -> list[Any] | None:
    """The list of tools of a row, given as such or as JSON text; None for an empty one."""
    if isinstance(value, str):
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError as error:
            raise ValueError(f'"{key}" is text and not JSON: {error}') from None
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise ValueError(f'"{key}" must be a list of objects, got {str(value)[:100]}')
    return _without_nulls(value) or None


def _is_json_of_messages(text: str) -> bool:
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return False
    return isinstance(value, list) and all(isinstance(one, dict) and "role" in one for one in value)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value
