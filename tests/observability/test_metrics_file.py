"""One strict JSON object a step, read back exactly, whatever a crash left behind."""

import json
import logging
import math

import numpy as np
import pytest
import torch

from megatron_rl_corr.observability.metrics_file import MetricsFile, read_metrics


def strict(line: str) -> dict:
    """json.loads that refuses NaN and Infinity, as every reader outside Python does."""

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(line, parse_constant=refuse)


def test_write_when_values_are_finite_then_one_json_line_a_step_is_on_disk_before_closing(tmp_path):
    path = tmp_path / "new" / "metrics.jsonl"
    file = MetricsFile(path)
    file.write({"reward/mean": 0.5, "step": 1, "my/own": 3})
    assert path.read_text() == '{"step": 1, "reward/mean": 0.5, "my/own": 3}\n'
    file.write({"step": 2, "reward/mean": np.float32(0.25), "weight_version": np.int64(2)})
    assert path.read_text().splitlines()[1] == '{"step": 2, "reward/mean": 0.25, "weight_version": 2}'


def test_write_when_values_are_not_finite_then_the_line_is_strict_json_and_reads_back_the_same(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    file.write({"step": 1, "a": math.nan, "b": math.inf, "c": -math.inf, "d": 1.5})
    assert strict(path.read_text()) == {
        "step": 1,
        "a": None,
        "b": None,
        "c": None,
        "d": 1.5,
        "nonfinite": {"a": "nan", "b": "inf", "c": "-inf"},
    }
    (row,) = read_metrics(path)
    assert math.isnan(row.pop("a"))
    assert row == {"step": 1, "b": math.inf, "c": -math.inf, "d": 1.5}


@pytest.mark.parametrize(
    "metrics, error, words",
    [
        ({"step": 1, "loss": torch.tensor(1.0)}, TypeError, "'loss' must be an int or a float, got Tensor"),
        ({"step": 1, "loss": None}, TypeError, "'loss' must be an int or a float, got NoneType"),
        ({"loss": 1.0}, ValueError, "need the key 'step'"),
        ({"step": 1.5}, ValueError, "'step' must be a whole number, got 1.5"),
        ({"step": 1, "nonfinite": 1}, ValueError, "'nonfinite' is reserved"),
    ],
)
def test_write_when_metrics_are_unusable_then_the_error_names_them_and_nothing_is_written(
    tmp_path, metrics, error, words
):
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    with pytest.raises(error, match=words):
        file.write(metrics)
    assert path.read_text() == ""


def test_read_when_the_last_line_is_torn_then_it_is_left_out_and_said(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "a": 1.0}\n{"step": 2, "a"')
    with caplog.at_level(logging.WARNING):
        assert read_metrics(path) == [{"step": 1, "a": 1.0}]
    assert f"{path}:2: the last line is incomplete" in caplog.text


@pytest.mark.parametrize(
    "line, words",
    [
        ('{"step": 2, "a"', "Expecting"),
        ("[1, 2]", "expected a JSON object, got list"),
        ('{"a": 1.0}', "need the key 'step'"),
        ('{"step": 2, "a": "high"}', "'a' must be a number, got \"high\""),
        ('{"step": 2, "a": null}', "'a' must be a number, got null"),
        ('{"step": 2, "nonfinite": ["a"]}', "'nonfinite' must be an object"),
    ],
)
def test_read_when_another_line_is_bad_then_the_error_gives_file_and_line(tmp_path, line, words):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n' + line + '\n{"step": 3}\n')
    with pytest.raises(ValueError) as error:
        read_metrics(path)
    assert f"{path}:2: " in str(error.value) and words in str(error.value)


def test_read_when_a_resumed_run_repeats_steps_then_the_later_attempt_wins(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    for step in (1, 2, 3, 4):
        file.write({"step": step, "attempt": 1})
    file = MetricsFile(path)
    for step in (2, 3):
        file.write({"step": step, "attempt": 2})
    # Step 4 came from weights that the second attempt never had.
    assert read_metrics(path) == [
        {"step": 1, "attempt": 1},
        {"step": 2, "attempt": 2},
        {"step": 3, "attempt": 2},
    ]


@pytest.mark.parametrize(
    "end, kept", [('{"step": 2, "a', []), ('{"step": 2, "a": 5}', [{"step": 2, "a": 5}])]
)
def test_resume_when_the_last_line_has_no_newline_then_the_next_step_has_its_own_line(tmp_path, end, kept):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n' + end)
    file = MetricsFile(path)
    file.write({"step": 3})
    assert read_metrics(path) == [{"step": 1}, *kept, {"step": 3}]


def test_read_when_the_file_is_empty_then_there_are_no_steps(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.touch()
    assert read_metrics(path) == []
