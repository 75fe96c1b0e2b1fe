"""How a row of the user's data becomes a prompt: its keys, the chat template, and what makes
a row a bad one.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import orjson

from megatron_rl_corr.config.problems import Problems
from megatron_rl_corr.config.prompts import PromptsConfig
from megatron_rl_corr.data.checked_template import CheckedTemplate
from megatron_rl_corr.data.messages import chat_of, tools_of
from megatron_rl_corr.data.prompt import Prompt
from megatron_rl_corr.data.row_sampling import row_settings
from megatron_rl_corr.data.rows import BadRow, LongPrompt
from megatron_rl_corr.data.tokenizer import Tokenizer

KEYS = ("input_ids", "prompt", "messages")
"""Where the prompt is, unless `input_key` says so."""
_PLACEHOLDERS = {f"<{kind}>": (kind, f"{kind}s") for kind in ("image", "video", "audio")}
"""What stands in a text for something that the row has beside it, and that one's keys."""

_PYTHON_MESSAGES = re.compile(r"\s*(?:\{\s*'messages'\s*:\s*)?\[?\s*\{\s*'(?:role|content)'\s*:")


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
    _unshown: set[str] = field(default_factory=set)
    """What rows so far had beside their prompt for which a flag was not given."""

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
            tokenizer,
            config.input_key,
            config.label_key,
            config.tools_key,
            config.system_prompt,
            config.apply_chat_template,
            variables,
            config.sampling_key,
            limits,
        )

    def prompt(
        self,
        row: dict[str, Any],
        index: int,
        where: str,
        *,
        fills_nulls: bool = False,
        left_out: Collection[str] = (),
    ) -> Prompt:
        """The prompt of a row, which becomes its metadata.

        Args:
            row: of the data.
            index: its number, `Prompt.index`.
            where: names it in messages, such as "p.jsonl:3".
            fills_nulls: as `Rows.fills_nulls`.
            left_out: as `Rows.left_out`.

        Raises:
            BadRow: it has no prompt that can be used.
            LongPrompt: it is too long, and such rows are left out.
        """
        try:
            _check_media(row, self._key(row), left_out)
            return self._with_settings(self._checked(self._made(row, index, fills_nulls)), row)
        except LongPrompt as error:
            raise LongPrompt(f"{where}: {error}") from None
        except ValueError as error:
            raise BadRow(f"{where}: {error}") from None

    def label(self, row: Mapping[str, Any], where: str) -> Any:
        """The label of a row; None where it has none. Raises BadRow for a key that is not there."""
        try:
            return self._label(row)
        except ValueError as error:
            raise BadRow(f"{where}: {error}") from None

    @property
    def unread_keys(self) -> list[str]:
        """Keys of messages, beside those of every format, that have changed no prompt so far."""
        return [] if self.tokenizer is None else self._template.unread_keys

    @property
    def notes(self) -> list[str]:
        """A line about each thing that the rows made so far have and the model does not see."""
        template = None if self.tokenizer is None else self._template
        keys = {"messages": self.unread_keys, "tools": template.hidden_keys if template else []}
        hidden = [
            f"{what} have {', '.join(names)}, which the chat template does not show to the model"
            for what, names in keys.items()
            if names
        ]
        return hidden + sorted(self._unshown)

    def _label(self, row: Mapping[str, Any]) -> Any:
        return row.get("label") if self.label_key is None else _at(row, self.label_key)

    def _made(self, row: dict[str, Any], index: int, fills_nulls: bool) -> Prompt:
        key = self._key(row)
        value = _at(row, key)
        label = self._label(row)
        if isinstance(value, list) and value and isinstance(value[0], dict):
            text, ids = self._rendered(value, row, key, fills_nulls=fills_nulls)
            return Prompt(index, ids, row, text, label)
        if isinstance(value, str):
            text, ids = self._of_text(value, row, key, fills_nulls=fills_nulls)
            return Prompt(index, ids, row, text, label)
        if not isinstance(value, list):
            hint = "; a Sequence of `datasets`? store a list of objects" if isinstance(value, dict) else ""
            raise ValueError(
                f'"{key}" must be text, a list of ids or of messages, got {type(value).__name__}{hint}'
            )
        self._refuse_without_template(key, "ids")
        if not value or not all(type(i) is int and i >= 0 for i in value):
            raise ValueError(
                f'"{key}" must be a non-empty list of integers of at least 0, got {str(value)[:100]}'
            )
        return Prompt(index, value, {name: other for name, other in row.items() if name != key}, label=label)

    def _with_settings(self, prompt: Prompt, row: Mapping[str, Any]) -> Prompt:
        """The prompt with the row's own sampling settings; a row without has null there, or a
        wrong key would pass.
        """
        if self.sampling_key is None:
            return prompt
        limits = self.limits
        settings = row_settings(
            _at_or_null(row, self.sampling_key),
            key=self.sampling_key,
            vocab_size=limits.vocab_size,
            max_new_tokens=limits.max_new_tokens,
            with_tokenizer=self.tokenizer is not None,
        )
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
            raise error(
                f"{len(ids)} tokens are too many; {limits.max_tokens_from} leaves {limits.max_tokens}"
            )
        return prompt

    def check_keys(self, row: Mapping[str, Any], where: str, *, columns: bool = False) -> None:
        """BadRow where a row has no prompt, or not the label that `label_key` names.

        Args:
            row: of the data.
            where: as `prompt`.
            columns: it has the names of columns alone, whose values are not known.
        """
        problems = Problems()
        for check in (self._check_input_key, self._check_label_key):
            with problems.catch():
                check(row, columns)
        if problems:
            raise BadRow(f"{where}: {'; and '.join(problems.found)}")

    def _check_input_key(self, row: Mapping[str, Any], columns: bool) -> None:
        if not columns:
            _at(row, self._key(row))
        elif self.input_key is not None:
            _check_column(row, self.input_key)
        elif not any(key in row for key in KEYS):
            self._key(row)

    def _check_label_key(self, row: Mapping[str, Any], columns: bool) -> None:
        if self.label_key is not None:
            (_check_column if columns else _at)(row, self.label_key)

    def _key(self, row: Mapping[str, Any]) -> str:
        if self.input_key is not None:
            return self.input_key
        found = [key for key in KEYS if row.get(key) is not None]
        if len(found) != 1:
            raise ValueError(
                f"expected one of {', '.join(KEYS)}, got the keys {sorted(row)}; `input_key` names the "
                "prompt's"
            )
        return found[0]

    def _of_text(
        self, text: str, row: Mapping[str, Any], key: str, *, fills_nulls: bool
    ) -> tuple[str, list[int]]:
        """(the rendered text, its ids) of a row's text."""
        if self.tokenizer is None:
            raise ValueError(
                f'"{key}" is text and there is no tokenizer in --rollout-hf-checkpoint; put one there, or '
                "give ids"
            )
        if _is_text_of_messages(text.strip()):
            raise ValueError(f'"{key}" is messages as JSON text; store the list itself')
        if _PYTHON_MESSAGES.match(text):
            raise ValueError(f'"{key}" is messages as Python writes them; store the list itself')
        if self.apply_chat_template:
            return self._rendered([{"role": "user", "content": text}], row, key, fills_nulls=fills_nulls)
        self._refuse_without_template(key, "text")
        if self.tokenizer.has_template:
            self._unshown.add(
                "text is tokenised as it is, though the tokenizer has a chat template; `apply_chat_template` "
                "makes a user's message of it"
            )
        ids = self.tokenizer.encode(text)
        if not ids:
            raise ValueError(f'"{key}" has no tokens: {text[:100]!r}')
        bos = self.tokenizer.bos_id
        if bos is not None and ids[:2] == [bos, bos]:
            raise ValueError(
                f'"{key}" begins with the token that the tokenizer puts before every text, and has it twice '
                "then; leave it out of the text"
            )
        eos = self.tokenizer.eos_id
        if ids[1:][-1:] == [eos] and self.tokenizer.encode(text, special_tokens=False)[-1:] != [eos]:
            raise ValueError(
                f'"{key}" gets the end token, which the tokenizer puts behind every text, and nothing '
                "follows an end; use a tokenizer without it (add_eos_token in tokenizer_config.json), or "
                "give messages or ids"
            )
        return text, ids

    def _rendered(
        self, values: list[Any], row: Mapping[str, Any], key: str, *, fills_nulls: bool
    ) -> tuple[str, list[int]]:
        """(the rendered text, its ids) of messages."""
        if self.tokenizer is None:
            raise ValueError(
                f'"{key}" is messages and there is no tokenizer in --rollout-hf-checkpoint; put one there'
            )
        chat = chat_of(values, key, fills_nulls=fills_nulls)
        if self.system_prompt is not None:
            chat = chat.with_system(self.system_prompt)
        if self.tools_key is not None:
            tools = tools_of(_at(row, self.tools_key), self.tools_key, fills_nulls=fills_nulls)
            chat = replace(chat, tools=tools)
        elif row.get("tools"):
            self._unshown.add("rows have `tools`, which the model does not see; `tools_key` tools shows them")
        try:
            text = self._template.text(chat)
            ids = self.tokenizer.encode(text, special_tokens=False)  # the template writes its own
        except ValueError as error:
            raise ValueError(f'"{key}": {error}') from None
        if not ids:
            raise ValueError(f'"{key}": the chat template makes no tokens of these messages')
        return text, ids

    @cached_property
    def _template(self) -> CheckedTemplate:
        return CheckedTemplate(self.tokenizer, self.template_variables)

    def _refuse_without_template(self, key: str, what: str) -> None:
        """ValueError where an option of the chat template would have no effect on this row."""
        given = {
            "system_prompt": self.system_prompt is not None,
            "tools_key": self.tools_key is not None,
            "chat_template_kwargs": bool(self.template_variables),
            "apply_chat_template": self.apply_chat_template,
        }
        remedy = "`apply_chat_template`" if what == "text" else "rows of text or messages"
        for name, is_given in given.items():
            if is_given:
                raise ValueError(
                    f'`{name}` has no effect on "{key}", which is {what}; drop it, or use {remedy}'
                )


def _at(row: Mapping[str, Any], key: str) -> Any:
    """The value of a key, or of a path into objects with dots between. Raises ValueError
    where there is none.
    """
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


def _check_media(row: Mapping[str, Any], key: str, left_out: Collection[str]) -> None:
    """ValueError for a text with a place for an image, or the like, which the row has beside it."""
    value = _at(row, key)
    parts = value if isinstance(value, list) else [value]
    texts = [one.get("content") if isinstance(one, dict) else one for one in parts]
    for place, names in _PLACEHOLDERS.items():
        media = next((name for name in names if row.get(name) or name in left_out), None)
        if media is not None and any(isinstance(text, str) and place in text for text in texts):
            raise ValueError(
                f'"{key}" has {place} for the row\'s "{media}", and prompts are text alone; leave such rows '
                "out"
            )


def _check_column(names: Mapping[str, Any], key: str) -> None:
    """ValueError where no column has the name, or the first part of the path."""
    if key not in names and key.split(".")[0] not in names:
        raise ValueError(f'no key "{key}"; the row has {sorted(names)}')


def _is_text_of_messages(text: str) -> bool:
    """True for JSON of a message, of a list of them, or of an object with such a list."""
    try:
        value = orjson.loads(text) if text[:1] in ("[", "{") else None
    except orjson.JSONDecodeError:
        return False
    if isinstance(value, dict):
        value = value.get("messages", [value])
    return (
        bool(value)
        and isinstance(value, list)
        and all(isinstance(one, dict) and "role" in one for one in value)
    )
