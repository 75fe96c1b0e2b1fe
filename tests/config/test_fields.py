"""One field of a dataclass is the whole option: its flag, help, checks and rows of the reference
pages come from it.
"""

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import pytest

from megatron_rl_corr import plugin
from megatron_rl_corr.config.fields import Between, Options, Positive, docs_of, option, options_of
from megatron_rl_corr.config.flags import flags_by_field, name_flags
from megatron_rl_corr.config.run import RunConfig

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True)
class Oven(Options):
    """Oven: how bread is baked."""

    bread: str
    """Kind of bread."""
    heat: Annotated[float, Positive("220 is usual", finite=True)] = 220.0
    """Degrees."""
    mode: Literal["fan", "grill"] | None = option(None, none="still")
    """What moves
    the air."""
    share: Annotated[float, Between(0, 1)] = 0.5
    racks: int = 1
    fan_speed: int | None = option(None, needs="mode=fan", usual=3)
    timer: int | None = option(None, needs="mode")

    def check(self) -> None:
        if self.racks > 3:
            raise ValueError("`racks` above 3 do not fit")


@dataclass(frozen=True, kw_only=True)
class Kitchen(Oven):
    """Kitchen: an oven and a lamp."""

    lamp: bool = False
    """Light."""

    def check(self) -> None:
        if self.lamp and self.heat > 300:
            raise ValueError("`lamp` melts")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"heat": 0}, "`heat` must be positive, got 0; 220 is usual"),
        ({"heat": float("nan")}, "`heat` must be positive, got nan; 220 is usual"),
        ({"heat": float("inf")}, "`heat` must be finite, got inf; 220 is usual"),
        ({"heat": "hot"}, "`heat` must be a number, got 'hot'"),
        ({"heat": True}, "`heat` must be a number, got True"),
        ({"mode": "grll"}, "`mode` must be one of fan, grill, still; got 'grll'; did you mean 'grill'?"),
        ({"share": 1.5}, "`share` must be from 0 to 1, got 1.5"),
        ({"racks": 2.5}, "`racks` must be a whole number, got 2.5"),
        ({"racks": None}, "`racks` must be a whole number, got None"),
        ({"bread": 3}, "`bread` must be text, got 3"),
        ({"lamp": "yes"}, "`lamp` must be true or false, got 'yes'"),
        ({"fan_speed": 2}, "`fan_speed` 2 has no effect without `mode` fan; drop it, or add `mode` fan"),
        (
            {"fan_speed": 2, "mode": "grill"},
            "`fan_speed` 2 has no effect without `mode` fan; drop it, or add `mode` fan",
        ),
        ({"timer": 9}, "`timer` 9 has no effect without `mode`; drop it, or add `mode`"),
        ({"racks": 4}, "`racks` above 3 do not fit"),  # of the class that it inherits from
        ({"lamp": True, "heat": 301}, "`lamp` melts"),
    ],
)
def test_options_when_a_value_is_wrong_then_the_field_the_value_and_the_remedy(given, words):
    with pytest.raises(ValueError) as raised:
        Kitchen(**{"bread": "rye", **given})
    assert str(raised.value) == words


def test_options_when_made_then_words_for_none_and_usual_values_are_put_in():
    assert Oven(bread="rye", mode="still").mode is None
    assert (Oven(bread="rye", mode="fan").fan_speed, Oven(bread="rye").fan_speed) == (3, None)
    assert Oven(bread="rye", mode="fan", fan_speed=1).fan_speed == 1


def test_options_when_read_then_flags_docstrings_and_defaults():
    kitchen = options_of(Kitchen)
    assert (kitchen["fan_speed"].flag, kitchen["bread"].required, kitchen["heat"].default) == (
        "--rollout-fan-speed",
        True,
        220.0,
    )
    assert docs_of(Kitchen) == {
        "bread": "Kind of bread.",
        "heat": "Degrees.",
        "mode": "What moves the air.",
        "lamp": "Light.",
    }


def test_every_option_of_a_run_then_it_has_a_docstring_and_a_flag_of_its_own():
    assert set(docs_of(RunConfig)) == set(options_of(RunConfig))
    assert all(text.endswith((".", ").")) and text[0] not in " `" for text in docs_of(RunConfig).values())
    flags = list(flags_by_field().values())
    assert len(set(flags)) == len(flags)


def test_message_of_the_library_when_shown_to_who_gave_flags_then_with_their_names():
    assert name_flags("`urls` and `rollout_is_mode` clip; `racks` stay") == (
        "--rollout-url and --rollout-is-mode clip; `racks` stay"
    )


def test_failure_of_another_rank_when_it_names_a_field_then_its_flag_is_printed(monkeypatch, capsys):
    monkeypatch.setattr(plugin, "_leave", lambda status: None)
    monkeypatch.delenv("RANK", raising=False)
    plugin._leave_after_peer("rank 1 failed: StartupError: `weight_dir` is full")
    assert capsys.readouterr().err == (
        "megatron_rl_corr: rank 1 failed: StartupError: --rollout-weight-dir is full; this is rank 0\n"
    )


OPTION = '''
    oven_heat: Annotated[float, Positive("220 is usual")] = option(180.0, metavar="DEGREES")
    """How hot the oven gets, with `group_size` loaves."""

    oven_mode: Literal["fan", "grill"] = "fan"
    """What moves the air."""
'''
CODE = """
import argparse, json, sys
from megatron_rl_corr.config import flags

sys.path.insert(0, "scripts")
import generate_docs


def parsed(*more):
    try:
        return flags.parse([*json.loads(sys.argv[1]), *more])[1]
    except ValueError as error:
        return str(error)


text = " ".join(
    flags.add_flags(argparse.ArgumentParser(formatter_class=flags.HelpFormatter)).format_help().split()
)
print(
    json.dumps(
        {
            "default": parsed().oven_heat,
            "given": parsed("--rollout-oven-heat", "90").oven_heat,
            "range": parsed("--rollout-oven-heat", "-1"),
            "choice": parsed("--rollout-oven-mode", "fna"),
            "typo": parsed("--rollout-oven-hea", "1"),
            "help": text,
            "page": generate_docs.flags_page(),
        }
    )
)
"""


def test_option_when_added_to_a_dataclass_then_flag_help_check_and_row_without_another_file(tmp_path):
    for folder in ("megatron_rl_corr", "scripts"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    changed = tmp_path / "megatron_rl_corr/config/samples.py"
    text = changed.read_text()
    anchor = "    def check(self) -> None:\n        wrong = [token for token in self.stop_token_ids"
    assert anchor in text
    changed.write_text(text.replace(anchor, OPTION.lstrip("\n") + "\n" + anchor))
    required = [
        "--rollout-url",
        "http://a",
        "--rollout-hf-checkpoint",
        "m",
        "--rollout-prompts",
        "p",
        "--rollout-reward-function",
        "r.py:r",
    ]
    done = subprocess.run(
        [sys.executable, "-c", CODE, json.dumps(required)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["default"], found["given"]) == (180.0, 90.0)
    assert found["range"] == "--rollout-oven-heat must be positive, got -1; 220 is usual"
    assert found["choice"] == "--rollout-oven-mode must be one of fan, grill; got 'fna'; did you mean 'fan'?"
    assert found["typo"] == "unknown flag --rollout-oven-hea; did you mean --rollout-oven-heat?"
    about = "How hot the oven gets, with --rollout-group-size loaves. (default: 180)"
    assert f"--rollout-oven-heat DEGREES {about} --rollout-oven-mode {{fan,grill}}" in found["help"]
    assert f"| `--rollout-oven-heat DEGREES` | {about} |" in found["page"]
