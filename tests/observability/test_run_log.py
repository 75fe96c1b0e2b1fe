"""Scalars as TensorBoard itself reads them back; early warnings in the table and the events, also
after a restart.
"""

import math

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_rl_corr.events import EVENTS
from megatron_rl_corr.observability.metrics_file import MetricsFile
from megatron_rl_corr.observability.run_log import RunLog, open_writer, write_scalars


def test_write_scalars_when_read_back_then_every_number_is_under_its_name_at_its_step(tmp_path, healthy):
    writer = open_writer(tmp_path)
    write_scalars(writer, healthy | {"my/own": math.inf}, 7)
    write_scalars(writer, {"step": 8, "grad_norm": 0.5}, 8)
    writer.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    bins = {name for name in healthy if "_bin/" in name}
    assert set(events.Tags()["scalars"]) == set(healthy) - bins - {"step"} | {"my/own"}
    assert [(event.step, event.value) for event in events.Scalars("grad_norm")] == [
        (7, pytest.approx(0.43219)),
        (8, 0.5),
    ]
    assert events.Scalars("my/own")[0].value == math.inf


def test_write_scalars_when_there_are_bins_then_one_histogram_over_the_logarithm(tmp_path, healthy):
    writer = open_writer(tmp_path)
    write_scalars(writer, healthy, 7)
    # A step without tokens has no shares.
    write_scalars(writer, healthy | {name: math.nan for name in healthy if "_bin/" in name}, 8)
    writer.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    (event,) = events.Histograms("rollout_corr/log10_log_ratio_abs")
    found = event.histogram_value
    counts = {
        round(limit, 3): count for limit, count in zip(found.bucket_limit, found.bucket, strict=True) if count
    }
    # 0.01, 0.5 and ln 2 as powers of ten, of a thousand tokens.
    assert event.step == 7 and counts == pytest.approx({-2: 500, -0.301: 499, -0.159: 1})
    assert found.num == 1000 and (found.min, found.max) == (-7, 3)


def test_write_scalars_when_a_value_is_no_number_then_the_error_names_it():
    class Writer:
        def add_scalar(self, *arguments):
            raise AssertionError("nothing should be written")

    with pytest.raises(TypeError, match="'note' must be an int or a float, got str"):
        write_scalars(Writer(), {"note": "text"}, 1)


class NoWriter:
    def add_scalar(self, *arguments, **named):
        pass

    add_histogram_raw = flush = add_scalar


@pytest.fixture
def rows(make_steps):
    """The mismatch grows since step 45, which step 47 tells; it is over at the end of step 65,
    which step 75 tells.
    """
    rows = make_steps(80)
    for row in rows[40:60]:
        row["rollout_corr/k3_kl"] = 9.5e-3
    return rows


def told(capsys):
    """Lines that tell of warnings."""
    return [line for line in capsys.readouterr().out.splitlines() if "since step" in line.lower()]


def test_run_log_when_a_warning_begins_and_ends_then_it_is_printed_and_an_event_once_each(
    rows, capsys, monkeypatch
):
    events = []
    monkeypatch.setattr(EVENTS, "tell", lambda *arguments, **facts: events.append((*arguments, facts)))
    log = RunLog(None, {})
    for row in rows[:47]:
        log.write(row)
    begins = "Since step 45 the mismatch grows: KL(k3) 0.001234 early, 0.0095 then."
    assert told(capsys) == [f"[rl-corr] ! {begins}"]
    assert events == [("warning_began", begins, {"warning": "mismatch_grows"})]
    for row in rows[47:]:
        log.write(row)
    assert told(capsys) == ["[rl-corr] ! No longer, since step 66: the mismatch grows"]
    assert [kind for kind, *_ in events] == ["warning_began", "warning_ended"]


@pytest.mark.parametrize("cut", [30, 46, 60])
def test_run_log_when_the_run_was_restarted_then_trends_go_on_from_the_file(rows, tmp_path, capsys, cut):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    for row in rows[:cut]:
        file.write(row)
    log = RunLog(str(tmp_path), {}, NoWriter())
    for row in rows[cut:]:
        log.write(row)
    assert [line[:25] for line in told(capsys)] == ["[rl-corr] ! Since step 45"] * (cut < 47) + [
        "[rl-corr] ! No longer, si"
    ]


def test_run_log_when_a_step_comes_again_in_the_process_then_trends_are_of_the_steps_before_it(
    rows, tmp_path, capsys
):
    log = RunLog(str(tmp_path), {}, NoWriter())
    for row in rows[:46]:
        log.write(row)
    assert told(capsys) == []
    # From a checkpoint of step 42 on, without a mismatch: with the abandoned steps 43 to 46 five of
    # ten would be bad.
    for step in range(43, 49):
        log.write(rows[0] | {"step": step, "rollout_corr/k3_kl": 9.5e-3 if step > 45 else 1e-3})
    assert told(capsys) == []


def test_run_log_when_earlier_steps_cannot_be_read_then_it_says_so_and_goes_on(rows, tmp_path, caplog):
    (tmp_path / "metrics.jsonl").write_text("no json\n")
    RunLog(str(tmp_path), {}, NoWriter()).write(rows[9])
    assert "trends are of the steps from 10 on" in caplog.text
