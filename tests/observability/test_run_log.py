"""Scalars as TensorBoard itself reads them back."""

import math

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_rl_corr.observability.run_log import open_writer, write_scalars


def test_write_scalars_when_read_back_then_every_number_is_under_its_name_at_its_step(tmp_path, healthy):
    writer = open_writer(tmp_path)
    write_scalars(writer, healthy | {"my/own": math.inf}, 7)
    write_scalars(writer, {"step": 8, "grad_norm": 0.5}, 8)
    writer.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    bins = {name for name in healthy if "_bin/" in name}
    assert set(events.Tags()["scalars"]) == set(healthy) - bins - {"step"} | {"my/own"}
    assert [(event.step, event.value) for event in events.Scalars("grad_norm")] == [
        (7, pytest.approx(0.43219)), (8, 0.5),
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
    counts = {round(limit, 3): count for limit, count in zip(found.bucket_limit, found.bucket, strict=True) if count}
    # 0.01, 0.5 and ln 2 as powers of ten, of a thousand tokens.
    assert event.step == 7 and counts == pytest.approx({-2: 500, -0.301: 499, -0.159: 1})
    assert found.num == 1000 and (found.min, found.max) == (-7, 3)


def test_write_scalars_when_a_value_is_no_number_then_the_error_names_it():
    class Writer:
        def add_scalar(self, *arguments):
            raise AssertionError("nothing should be written")

    with pytest.raises(TypeError, match="'note' must be an int or a float, got str"):
        write_scalars(Writer(), {"note": "text"}, 1)
