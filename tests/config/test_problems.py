"""Everything that is wrong is refused at once: the collector, the dataclasses that use it,
whole command lines.
"""

import itertools
import pickle
from dataclasses import dataclass
from typing import Annotated, Literal

import pytest

from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.config.fields import Options, Positive, make, option
from megatron_rl_corr.config.flags import parse
from megatron_rl_corr.config.problems import Nothing, Problems, Refusal, Unknown, check_each, known, numbered
from megatron_rl_corr.integrations import megatron_rl_hooks


def refuse(text, kind=ValueError):
    raise kind(text)


def problems_of(make_it):
    with pytest.raises(Refusal) as raised:
        make_it()
    return list(raised.value.problems)


def test_texts_when_there_are_several_then_numbered_with_their_count_and_one_alone_is_as_it_was():
    assert numbered(["`a` is wrong"]) == "`a` is wrong"
    assert numbered(["a:\n  x\n  y", "b"]) == "2 problems:\n  1. a:\n       x\n       y\n  2. b"
    lines = numbered(map(str, range(10))).splitlines()
    assert lines[0] == "10 problems:" and lines[1] == "   1. 0" and lines[10] == "  10. 9"


def test_checks_when_some_refuse_then_the_others_run_and_their_results_are_there():
    problems = Problems()
    assert problems.check("first", lambda: refuse("one")) is None
    assert problems.check("second", lambda: 2) == 2
    assert problems.check("third", lambda: refuse("disk", OSError)) is None
    with pytest.raises(Refusal) as raised:
        problems.raise_all(partial="half")
    assert str(raised.value) == "2 problems:\n  1. one\n  2. disk" and raised.value.partial == "half"


def test_check_when_one_that_it_needs_failed_then_it_and_what_needs_it_are_left_out_silently():
    problems, ran = Problems(), []
    problems.check("folder", lambda: refuse("no folder"))
    for name, needs in (("files", ["folder"]), ("tensors", ["files"]), ("prompts", [])):
        problems.check(name, lambda name=name: ran.append(name), needs=needs)
    assert ran == ["prompts"] and problems.found == ["no folder"]
    assert not problems.passed("tensors") and problems.passed("prompts")


def test_problem_when_several_checks_find_it_then_listed_once_and_lists_are_joined():
    problems = Problems()
    for texts in (["a", "b"], ["b", "c"], ["a"]):
        with problems.catch():
            raise Refusal(texts)
    assert problems.found == ["a", "b", "c"]
    assert not problems.accepts(lambda: refuse("a")) and problems.accepts(lambda: None)


def test_error_of_another_kind_when_a_check_raises_it_then_it_is_not_taken_for_a_problem():
    with pytest.raises(KeyError):
        Problems().check("broken", lambda: {}["x"])


def test_values_when_each_is_checked_then_every_wrong_one_is_told():
    assert check_each(int, ["1", "2"]) == [1, 2]
    assert problems_of(lambda: check_each(lambda one: one > 0 or refuse(f"{one}"), [-1, 2, -3])) == [
        "-1",
        "-3",
    ]
    with pytest.raises(Unknown):  # nothing is wrong, but a result is missing
        check_each(lambda one: Nothing().size, [1])


def test_refusal_when_it_goes_to_another_process_then_its_texts_are_the_same():
    copy = pickle.loads(pickle.dumps(Refusal(["a", "b"])))
    assert copy.problems == ("a", "b") and str(copy) == "2 problems:\n  1. a\n  2. b"


def test_value_when_it_was_refused_then_unknown():
    assert known(lambda: 3) == 3 and known(lambda: Nothing().size) is None


@dataclass(frozen=True, kw_only=True)
class Oven(Options):
    """Oven: how bread is baked."""

    heat: Annotated[float, Positive()] = 220.0
    mode: Literal["fan", "grill"] = "fan"
    racks: Annotated[int, Positive()] = 1
    speed: int | None = option(None, needs="mode=fan")
    doors: tuple[str, ...] = ()

    def check(self):
        if self.racks > self.heat:
            raise ValueError("`racks` above `heat`")

    def check_doors(self):
        check_each(lambda one: one in ("left", "right") or refuse(f"`doors` {one}"), self.doors)

    def check_speed(self):
        if self.speed == 0:
            raise ValueError("`speed` 0")


def test_options_when_several_values_are_wrong_then_all_are_listed():
    assert problems_of(lambda: Oven(heat=-1, mode="of", racks=2.5)) == [
        "`heat` must be positive, got -1",
        "`mode` must be one of fan, grill; got 'of'",
        "`racks` must be a whole number, got 2.5",
    ]
    assert problems_of(lambda: Oven(racks=300, doors=("top", "left", "back"), speed=0)) == [
        "`racks` above `heat`",
        "`doors` top",
        "`doors` back",
        "`speed` 0",
    ]


def test_check_when_it_reads_a_refused_value_then_it_is_left_out():
    # 5 racks are above a heat of -1, and of a mode that is none it is not known whether a
    # speed has an effect.
    assert problems_of(lambda: Oven(heat=-1, racks=5)) == ["`heat` must be positive, got -1"]
    assert problems_of(lambda: Oven(mode="of", speed=2)) == ["`mode` must be one of fan, grill; got 'of'"]


def test_option_without_effect_when_its_value_is_wrong_too_then_only_the_first_is_told():
    needless = "`speed` 0 has no effect without `mode` fan; drop it, or add `mode` fan"
    assert problems_of(lambda: Oven(mode="grill", speed=0)) == [needless]


def test_options_when_made_in_part_then_refused_values_can_not_be_read_and_others_can():
    problems = Problems()
    oven = make(Oven, {"heat": -1, "racks": 3}, problems, unknown=["doors"])
    assert problems.found == ["`heat` must be positive, got -1"] and oven.racks == 3 and oven.mode == "fan"
    for name in ("heat", "doors"):
        with pytest.raises(Unknown):
            getattr(oven, name)


REQUIRED = {
    "--rollout-url": ["http://a:1"],
    "--rollout-hf-checkpoint": ["m"],
    "--rollout-prompts": ["p"],
    "--rollout-reward-function": ["r.py:r"],
}
MISTAKES = {
    "word for a number": ({"--rollout-group-size": ["x"]}, "--rollout-group-size: invalid int value: 'x'"),
    "no value": ({"--rollout-top-k": []}, "--rollout-top-k: expected one argument"),
    "out of bounds": ({"--rollout-temperature": ["0"]}, "--rollout-temperature must be positive, got 0"),
    "unknown flag": ({"--rollout-los": ["dapo"]}, "unknown flag --rollout-los; did you mean --rollout-loss?"),
    "address": (
        {"--rollout-url": ["http://a:1", "b:2"]},
        "--rollout-url: a server address is http://HOST:PORT or https://HOST:PORT, got 'b:2'",
    ),
    "required": ({"--rollout-prompts": None}, "--rollout-prompts is required; see --help"),
    "rule": (
        {"--rollout-rs": ["token_k9"], "--rollout-rs-threshold": ["2"]},
        "--rollout-rs: unknown rule 'token_k9'",
    ),
    "threshold": (
        {"--rollout-is": ["token"], "--rollout-is-threshold": ["two"]},
        "--rollout-is-threshold must be a number or LOWER_UPPER such as 0.5_5.0, got 'two'",
    ),
    "coefficient": ({"--rollout-entropy-coef": ["-1"]}, "--rollout-entropy-coef must be at least 0, got -1"),
    "no effect": (
        {"--rollout-max-turns": ["3"]},
        "--rollout-max-turns 3 has no effect without --rollout-environment",
    ),
    "both topics": (
        {"--rollout-reference-reset": ["5"]},
        "--rollout-reference-reset 5 has no effect without a penalty",
    ),
    "two values": (
        {"--rollout-stop-token-ids": ["1", "a", "-2"]},
        "--rollout-stop-token-ids must be token ids, whole numbers of at least 0, got 'a'",
    ),
    "reward": (
        {"--rollout-reward-function": ["maths"]},
        "--rollout-reward-function 'maths': there is no built-in reward of this name",
    ),
}
"""Name -> (its flags, the beginning of what is told of it)."""
MORE = {"two values": 1}
"""Further problems of a mistake."""


def command_line(*mistakes):
    flags = REQUIRED | {flag: words for name in mistakes for flag, words in MISTAKES[name][0].items()}
    return [word for flag, words in flags.items() if words is not None for word in (flag, *words)]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_command_line_when_it_has_some_mistakes_then_exactly_these_are_told(count):
    groups = list(itertools.combinations(MISTAKES, count))
    for names in groups:
        found = problems_of(lambda names=names: parse(command_line(*names)))
        for name in names:
            assert sum(text.startswith(MISTAKES[name][1]) for text in found) == 1, (names, found)
        assert len(found) == count + sum(MORE.get(name, 0) for name in names), (names, found)
    assert len(groups) == {1: 13, 2: 78, 3: 286}[count]  # 13 over 1, 2 and 3


def test_command_line_when_all_mistakes_are_in_it_then_each_is_told_once():
    found = problems_of(lambda: parse(command_line(*MISTAKES)))
    assert len(found) == len(MISTAKES) + 1


@pytest.mark.parametrize(
    "changed, told",
    [
        # What was meant is not missing, nor what it would be judged with.
        (
            {"--rollout-prompts": None, "--rollout-prompt": ["p"]},
            ["unknown flag --rollout-prompt; did you mean --rollout-prompts?"],
        ),
        ({"--rollout-url": []}, ["--rollout-url: expected at least one argument"]),
        ({"--rollout-url": None, "--rollout-replay": []}, ["--rollout-replay: expected one argument"]),
        (
            {"--rollout-group-size": ["one"], "--rollout-group-filter": ["spread"]},
            ["--rollout-group-size: invalid int value: 'one'"],
        ),
        (
            {"--rollout-updates-per-batch": ["0"], "--rollout-clip-ratio-low": ["0.1"]},
            ["--rollout-updates-per-batch must be positive, got 0"],
        ),
        (
            {"--rollout-is": ["tokn"], "--rollout-max-lag": ["2"]},
            [
                "--rollout-is must be one of token, sequence, geometric, turn, none; got 'tokn'; did you "
                "mean 'token'?"
            ],
        ),
        (
            {
                "--rollout-correction-preset": ["decoupled_tokn_is"],
                "--rollout-is-threshold": ["3"],
                "--rollout-max-lag": ["2"],
            },
            [
                "--rollout-correction-preset: unknown preset 'decoupled_tokn_is'; did you mean "
                "'decoupled_token_is'?"
            ],
        ),
        (
            {"--router-replay": ["R4"], "--router-replay-min-agreement": ["0.5"]},
            ["--router-replay must be one of off, compare, R2, R3; got 'R4'"],
        ),
        (
            {"--rollout-max-new-tokens": ["many"], "--rollout-reward-function": ["overlong:cache=9"]},
            ["--rollout-max-new-tokens: invalid int value: 'many'"],
        ),
        (
            {
                "--rollout-eval-prompts": ["p"],
                "--rollout-eval-temperature": ["-1"],
                "--rollout-eval-top-k": ["4"],
            },
            ["--rollout-eval-temperature must be at least 0, got -1"],
        ),
        (
            {"--rollout-url": ["http://a:1", "--rollout-group-size", "x", "y"]},  # y is no server
            ["--rollout-group-size: invalid int value: 'x'"],
        ),
    ],
)
def test_command_line_when_a_value_is_refused_then_nothing_follows_from_it(changed, told):
    words = [
        word for flag, given in (REQUIRED | changed).items() if given is not None for word in (flag, *given)
    ]
    found = problems_of(lambda: parse(words))
    assert found == told


def test_file_when_it_has_several_mistakes_then_all_are_told_with_its_name(tmp_path):
    path = tmp_path / "correction.yaml"
    path.write_text("rollout_is: tokn\nentropy_coef: -1\nbogus_settings: 3\n")
    words = [*itertools.chain(*((flag, *given) for flag, given in REQUIRED.items()))]
    found = problems_of(
        lambda: parse([*words, "--rollout-correction-config", str(path), "--rollout-loss", "dpo"])
    )
    begins = f"--rollout-correction-config {path}: "
    assert all(text.startswith(begins) for text in found[:3])
    assert [text.removeprefix(begins).split("; ")[0] for text in found[:3]] == [
        "unknown key 'bogus_settings'",
        "--rollout-entropy-coef must be at least 0, got -1",
        "--rollout-is must be one of token, sequence, geometric, turn, none",
    ]
    assert found[3].startswith("--rollout-loss must be one of ppo_clip") and len(found) == 4


def test_words_of_a_peer_when_something_beside_them_is_wrong_then_they_are_right():
    wrong = {"tis_clp": 2, "loss": "vanilla", "kl_loss_type": "low_var_kl", "kl_loss_coef": -1}
    found = problems_of(lambda: RolloutCorrectionConfig.from_dict(wrong))
    assert [text.split(" must")[0] for text in found] == [
        "unknown key 'tis_clp'; did you mean 'tis_clip'?",
        "`kl_loss_coef`",
    ]


def test_key_when_it_is_a_misspelt_one_then_what_depends_on_the_right_one_is_not_judged():
    found = problems_of(
        lambda: RolloutCorrectionConfig.from_dict({"rolout_rs": "token_k3", "rollout_rs_threshold": 2})
    )
    assert found == ["unknown key 'rolout_rs'; did you mean 'rollout_rs'?"]


def test_preset_when_a_setting_is_against_two_of_its_fields_then_told_once():
    found = problems_of(lambda: RolloutCorrectionConfig.from_preset("prime_rl", {"loss": "sapo"}))
    assert len(found) == 1 and "`clip_ratio_low` 0.2 is of `rollout_correction_preset` prime_rl" in found[0]


def test_flags_of_megatrons_own_rl_when_several_are_wrong_then_all_are_told():
    words = ["--rollout-url", "http://a:1", "--rollout-loss", "sapo", "--rollout-is", "tokn"]
    found = problems_of(lambda: megatron_rl_hooks.parse(words))
    assert [text.split(" ")[0] for text in found] == [
        "--rollout-url",
        "--perform-rl-step",
        "--rollout-is",
        "loss",
    ]
