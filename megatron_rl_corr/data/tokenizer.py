"""The tokenizer of a Hugging Face folder, the one that the servers use: text to ids, messages to
ids, ids to text.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron_rl_corr.config.prompts import RESERVED

FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


class Tokenizer:
    """Text and ids of one model. `from_folder` makes it; `tokenizer` is what transformers loads."""

    def __init__(self, tokenizer: Any, folder: str | Path):
        self._tokenizer, self._folder = tokenizer, folder

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer | None:
        """The tokenizer of a Hugging Face folder; None where it holds no file of one.

        Raises:
            ValueError: it cannot be loaded; the message names the folder.
        """
        if not any((Path(folder) / name).is_file() for name in FILES):
            return None
        from transformers import AutoTokenizer  # takes seconds, and only runs with text need it

        try:
            loaded = AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError, ImportError) as error:
            raise ValueError(
                f"{folder}: its tokenizer cannot be loaded (code that comes with a checkpoint is not run): "
                f"{error}"
            ) from error
        return cls(loaded, folder)

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """The ids of a text.

        Args:
            text: may spell special tokens out.
            special_tokens: with those that the tokenizer adds by itself, such as one at the beginning.

        Raises:
            ValueError: the tokenizer has no id for a part of it.
        """
        made, how = self._tokenizer, {"add_special_tokens": special_tokens, "verbose": False}
        try:
            if self._rust is None:
                ids = list(made.encode(text, **how))
            else:
                ids = self._rust.encode_batch_fast([text], add_special_tokens=special_tokens)[0].ids
        except Exception as error:  # tokenizers raises the base class
            raise ValueError(
                f"the tokenizer of {self._folder} can't encode {text[:100]!r}: {error}"
            ) from error
        unknown = self._unknown
        if unknown in ids and made.unk_token not in text:
            word = next((one for one in text.split() if unknown in made.encode(one, **how)), text)
            raise ValueError(
                f"the tokenizer of {self._folder} has no id for a part of {word[:100]!r}, which would become "
                f"{made.unk_token}; leave such rows out"
            )
        return ids

    @cached_property
    def control_tokens(self) -> dict[str, int]:
        """The tokens that mean something beside their text, such as the end of a turn: id by spelling."""
        added = self._tokenizer.added_tokens_decoder
        return {token.content: number for number, token in added.items() if token.special}

    @cached_property
    def added_tokens(self) -> list[str]:
        """Those beside the words that were learned, as they are spelled, by their ids."""
        added = self._tokenizer.added_tokens_decoder
        return [added[number].content for number in sorted(added)]

    def encode_as_text(self, text: str) -> list[int]:
        """The ids of a text in which control tokens may be spelled out and are not meant: none of them.

        Raises:
            ValueError: as `encode`, and where the tokenizer can't tell the two apart.
        """
        # The flag is kept in the tokenizer, which others use from other threads.
        ids = self._literal.encode(text, add_special_tokens=False, split_special_tokens=True, verbose=False)
        control = set(self.control_tokens.values()).intersection(ids)
        if control:
            raise ValueError(
                f"the tokenizer of {self._folder} makes a control token of what spells it: {text[:100]!r}"
            )
        return list(ids)

    @cached_property
    def _literal(self) -> Any:
        made = copy.deepcopy(self._tokenizer)
        made.encode("", split_special_tokens=True)  # sets the flag, which fails while another thread encodes
        return made

    @cached_property
    def _rust(self) -> Any:
        """What transformers asks for the ids of a text, in 0.2 ms of its own; None where it does more."""
        from transformers import PreTrainedTokenizerFast

        made, kind, usual = self._tokenizer, type(self._tokenizer), PreTrainedTokenizerFast
        if not isinstance(made, usual) or made.split_special_tokens:
            return None
        if kind.encode is not usual.encode or kind._encode_plus is not usual._encode_plus:
            return None
        made.encode("")  # nothing is cut or padded from now on, whatever the tokenizer's file says
        return made.backend_tokenizer

    @cached_property
    def _unknown(self) -> int | None:
        """The id of what the vocabulary lacks, where it stands for nothing else."""
        unknown = self._tokenizer.unk_token_id
        return None if unknown in (self.bos_id, self.eos_id) else unknown

    @cached_property
    def bos_id(self) -> int | None:
        """The id that texts begin with, where the tokenizer has one."""
        return self._tokenizer.bos_token_id

    @cached_property
    def eos_id(self) -> int | None:
        """The id that ends a text, where the tokenizer has one."""
        return self._tokenizer.eos_token_id

    @property
    def has_template(self) -> bool:
        """True if it can render messages."""
        return bool(getattr(self._tokenizer, "chat_template", None))

    @property
    def template_text(self) -> str:
        """The chat template, where there are several the one with tools; "" without one."""
        return self._tokenizer.get_chat_template(tools=[{}]) if self.has_template else ""

    @staticmethod
    def _environment(template: str) -> Any:
        """Jinja's environment of a template, which transformers compiles once and keeps."""
        from transformers.utils.chat_template_utils import _compile_jinja_template

        return _compile_jinja_template(template).environment

    def check_variables(self, variables: Mapping[str, Any], *, with_tools: bool) -> None:
        """ValueError for a variable that the chat template does not use, and so for an option without effect.

        Args:
            variables: of the template, by name.
            with_tools: rows have tools.
        """
        used = self.variables_used(with_tools=with_tools)
        if unused := sorted(variables.keys() - used):
            raise ValueError(
                f"`chat_template_kwargs` has {unused[0]}, which the chat template of {self._folder} does not "
                f"use; drop it, or use {', '.join(sorted(used - set(RESERVED))) or 'another template'}"
            )
        if with_tools and "tools" not in used:
            raise ValueError(
                f"`tools_key`: the chat template of {self._folder} does not show tools; use one that does, "
                "or drop it"
            )

    def variables_used(self, *, with_tools: bool) -> set[str]:
        """The names of the variables that the chat template uses.

        Args:
            with_tools: it shows tools.

        Raises:
            ValueError: there is no template, or it can't be read.
        """
        from jinja2 import TemplateError, meta

        try:
            template = self._tokenizer.get_chat_template(tools=[{}] if with_tools else None)
            return meta.find_undeclared_variables(self._environment(template).parse(template))
        except (TemplateError, ValueError) as error:
            raise ValueError(f"the chat template of {self._folder} cannot be used: {error}") from error

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, without special tokens."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def decode_all(self, ids: Sequence[int]) -> str:
        """The text of ids, that of special tokens too: what stop texts are looked for in."""
        return self._tokenizer.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The text of messages in the model's own template, up to where the assistant begins to answer.

        Args:
            messages: [{"role": "user", "content": "..."}, ...].
            tools: descriptions of functions, for templates that show them.
            kwargs: the template's own variables, such as enable_thinking.

        Raises:
            ValueError: the tokenizer has no template, or the template refuses the messages.
        """
        if not self.has_template:
            raise ValueError(
                f"the tokenizer of {self._folder} has no chat template; put the model's chat_template.jinja "
                "there, or give rows of text"
            )
        from jinja2 import TemplateError

        from megatron_rl_corr.data.template_sandbox import shorten

        how = {"tools": tools, "add_generation_prompt": True, "tokenize": False, **kwargs}
        try:
            shorten(self._environment(self._tokenizer.get_chat_template(tools=tools)))
            return self._tokenizer.apply_chat_template(list(messages), **how)
        # what a template may raise
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(f"the chat template of {self._folder} refuses the messages: {error}") from error
