"""Keys that no message may show: whoever sends one keeps it here, and every message is searched for it.

A server, or a proxy before it, may quote what it was sent, and in many ways: as it is, with the escapes of
JSON, of a URL or of HTML, or in base64.
"""

from __future__ import annotations

import base64
import functools
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from html.entities import codepoint2name
from typing import Any
from weakref import WeakKeyDictionary

HIDDEN = "***"
_DIRECTIONS = (0x061C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A))
"""What turns the direction of writing, so that a text is read as another, and Unicode's ends of lines."""
_CONTROL = {code: "?" for code in (*range(32), *range(127, 160), *_DIRECTIONS) if chr(code) not in "\t\n"}
"""What could move the cursor of a terminal, rename its window, or overwrite what stands there."""
_LEAST_OF_BASE64 = 6
"""Characters of base64 that are looked for: fewer may be anywhere."""

_PATTERNS: WeakKeyDictionary[object, tuple[re.Pattern[str], ...]] = WeakKeyDictionary()
_LENGTHS: WeakKeyDictionary[object, int] = WeakKeyDictionary()


def keep_secret(holder: object, *secrets: str | None) -> None:
    """Let no message show these while the holder lives: the object that sends them.

    Args:
        holder: weakly referenced.
        secrets: texts; None and "" are none.
    """
    kept = [secret for secret in secrets if secret]
    _PATTERNS[holder] = tuple(_pattern(secret) for secret in kept)
    _LENGTHS[holder] = max(map(len, kept), default=0)


def redacted(text: str) -> str:
    """The text for a message: *** in the place of each secret, ? in that of half a surrogate pair,
    or of a control.

    JSON and headers may bring such a half, and no file, console or report takes it; a
    terminal obeys controls.
    """
    return without_keys(text).encode("utf-8", "replace").decode().translate(_CONTROL)


def for_message(text: str) -> str:
    """`redacted`, and *** in the place of what variables of this process hold whose names say that they are
    secret: what a user's function or an agent says may quote them.
    """
    return redacted(_without_variables(text, os.environ))


def without_keys(text: str) -> str:
    """The text with *** in the place of each secret."""
    for patterns in list(_PATTERNS.values()):
        for pattern in patterns:
            text = pattern.sub(HIDDEN, text)
    return text


def longest_secret() -> int:
    """Most characters that a secret may take in any of its forms."""
    return 8 * max(_LENGTHS.values(), default=0)


@functools.lru_cache(256)
def _pattern(secret: str) -> re.Pattern[str]:
    """Finds the secret in each of its forms."""
    forms = ["".join(map(_character, secret)), *map(re.escape, _in_base64(secret.encode()))]
    return re.compile("|".join(forms))


def _character(character: str) -> str:
    r"""A character as it is, with backslashes before it, as \u002f, \x2f, %2F, &#47;, &#x2F; or as &quot;."""
    code = ord(character)
    either_case = "".join(
        f"[{digit}{digit.upper()}]" if digit.isalpha() else digit for digit in f"{code:02x}"
    )
    forms = [
        rf"\\{{0,8}}{re.escape(character)}",
        rf"\\{{1,8}}u00{either_case}",
        rf"\\{{1,8}}x{either_case}",
        f"%(?:25){{0,4}}{either_case}",
        f"&#0{{0,4}}{code};",
        f"&#[xX]0{{0,4}}{either_case};",
    ]
    if code in codepoint2name or character == "'":
        forms.append(f"&{codepoint2name.get(code, 'apos')};")
    if character == " ":
        forms.append(r"\+")
    return f"(?:{'|'.join(forms)})"


def _in_base64(secret: bytes) -> set[str]:
    """What base64 makes of the secret alone, wherever it stands in a longer text; both alphabets."""
    forms = set()
    for before in range(3):
        whole = base64.b64encode(bytes(before) + secret)
        # The characters whose 6 bits are all of the secret.
        first, last = -(-8 * before // 6), 8 * (before + len(secret)) // 6
        part = whole[first:last].decode()
        if len(part) >= _LEAST_OF_BASE64:
            forms |= {part, part.replace("+", "-").replace("/", "_")}
    return forms


_SECRET_NAME = (
    r"(?:api[-_]?|access[-_]?|private[-_]?)?key|(?:[a-z0-9]+[-_])*secret|password|passwd|credentials?"
)
_SECRET_FLAG = re.compile(
    rf"(?!--rollout-)--?(?:[\w-]+[-_])?(?:{_SECRET_NAME}|(?:api|access|auth|hf|hub|wandb|bearer)[-_]token)|--?token",
    re.IGNORECASE,
)
"""Flags whose value is a secret; those that name a variable end otherwise, as --rollout-api-key-env. A run's
own --rollout-...-key names a key of its rows.
"""
_SECRET_VARIABLE = re.compile(r".*(?:KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASS|CREDENTIALS?)", re.IGNORECASE)
_KNOWN_VARIABLE = re.compile(
    r"(?:.*_)?(?:(?:input|label|prompt|messages?|answer|tools|sampling)_key"
    r"|(?:eos|bos|pad|unk|mask|sep|stop)_token)",
    re.IGNORECASE,
)
"""Names of keys of rows, and of special tokens, as scripts that start a run have them: their values are words
of every message.
"""
_THIS_HOST = ("localhost", "localhost.localdomain", "127.0.0.1")
"""Values that everybody knows, and that messages about servers need. Other words stay hidden: no length and
no entropy tells an ordinary word from somebody's password.
"""
_BASE64 = re.compile(r"(?=.*[a-z])(?=.*[A-Z])(?=.*\d)[\w+/=-]{16,}")
_LEAST_VARIABLE = 8
"""Characters of a variable's value that may be a secret: shorter ones are switches."""
_BEGINNING = 32
"""Characters of a secret that are looked for first: to make the pattern of 4,000 takes 4 seconds."""
_LOOKS_SECRET = (
    (re.compile(r"(?<=://)[^/\s@]+(?=@)"), HIDDEN),
    (re.compile(r"(://[^\s?#\"']*\?)[^\s#\"']+"), rf"\1{HIDDEN}"),
    (re.compile(r"\b((?:Bearer|Basic)\s+)[\w.~+/=-]{6,}", re.IGNORECASE), rf"\1{HIDDEN}"),
    (
        re.compile(
            r"\b(?:sk-[\w-]{12,}|hf_\w{12,}|gh[pousr]_\w{12,}|github_pat_\w{12,}|glpat-[\w-]{12,}"
            r"|xox[abeprs]-[\w-]{10,}|AKIA[0-9A-Z]{12,}|AIza[\w-]{20,}|eyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?)"
        ),
        HIDDEN,
    ),
    (
        re.compile(
            r"((?:api[-_]?key|access[-_]?key|(?:api|access|auth)[-_]token|secret|password|passwd)"
            r"[\"']?\s*[=:]\s*[\"']?)[^\s\"',;&]+",
            re.IGNORECASE,
        ),
        rf"\1{HIDDEN}",
    ),
)
"""What a secret looks like where nobody has named it: (pattern, what takes its place)."""


def without_lookalikes(text: str, environment: Mapping[str, str]) -> str:
    """The text with *** where something looks like a secret, for files that are handed on.

    Passwords and queries of addresses, bearer tokens, keys of well-known forms, `password=...`, and values of
    environment variables whose name says that they are secret.

    Args:
        text: any.
        environment: of this process.
    """
    text = _without_variables(without_keys(text), environment)
    for pattern, replacement in _LOOKS_SECRET:
        text = pattern.sub(replacement, text)
    return text


def _without_variables(text: str, environment: Mapping[str, str]) -> str:
    for name, value in environment.items():
        if not _SECRET_VARIABLE.fullmatch(name) or _KNOWN_VARIABLE.fullmatch(name) or value in _THIS_HOST:
            continue
        # each form of a text is as long as it, or longer, and begins as that of its beginning
        if not _LEAST_VARIABLE <= len(value) <= len(text) or not _pattern(value[:_BEGINNING]).search(text):
            continue
        if not value.startswith("/") or (_BASE64.fullmatch(value) and not os.path.exists(value)):
            text = _pattern(value).sub(HIDDEN, text)  # not the path of a file with a key
    return text


def without_secret_words(words: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """A command line with *** in the place of values of flags that name a secret, and of what looks like one.

    Args:
        words: of the command line.
        environment: of this process.
    """
    found, hides = [], False
    for word in words:
        flag, joined, _ = word.partition("=")
        if word.startswith("--"):
            hides = _SECRET_FLAG.fullmatch(flag) is not None
            found.append(f"{flag}={HIDDEN}" if hides and joined else text_without_secrets(word, environment))
        else:
            found.append(HIDDEN if hides else text_without_secrets(word, environment))
    return found


def text_without_secrets(text: str, environment: Mapping[str, str]) -> str:
    """The text as `without_lookalikes` shows it; of one that is a command, also its words as
    `without_secret_words` does.
    """
    text = without_lookalikes(text, environment)
    if " -" not in text:
        return text
    try:
        words = shlex.split(text)
    except ValueError:
        return text
    shown = without_secret_words(words, environment) if len(words) > 1 else words
    return text if shown == words else shlex.join(shown)


def json_without_secrets(value: Any, environment: Mapping[str, str]) -> Any:
    """JSON whose names and texts are as `text_without_secrets` shows them."""
    if isinstance(value, str):
        return text_without_secrets(value, environment)
    if isinstance(value, Mapping):
        return {
            text_without_secrets(str(name), environment): json_without_secrets(one, environment)
            for name, one in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [json_without_secrets(one, environment) for one in value]
    return value
