r"""Lists of values, with brackets or without: where math-verify takes a tuple for a set, or
(1, 1, 2) for 1, 2.
"""

from __future__ import annotations

import re

_RELATION = re.compile(r"[<>]|\\(?:leq?|geq?|lt|gt)(?![A-Za-z])")
_BOTH_SIGNS = re.compile(r"\\pm(?![A-Za-z])(?!\s*\})")
_NO_VALUES = re.compile(_RELATION.pattern + r"|[\[\]]|\\(?:to|lim|cup|cap|in|approx|text)(?![A-Za-z])")
_SET = re.compile(r"\s*\\\{(.*)\\\}\s*", re.DOTALL)
_NAME = re.compile(r"\s*[A-Za-z]\w*\s*(?:=|\\in(?![A-Za-z]))")


def same_kind(label: str, answer: str) -> bool:
    r"""True if two lists can be equal by their brackets and, where neither has any, by how many
    values they have.

    Example: (1, 2) is not \{1, 2\}, which 1, 2 is, 1, 1, 2 is not 1, 2, and 1 < x < 2 is not \{1, 2\}; what
    is not a list is of any kind.
    """
    for one, other in ((label, answer), (answer, label)):
        if _RELATION.search(one) and not _RELATION.search(other) and _bracket(other) == r"\{":
            return False
    kinds = {_bracket(label), _bracket(answer)}
    if None in kinds:
        return True
    if kinds == {""}:
        return r"\pm" in label + answer or len(elements(label)) == len(elements(answer))
    return "" in kinds or len(kinds) == 1 or r"\{" not in kinds


def counted(label: str, answer: str) -> tuple[str, str]:
    """The lists with how often each value has stood there, where one of them repeats some and
    neither has brackets.

    Example: counted("1, 1, 2", "2, 1, 1") == ("(1, 1), (1, 2), (2, 1)", "(2, 1), (1, 1), (1, 2)"): as sets
    they would be equal to 1, 2, 2.
    """
    parts = [elements(label), elements(answer)]
    if {_bracket(label), _bracket(answer)} != {""} or all(len(set(part)) == len(part) for part in parts):
        return label, answer
    found = [
        ", ".join(f"({one}, {part[: at + 1].count(one)})" for at, one in enumerate(part)) for part in parts
    ]
    return found[0], found[1]


def both_signs(latex: str) -> str:
    r"""The list with both values of an element whose one \pm stands within braces, where math-verify can't
    read it.

    Example: both_signs(r"\frac{1 \pm 2}{3}") == r"\frac{1 + 2}{3}, \frac{1 - 2}{3}". What stands outside
    braces, and in intervals, limits or several equations, stays.
    """
    if not _BOTH_SIGNS.search(latex) or latex.count("=") > 1 or _NO_VALUES.search(latex):
        return latex
    inner = _SET.fullmatch(latex)
    found = _split(inner[1] if inner else latex)
    if found is None:
        return latex
    values = []
    for element in found:
        signs = list(_BOTH_SIGNS.finditer(element))
        before = element[: signs[0].start()] if len(signs) == 1 else ""
        opened = len(re.findall(r"(?<!\\)\{", before)) - len(re.findall(r"(?<!\\)\}", before))
        if opened > 0 and "=" not in element[signs[0].end() :]:
            values += [f"{before}{sign}{element[signs[0].end() :]}" for sign in "+-"]
        else:
            values.append(element)
    if len(values) == len(found):
        return latex
    return f"\\{{{', '.join(values)}\\}}" if inner else ", ".join(values)


def _bracket(latex: str) -> str | None:
    """The sign that opens a list, empty for one without brackets; None for brackets around no list."""
    latex = _NAME.sub("", latex, count=1).strip()
    opened = next((left for left in ("(", "[", r"\{") if latex.startswith(left)), "")
    return opened if not opened or len(elements(latex.replace("[", "(").replace("]", ")"))) > 1 else None


def elements(latex: str) -> list[str]:
    """The parts of a list, with brackets around it or without."""
    latex = latex.strip()
    for left, right in (("(", ")"), (r"\{", r"\}")):
        if latex.startswith(left) and latex.endswith(right):
            inner = _split(latex[len(left) : -len(right)])
            if inner is not None:
                return inner
    return _split(latex) or [latex]


def _split(latex: str) -> list[str] | None:
    """The parts between the commas that stand in no bracket; None where brackets do not match."""
    parts, depth = [""], 0
    for sign in latex:
        depth += (sign in "([{") - (sign in ")]}")
        if depth < 0:
            return None
        if sign == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += sign
    return [part.strip() for part in parts] if depth == 0 else None
