"""Units behind a number: which words are units, and when two ways to write one mean the same.

Units are compared, not converted: 5 m and 500 cm are different answers.
"""

from __future__ import annotations

import re

_SAME = """
mm millimeter millimetre 毫米
cm centimeter centimetre 厘米
dm decimeter decimetre
m meter metre mtr 米
km kilometer kilometre 千米 公里
in inch inche
ft foot feet
yd yard
mi mile
mg milligram
g gram gm 克
kg kilogram kgs 千克 公斤
t ton tonne
oz ounce
pound lb £ gbp
ml milliliter millilitre
l liter litre 升
gal gallon
ms millisecond
s second sec 秒
min minute 分钟
h hour hr 小时
day 天
week wk
month mo
year yr 年
hz hertz
j joule
w watt
kw kilowatt
v volt
n newton
pa pascal
a amp ampere
k kelvin
mol mole
ohm ω
rad radian
degree deg ° 度
celsius degree-c
fahrenheit degree-f
dollar $ usd us$
euro € eur
yen ¥ jpy
rupee ₹ rs inr
yuan 元 rmb cny
cent ¢
qt quart
mi/h mph
km/h kmh kph kmph
unit
""".strip()
_SHORT = """
pt point
cc
gb gigabyte
mb megabyte
kb kilobyte
tb terabyte
psi
rpm
am
pm
cup
man men
boy
egg
pen
box
can
car
bus buses
bag
jar
dog
cat
cow
hen
pig
kid
"""
"""Units where they stand behind a number and a space; elsewhere they may be letters that are multiplied."""
CURRENCIES = "$£€¥₹¢"
SINGLE = "mgshlLNJWVKACF"
"""Single letters that are units where they stand behind a number and a space: 5 m, not 5m."""
SCALES = {
    "dozen": 12,
    "hundred": 10**2,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
    "万": 10**4,
    "亿": 10**8,
}
"""Words that multiply the number before them."""
_NO_UNITS = """
a above an and approximately are at base below but by cubed divided equals exactly factorial from greater
half if infinite is least less minus mod modulo more most negative no not of or over plus point positive
quarter remainder root solution solutions squared than the third thirds times to undefined
"""
NO_UNITS = frozenset(_NO_UNITS.split())
"""Words behind a number that say something else of it, so that the number alone is not what was meant."""
_FRACTIONS = """
halve third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth sixteenth twentieth hundredth
thousandth millionth billionth trillionth
"""
_NAMES = """
zero two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety
"""
_COUNTS = """
quadrillion quintillion googol lakh crore gross score doubled tripled halved fewer larger smaller true false
wrong
"""
NUMBERS = frozenset(("one", *_NAMES.split(), *SCALES))
FRACTIONS = frozenset(f"{word}s" for word in _FRACTIONS.split())
COUNTS = frozenset((*_FRACTIONS.split(), *_NAMES.split(), *_COUNTS.split()))
"""Further such words where they end a unit, in the singular: 3 tenths, not 3 tenth graders."""

_CANONICAL = {word: line.split()[0] for line in (_SAME + _SHORT).splitlines() for word in line.split()}
KNOWN = frozenset(word for line in _SAME.splitlines() for word in line.split())
SPACED = frozenset(_CANONICAL) - KNOWN | {f"{word}s" for word in _SHORT.split()}
POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_CAPITAL = re.compile(r"\b(?:(?=[GT]b(?:ps)?\b)|M(?=(?:W|Hz|Pa|m|g|J|V|L|eV|b|bps)\b))")
"""Before a symbol whose capitals tell it from another: MW from mW, Gb from GB."""
_SYMBOL = re.compile(r"[kmMGT](?:W|Hz|Pa|J|eV|bps)|[km][AVN]")
_FACTOR = re.compile(r"(?P<name>[^\d^{}\s]+)\s*\^?\s*\{?(?P<power>-?\d)?\}?")
MOST_WORDS = 4


def is_known(word: str) -> bool:
    """True if a word is a unit of the table, in the singular or plural."""
    return _singular(word.casefold()) in KNOWN


def is_spaced(word: str) -> bool:
    """True if a word is a unit where it stands behind a number and a space."""
    return word.casefold() in SPACED or _SYMBOL.fullmatch(word) is not None


def canonical(text: str) -> str | None:
    """One way to write a unit, for all that mean the same; None where the words are not a unit.

    Example: canonical("square centimeters") == canonical("cm^2") == "cm^2"; canonical("miles per
    hour") == "mi/h".
    """
    text = re.sub(r"\s*\^\s*\{?\s*(-?\d)\s*\}?", r"^\1", text)
    text = _CAPITAL.sub("capital", text)
    words = re.sub(r"\s*(?:/|\bper\b)\s*", "/", text.casefold().replace("\\cdot", " ").replace("*", " "))
    words = re.sub(
        r"(?:degrees?|°)\s*(c|f)(?:elsius|ahrenheit)?\b", r"degree-\1", re.sub(r"\bus \$", "us$", words)
    )
    parts = [_factors(part) for part in words.strip().split("/")]
    if len(words.replace("/", " ").split()) > MOST_WORDS or None in parts:
        return None
    return _CANONICAL.get("/".join(parts), "/".join(parts))


def fit(label: str | None, answer: str | None) -> bool:
    """True if an answer's unit, or that it has none, fits to the label's."""
    if label is None or answer is None or label == answer:
        return True
    return "degree" in (label, answer) and {"celsius", "fahrenheit"} & {label, answer} != set()


def _factors(text: str) -> str | None:
    """The canonical form of "square centimeters" or "kg m^2", without fractions."""
    found, power = [], None
    for word in text.split():
        if word in POWERS:
            power = POWERS[word]
            continue
        factor = _FACTOR.fullmatch(word)
        if factor is None:
            return None
        name = _singular(factor["name"].strip("."))
        if factor["name"] in NO_UNITS or name in SCALES or name in COUNTS and text.endswith(word):
            return None
        exponent = power or factor["power"]
        found.append(_CANONICAL.get(name, name) + (f"^{exponent}" if exponent else ""))
        power = None
    return " ".join(found) or None


def _singular(word: str) -> str:
    if word in _CANONICAL or len(word) < 3:
        return word
    return word.removesuffix("s") if word.endswith("s") and not word.endswith("ss") else word
