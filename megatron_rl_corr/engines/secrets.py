"""Keys that no message may show: whoever sends one keeps it here, and every message is searched for it.

A server, or a proxy before it, may quote what it was sent, and in many ways: as it is, with the escapes of
JSON, of a URL or of HTML, or in base64.
"""

from __future__ import annotations

import base64
import re
from html.entities import codepoint2name
from weakref import WeakKeyDictionary

HIDDEN = "***"
_CONTROL = {code: "?" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}
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


def without_keys(text: str) -> str:
    """The text with *** in the place of each secret."""
    for patterns in list(_PATTERNS.values()):
        for pattern in patterns:
            text = pattern.sub(HIDDEN, text)
    return text


def longest_secret() -> int:
    """Most characters that a secret may take in any of its forms."""
    return 8 * max(_LENGTHS.values(), default=0)


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
