"""The tokenizer of a Hugging Face folder, the one that the servers use: text to ids, messages to ids, ids to text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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
            return cls(AutoTokenizer.from_pretrained(str(folder), local_files_only=True), folder)
        except (OSError, ValueError, ImportError) as error:
            raise ValueError(f"{folder}: its tokenizer cannot be loaded: {error}") from error

    def encode(self, text: str) -> list[int]:
        """The ids of a text, with the special tokens that the tokenizer adds by itself."""
        return list(self._tokenizer.encode(text))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, without special tokens."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None = None, **kwargs: Any
    ) -> tuple[str, list[int]]:
        """(the text, the ids) of messages in the model's own template, up to where the assistant begins to answer.

        Args:
            messages: [{"role": "user", "content": "..."}, ...].
            tools: descriptions of functions, for templates that show them.
            kwargs: the template's own variables, such as enable_thinking.

        Raises:
            ValueError: the tokenizer has no template, or the template refuses the messages.
        """
        if not getattr(self._tokenizer, "chat_template", None):
            raise ValueError(f"the tokenizer of {self._folder} has no chat template; give it one, or rows of text")
        from jinja2 import TemplateError

        how = {"tools": tools, "add_generation_prompt": True, "tokenize": False, **kwargs}
        try:
            text = self._tokenizer.apply_chat_template(list(messages), **how)
        except TemplateError as error:
            raise ValueError(f"the chat template of {self._folder} refuses the messages: {error}") from error
        # The template writes its own special tokens.
        return text, list(self._tokenizer.encode(text, add_special_tokens=False))
