"""The live table, character by character."""

import io
import math

import pytest

from megatron_rl_corr.core.metric_spec import Column, MetricSpec
from megatron_rl_corr.observability.console import LiveTable
from megatron_rl_corr.observability.early_warnings import TRENDS, EarlyWarning

HEADER = "[rl-corr]   step    reward    KL(k3)   weight    ESS    kept  grad norm   tokens/s  version   lag"
HEALTHY = "[rl-corr]      7    0.5312  1.23e-03    1.002  0.913   99.8%     0.4322     12,346        7     1"
EMPTY = "[rl-corr]      8         -         -        -      -       -          -          -        -     -"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def printed(*rows: dict, stream: io.StringIO | None = None, columns=None) -> list[str]:
    stream = io.StringIO() if stream is None else stream
    table = LiveTable(columns, stream)
    for row in rows:
        table.row(row)
    return stream.getvalue().splitlines()


def test_row_when_healthy_then_exactly_this_text(healthy):
    assert printed(healthy) == [HEADER, HEALTHY]


def test_row_when_metrics_are_missing_then_dashes():
    assert printed({"step": 8}) == [HEADER, EMPTY]


def test_row_when_values_are_in_alert_then_marked_and_explained_once(healthy):
    bad = healthy | {
        "rollout_corr/k3_kl": 0.025,
        "rollout_corr/weight_mean": 2.5,
        "rollout_corr/ess": 0.25,
        "rollout_corr/chi2_token": 1.5,
    }
    row = HEALTHY.replace("1.23e-03    1.002  0.913 ", "2.50e-02!   2.500! 0.250!") + "  chi2!"
    assert printed(bad, bad) == [
        HEADER,
        row,
        "[rl-corr] ! KL(k3) 0.025, usually at most 0.01: "
        "train and rollout disagree more than numerics explain",
        "[rl-corr] ! weight 2.5, usually 0.5 to 2: the correction rescales the whole gradient",
        "[rl-corr] ! ESS 0.25, usually at least 0.3: a few samples carry the gradient",
        "[rl-corr] ! chi2 1.5, usually at most 1: raw ratios vary so much that weights are mostly noise",
        row,
    ]


@pytest.mark.parametrize(
    "name, inside, outside",
    [
        ("rollout_corr/weight_mean", (0.5, 2.0), (0.49, 2.01)),
        ("rollout_corr/ess", (0.3, 1.0), (0.29,)),
        ("rollout_corr/k3_kl", (0.0, 0.01), (0.0101,)),
        ("rollout_corr/kl", (-0.01, 0.01), (-0.011, 0.011)),
        ("rollout_corr/chi2_token", (1.0,), (1.01,)),
        ("rollout_corr/nonfinite_tokens", (0,), (1,)),
        ("skipped", (0,), (1,)),
    ],
)
def test_row_when_on_a_bound_then_no_alert_and_beyond_it_an_alert(name, inside, outside):
    for value in inside:
        assert not any("!" in line for line in printed({"step": 1, name: value}))
    for value in outside:
        assert "!" in printed({"step": 1, name: value})[1]


def test_row_when_a_value_is_nan_then_it_is_shown_and_explained():
    lines = printed({"step": 8, "grad_norm": math.nan, "rollout_corr/ess": math.nan})
    assert lines[1:] == [
        "[rl-corr]      8         -         -        -    nan!      -        nan!         -        -     -",
        "[rl-corr] ! grad norm is nan: a number overflowed, or there was no value to average",
        "[rl-corr] ! ESS is nan: a number overflowed, or there was no value to average",
    ]


def test_row_when_twenty_rows_went_by_then_the_header_comes_again():
    lines = printed(*({"step": step} for step in range(1, 42)))
    assert [index for index, line in enumerate(lines) if line == HEADER] == [0, 21, 42]
    assert len(lines) == 44


def test_row_when_a_number_is_too_wide_then_it_is_written_shorter_in_its_place():
    wide = {"step": 123456, "reward/mean": -123456.7, "tokens_per_s": 123456789.0, "weight_lag": 2 / 3}
    assert printed(wide)[1] == (
        "[rl-corr] 123456    -1e+05         -        -      -       -          -      1e+08        -   0.7"
    )


def test_row_when_many_metrics_without_a_column_are_in_alert_then_a_skip_leads_and_the_rest_counts(healthy):
    bad = healthy | {"rollout_corr/kl": 0.02, "rollout_corr/chi2_token": 2.0, "mine": math.nan, "skipped": 1}
    assert printed(bad)[1] == HEALTHY + "  skip! +3"


def test_row_when_everything_is_extreme_then_every_line_keeps_prefix_and_width(healthy):
    extreme = dict.fromkeys(healthy, -1.2345e100) | {"step": 123456, "my/" + "long" * 40: math.inf}
    assert all(line.startswith("[rl-corr] ") and len(line) <= 110 for line in printed(extreme))


def test_row_when_on_a_terminal_then_only_alerts_are_coloured(healthy, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    lines = printed(healthy | {"rollout_corr/ess": 0.25}, stream=Terminal())
    assert lines[0] == f"\x1b[1m{HEADER}\x1b[0m"
    assert "\x1b[31m 0.250!\x1b[0m" in lines[1] and lines[1].count("\x1b[31m") == 1


def test_row_when_no_color_is_set_then_plain_text_on_a_terminal(healthy, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    assert printed(healthy, stream=Terminal()) == [HEADER, HEALTHY]


def test_row_when_a_value_is_no_number_then_the_error_names_it():
    with pytest.raises(TypeError, match="'grad_norm' must be an int or a float, got str"):
        printed({"step": 1, "grad_norm": "big"})


def test_table_when_columns_are_too_wide_then_an_error_says_so():
    with pytest.raises(ValueError, match="columns take 130 characters, more than 110"):
        LiveTable([MetricSpec("a", "a", column=Column(120))], io.StringIO())


def test_table_when_columns_are_chosen_then_only_they_are_printed():
    columns = [
        MetricSpec("step", "the step", column=Column(4)),
        MetricSpec("my/own", "mine", label="mine", column=Column(6)),
        MetricSpec("no/column", "not shown"),
    ]
    assert printed({"step": 3, "my/own": 2.5}, columns=columns) == [
        "[rl-corr] step    mine",
        "[rl-corr]    3     2.5",
    ]


def test_warn_when_a_warning_begins_and_ends_then_all_of_it_in_lines_within_the_width():
    trend = next(trend for trend in TRENDS if trend.name == "mismatch_with_length")
    stream = io.StringIO()
    table = LiveTable(stream=stream)
    table.warn(EarlyWarning(trend, 120, "KL(k3) 0.002 early, 0.008 then; and much that does not fit in"))
    table.warn(EarlyWarning(trend, 120, "", last_step=150))
    *begins, ends = stream.getvalue().splitlines()
    assert len(begins) == 2 and all(len(line) <= 110 for line in begins)
    words = [line.removeprefix("[rl-corr] ! ").removeprefix("[rl-corr]   ") for line in begins]
    sentence = "KL(k3) 0.002 early, 0.008 then; and much that does not fit in"
    assert " ".join(words) == EarlyWarning(trend, 120, sentence).sentence
    assert ends == "[rl-corr] ! No longer, since step 151: the mismatch grows with the responses' length"
