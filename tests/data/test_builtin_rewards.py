"""Built-in rewards: by hand, and against those who defined them."""

import math
import string
import sys

import pytest

from megatron_rl_corr.config.reward_specs import BUILTIN_REWARDS, parse_rewards
from megatron_rl_corr.data.answers import answer_of
from megatron_rl_corr.data.builtin_rewards import builtin_reward
from megatron_rl_corr.data.reward_input import RewardInput


def value(spec, response="", label=None, tokens=0):
    [parsed] = parse_rewards([spec], [], [], max_new_tokens=20)
    return builtin_reward(parsed)(RewardInput("p", response, label, output_ids=[5] * tokens))


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"first \boxed{1}, then \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{1} \boxed{2", None),
        (r"\boxed {\{1, 2\}}", r"\{1, 2\}"),
        ("<answer>a</answer> <answer> b</answer>", " b"),
        ("<answer>a</answer> <answer>b", None),
        (r"\boxed{5 + \boxed{3}", None),
        ("<answer>a", None),
        (r"\boxed{\frac{1}{2}, so\n\n\boxed{3}".replace(r"\n", "\n"), "3"),
        (r"\fbox{5}", "5"),
        (r"\boxed{\boxed{5}}", r"\boxed{5}"),
        (r"\boxed{7} and then {", "7"),
        (r"<answer>\boxed{3}</answer>", "3"),
        (r"so} \\\boxed{4}}", "4"),
        ("plain", "plain"),
        ("", ""),
    ],
)
def test_answer_when_marked_then_the_last_mark_that_is_closed(response, answer):
    assert answer_of(response) == answer


def test_answer_when_ten_thousand_boxes_are_open_then_found_in_no_time():
    assert answer_of("\\boxed{" * 50_000) is None


@pytest.fixture(scope="module")
def equals():
    [parsed] = parse_rewards(["math"], [], [])
    function = builtin_reward(parsed)
    return lambda response, label: function(RewardInput("p", response, label))


def test_math_when_the_answer_has_another_form_then_equal_as_mathematics(equals):
    right = [
        (r"It is \boxed{42}.", 42),
        (r"\boxed{42}", "42"),
        (r"so \boxed{\frac{1}{2}}", "0.5"),
        (r"\boxed{0.5}", r"\frac12"),
        ("6 x 7 = 42", "42"),
        ("The answer is $12$", "$12$"),
        ("10 apples", "10"),
        (r"\boxed{41}, no, \boxed{42}", 42.0),
        (r"\boxed{x^2 + 2x + 1}", "(x+1)^2"),
        (r"\boxed{1,234}", "1234"),
        (r"\boxed{1234}", "1,234"),
        ("it makes 72", "She has 3 x 24. #### 72"),
        (r"\boxed{2\sqrt{2}}", r"so it is \boxed{\sqrt{8}}"),
        ("<answer>1/3</answer>", r"\frac{1}{3}"),
        ("7", ["8", "7"]),
        (r"\boxed{0.00001}", 1e-05),
        (r"\boxed{10^{23}}", 1e23),
        (r"\boxed{13.}", "13"),
        ("<answer> 13. </answer>", "13"),
        (r"\boxed{13}", "13."),
        (r"\boxed{.5}", 0.5),
        (r"\boxed{0}", -0.0),
    ]
    wrong = [
        (r"\boxed{42}, no, \boxed{41}", 42),
        ("12 and 13", "12"),
        ("", "42"),
        ("I do not know.", "42"),
        (r"\boxed{}", "0"),
        (r"\boxed{3.14}", r"\pi"),
        ("42 " + "x" * 2000, "42"),
        (r"\boxed{" + "1" * 2000 + "}", "1"),
        (r"\boxed{x", "x"),
    ]
    assert [pair for pair in right if equals(*pair) != 1] == []
    assert [pair for pair in wrong if equals(*pair) != 0] == []


@pytest.mark.parametrize("label", [None, {"a": 1}, [], "", "#### ", math.nan, [1, math.inf], True])
def test_math_when_the_label_is_no_mathematics_then_an_error_that_shows_it(equals, label):
    with pytest.raises(ValueError, match="row 0 of the data set has the label .*; "):
        equals("1", label)


def test_exact_when_only_case_width_and_spaces_differ_then_1():
    right = [
        ("Rome", "rome"),
        ("  New \n York ", "new york"),
        ("\uff21\uff22", "ab"),
        ("42", 42),
        ("42", 42.0),
        ("b", ["a", "B"]),
        ("It is \\boxed{Stra\u00dfe}", "STRASSE"),
        ("think <answer>yes</answer>", "Yes"),
    ]
    assert [value("exact", *pair) for pair in right] == [1.0] * len(right)
    assert [value("exact", *pair) for pair in (("Rome.", "Rome"), ("42", "42.0"), ("", "x"))] == [0.0] * 3


def test_f1_when_counted_by_hand_then_that():
    # Words "cat sat on mat" and "cat on mat mat": 3 in common of 4 and 4.
    assert value("f1", "The cat sat on the mat!", "a cat on mat mat") == 2 * 3 / 8
    assert value("f1", r"so \boxed{red car}", ["blue", "red red"]) == 2 * 1 / 4
    assert [value("f1", *pair) for pair in (("", ""), ("the", "a"), ("the", "cat"), ("dog", "cat"))] == [
        1,
        1,
        0,
        0,
    ]


def test_f1_when_squads_own_code_counts_then_the_same():
    from transformers.data.metrics.squad_metrics import compute_f1

    texts = [
        "The Normans (Norman: Nourmands)",
        "normans",
        "a the an",
        "10th and 11th centuries",
        "11th, 10th.",
        "",
        "an-other the-the",
        string.punctuation,
        "É the É",
        "tab\tand\nline a",
    ]
    for answer in texts:
        for label in texts:
            assert value("f1", answer, label) == pytest.approx(compute_f1(label, answer), abs=1e-12), (
                answer,
                label,
            )


def test_format_when_tags_are_there_once_in_order_or_the_pattern_matches_all_then_1():
    right = ["<think>a</think><answer>b</answer>", " <think>\n1 < 2\n</think>\n\n<answer>\nb</answer>\n"]
    wrong = [
        "",
        "<think>a</think>b",
        "x<think>a</think><answer>b</answer>",
        "<answer>b</answer><think>a</think>",
        "<think>a</think> so <answer>b</answer>",
        "<think></think><think>a</think><answer>b</answer>",
        "<think>a<answer>b</answer></think>",
        "<think>a</think><answer>b</answer>!",
    ]
    assert [value("format", one) for one in right] == [1.0] * 2 and [
        value("format", one) for one in wrong
    ] == [0.0] * 8
    assert value("format:pattern=a=(1,2|3).*", "a=1,2\nand so on") == 1.0
    assert value("format:pattern=a", "ba") == value("format:pattern=a", "ab") == 0.0


def test_overlong_when_computed_by_dapos_equation_13_then_that():
    # L_max 20 = max_new_tokens, L_cache 8: 0 to 12 tokens, then (12 - y) / 8, -1 above 20.
    lengths = [0, 12, 13, 16, 20, 25]
    assert [value("overlong:cache=8", tokens=y) for y in lengths] == [0, 0, -1 / 8, -4 / 8, -1, -1]
    assert [value("overlong:cache=4,max=10,penalty=0.5", tokens=y) for y in (6, 7, 10, 20)] == [
        0,
        -0.125,
        -0.5,
        -0.5,
    ]


def test_length_when_computed_then_a_share_of_the_penalty():
    assert [value("length", tokens=y) for y in (0, 5, 20)] == [0, -0.25, -1]
    assert value("length:max=10,penalty=2", tokens=5) == -1.0


def test_max_when_nothing_says_what_it_is_then_refused():
    [parsed] = parse_rewards(["length"], [], [])
    with pytest.raises(ValueError, match="length needs max where there is no run: give length:max=N"):
        builtin_reward(parsed)


def test_built_in_rewards_when_listed_then_each_can_be_made():
    for name in BUILTIN_REWARDS:
        value("overlong:cache=1" if name == "overlong" else name, "1", "1", 1)


def test_math_when_math_verify_is_not_installed_then_the_extra_that_brings_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ValueError, match=r"math needs math-verify: pip install 'megatron_rl_corr\[math\]'"):
        value("math", r"\boxed{1}", "1")
