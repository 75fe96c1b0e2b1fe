"""`math` against a table by hand, and against itself: what it accepts it reads to the last digit."""

import pytest

from megatron_rl_corr.data.answers import last_formula
from megatron_rl_corr.data.math_reward import MathReward
from megatron_rl_corr.data.math_text import label_reading, readings
from megatron_rl_corr.data.reward_input import RewardInput
from tests.data.math_cases import RIGHT, UNREADABLE, WRONG
from tests.tiers import IN_MATRIX, matrix

pytestmark = matrix

PLACED = (
    "boxed",
    "fbox",
    "<answer>",
    "answer",
    "Answer",
    "答案",
    "It ",
    "She ",
    "So ",
    "####",
    "point",
    "price",
)
"""What an answer of the table has that says itself where it stands in the response."""
FURTHER = [
    "x+y=3",
    r"\frac{\pi}{6}",
    r"\left( 3, \frac{\pi}{2} \right)",
    "p - q",
    "-2 + 7i",
    "x^3+3x-6",
    r"15\mbox{ cm}^2",
    r"\begin{pmatrix} -7 \\ 16 \\ 5 \end{pmatrix}",
    r"x \in [-2,7]",
    "1,5",
    r"32,\!000",
    "2220_5",
    r"\frac{\sqrt{21}}{14}",
    r"\frac{x^2}{4}+\frac{y^2}{9}=1",
    r"\text{ellipse}",
    r"5.4 \text{ cents}",
    r"\frac{270}7\text{ degrees}",
    r"\frac 59",
    r"\{(1,2),(3,4)\}",
    "a=3, b=4",
    r"\emptyset",
    "2^{n-1}",
    r"\left\lfloor\frac{n}{2}\right\rfloor",
    r"\binom{10}{3}",
    r"-3 \le x \le 5",
    r"\sin^2\theta",
    r"\sqrt[3]{2}",
    r"3.5\times10^{-4}",
    r"\frac{8}{9}\text{ m}",
    r"12\text{ km/h}",
    "x=1,y=2",
    r"\pm\sqrt{3}",
    "|x-1|",
    "17.0",
    "1.0e10",
    r"\frac{7}{2}\text{ or }3",
    r"2\lambda+1",
    r"\log_{10} 5",
    "O(1)",
    r"\zeta(3)",
]
"""Labels as data sets of competition mathematics have them."""
READABLE = [label for label in (*RIGHT, *WRONG, *FURTHER) if "boxed" not in label and "####" not in label]
SOME = dict.fromkeys(READABLE if IN_MATRIX else READABLE[::3])


@pytest.fixture(scope="module")
def math():
    return MathReward()


def score(math, label, answer, **how):
    response = answer if any(mark in answer for mark in PLACED) else f"So \\boxed{{{answer}}} it is."
    return math(RewardInput("p", response, label, **how))


@pytest.mark.parametrize("label", RIGHT)
def test_math_when_the_answer_is_right_in_any_notation_then_1(math, label):
    assert [answer for answer in RIGHT[label] if score(math, label, answer) != 1] == []


@pytest.mark.parametrize("label", WRONG)
def test_math_when_the_answer_is_wrong_then_0(math, label):
    assert [answer for answer in WRONG[label] if score(math, label, answer) != 0] == []


def test_table_when_counted_then_of_some_size():
    assert sum(map(len, (*RIGHT.values(), *WRONG.values()))) >= 500


@pytest.mark.parametrize("label", UNREADABLE)
def test_label_when_not_read_whole_then_a_problem(math, label):
    assert math.label_problem(label)
    with pytest.raises(ValueError, match="^row 7 of the data set has the label .*; "):
        math(RewardInput("p", "1", label, row=7))


@pytest.mark.parametrize("label", SOME)
def test_label_when_given_as_the_answer_then_1(math, label):
    forms = ["\\boxed{%s}", "<answer>%s</answer>"]
    if "$" not in label:
        forms += [
            "\\boxed{$%s$}",
            "we get $\\boxed{%s}$",
            "The answer is $%s$.",
            "Hence $$%s$$",
            "Hence \\(%s\\).",
        ]
    assert [form for form in forms if math(RewardInput("p", form % label, label)) != 1] == []


@pytest.mark.parametrize("label", SOME)
def test_label_when_a_digit_of_it_is_another_then_0(math, label):
    equal = []
    for place, digit in enumerate(label):
        if digit.isascii() and digit.isdigit():
            changed = label[:place] + str((int(digit) + 1) % 10) + label[place + 1 :]
            equal += [changed] if math(RewardInput("p", f"\\boxed{{{changed}}}", label)) else []
    assert equal == []


@pytest.mark.parametrize(
    ("label", "part"),
    [
        ("5e-3", "it can be read as '0.005' or '5 e -3'; write which"),
        ("128_8", "a digit that base 8 does not have"),
        ("12 34", "there is nothing between the numbers '12' and '34'"),
        (r"\foo{5}", r"math-verify does not know \foo"),
        ("12 cm by 4 cm", "the letters 'cm' would be multiplied"),
        (r"5^{0}_{3}", "math-verify"),
        ("12,34,567", "'12,34,567' may be a list or a number"),
        ("2 3/2", "may be a mixed number or a product"),
        (r"\boxed{5", "its box is not closed"),
        ("It depends on the apples", "is a sentence"),
    ],
)
def test_label_when_not_read_whole_then_the_reason_is_named(math, label, part):
    assert part in math.label_problem(label)


def test_label_when_a_list_then_each_must_be_readable(math):
    assert math.label_problem([7, "7.0", "1 1/2"]) is None
    assert "nothing between the numbers '12' and '34'" in math.label_problem([7, "12 34"])
    assert "use exact" in math.label_problem(True) and "use exact" in math.label_problem(["yes", True])


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("It is 2 2/3 in all", "2 2/3"),
        ("所以答案是５。", "5"),
        ("x = 3, so y = 1 000 000.", "1 000 000"),
        ("5 + 3 = 8", "8"),
        ("The answer is 12. I tried 3.", "12"),
        ("To answer this, take 3. We get 7.", "7"),
        ("(see 5)", "5"),
        ("The answer is 6 x 7 = 42, not 41", "42"),
        ("costs $5 and $6 more", "$6"),
        ("is $x^2$ then", "x^2"),
        ("It is 5 million people", "5 million"),
        ("12 cm long", "12 cm"),
        ("5 in the box", "5"),
        ("it was 20% off", "20%"),
        ("at (3, 4).", "(3, 4)"),
        ("code 0x1F", "0x1F"),
        ("so 120_8", "120_8"),
        ("none", None),
        ("", None),
        ("It is 7, then **34**.", "34"),
        ("2**3", "2**3"),
        ("The answer is (C).", "C"),
        ("Answer: B", "B"),
    ],
)
def test_formula_when_searched_in_a_sentence_then_the_whole_of_it(text, found):
    assert last_formula(text) == found


@pytest.mark.parametrize(
    ("response", "value"),
    [
        ("The answer is minus 5.", "-5"),
        ("The answer is negative 5", "-5"),
        ("The answer is - 5.", "-5"),
        ("The answer is –5.", "-5"),
        ("So x = - 5", "-5"),
        ("It is minus $5$.", "-5"),
        ("I count:\n- 5 apples", "5"),
        ("7 minus 5 is 2", "2"),
        ("5 minus 0 is 5", "5"),
        ("He ran 5 times.", "5"),
        ("She has 5 fewer apples.", "5"),
        ("The answer is 5 - a prime", "5"),
        ("The answer is 5 and I am sure.", "5"),
        ("It costs $5/hour", "5"),
        ("I gave my cousin 5", "5"),
        ("2 + 3 -> 5", "5"),
        ("=> 5", "5"),
        ("> 5 it is", "5"),
        ("It is <b>5</b>.", "5"),
        ("B", "B"),
        ("**B**", "B"),
        ("Monday", "Monday"),
        ("No solution.", "no solution"),
        ("2x", "2x"),
        ("2^x", "2^x"),
    ],
)
def test_response_when_without_a_mark_then_signs_and_words_belong_to_the_answer(math, response, value):
    assert math(RewardInput("p", response, value)) == 1
    assert math(RewardInput("p", response, "5" if value == "-5" else "-5")) == 0


@pytest.mark.parametrize(
    "tail",
    [
        r"2 \sqrt{3}",
        "2*sqrt(3)",
        "2*x",
        "2/x",
        "2^x",
        "2³",
        "2 or more",
        ">=2",
        "≥ 2",
        "x > 2",
        "(x+1) < 2",
        "2 and a half",
        "2 thirds",
        "2 halves",
        "2 times 3",
        "2 squared",
        "2 over 3",
        "2 - x",
        "sin(2)",
        "ln 2",
        r"\log_4 2",
        r"\sqrt[2]{5}",
    ],
)
def test_response_when_a_number_is_a_part_of_another_value_then_it_is_no_answer(math, tail):
    for response in (f"The answer is {tail}.", f"It is {tail}", f"So we get {tail}, as it seems."):
        assert math(RewardInput("p", response, "2")) == 0


def test_formula_when_the_text_was_cut_in_it_then_not_taken(math):
    assert last_formula("It is 12", cut=True) is None
    assert last_formula("It is 12 apples", cut=True) == "12"
    assert score(math, "12", "It is 12", finish_reason="length") == 0
    assert score(math, "12", "It is 12", finish_reason="stop") == 1
    assert last_formula("1" * 1500 + " x") is None  # its beginning is beyond what is searched


def test_text_when_it_may_mean_two_things_then_an_answer_may_mean_either(math):
    assert score(math, "0.002", "2e-3") == 1 and score(math, "2e - 3", "2e-3") == 1
    assert score(math, "5 m", "5m") == 1 and score(math, "5m", "5 m") == 1 and score(math, "5m", "5") == 0
    assert {one.latex for one in readings("3,14")} == {"3, 14", "3.14"} and label_reading(
        "3,14"
    ).latex == "3, 14"


def test_texts_when_long_or_odd_then_read_in_no_time(math):
    many = (
        "a" * 1000,
        "1 " * 500,
        "(" * 1000,
        "√(" * 300,
        "{" * 900,
        "\\text{" * 150,
        "1,234" * 200,
        "$" * 1000,
        "5 " + "km " * 300,
        "\\boxed{" * 100 + "5" + "}" * 100,
        "2^" * 300 + "2",
        "1" + " " * 900 + "x",
        "5" + "\\, " * 250 + "x",
    )
    for text in many:
        assert score(math, "5", f"<answer>{text}</answer>") in (0, 1) and last_formula(text) != ""
