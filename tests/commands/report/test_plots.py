"""The pictures: real files of the promised size that show the data they were given."""

import io
import math
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from megatron_rl_corr.commands.report.panels import PAGE_PANELS, Series
from megatron_rl_corr.commands.report.plots import render_panels, steps_to_shade, write_overview


def drawn(name: str, rows: list[dict]):
    """The axes of one panel."""
    axes = Figure().subplots()
    next(panel for panel in PAGE_PANELS if panel.name == name).draw_on(axes, Series(rows))
    return axes


def test_overview_when_written_then_a_png_of_1600_by_1100_with_something_in_every_panel(tmp_path, make_steps):
    path = write_overview(make_steps(30), tmp_path / "overview.png", title="a run")
    image = Image.open(path)
    assert (image.format, image.size) == ("PNG", (1600, 1100))
    pixels = np.asarray(image.convert("L"))
    thirds = [pixels[r : r + 350, c : c + 530] for r in (50, 400, 750) for c in (0, 535, 1070)]
    assert all((part < 128).mean() > 0.002 for part in thirds)
    assert [file.name for file in tmp_path.iterdir()] == ["overview.png"]


def test_overview_when_the_title_looks_like_mathematics_then_it_is_taken_as_it_is(tmp_path, make_steps):
    path = write_overview(make_steps(2), tmp_path / "overview.png", title="$\\nonsense{$" * 20)
    assert Image.open(path).size == (1600, 1100)


@pytest.mark.parametrize("rows", [[{"step": 1}], [{"step": 1, "reward/mean": math.nan}]])
def test_overview_when_there_is_nothing_to_draw_then_it_is_written_all_the_same(tmp_path, rows):
    assert Image.open(write_overview(rows, tmp_path / "overview.png")).size == (1600, 1100)


def test_overview_when_there_are_no_steps_then_an_error_says_so(tmp_path):
    with pytest.raises(ValueError, match="no steps to plot"):
        write_overview([], tmp_path / "overview.png")


def test_kl_when_servers_of_two_engines_sampled_then_a_line_for_each_and_both_together(make_steps):
    own = {"rollout_corr/by_engine/sglang/k3_kl": 2e-5, "rollout_corr/by_engine/vllm/k3_kl": 1e-5}
    axes = drawn("kl", [row | own for row in make_steps(3)])
    lines = {line.get_label(): list(line.get_ydata()) for line in axes.lines}
    assert lines["sglang"] == [2e-5] * 3 and lines["vllm"] == [1e-5] * 3
    assert list(lines) == ["k3", "sglang", "vllm", "alert level"]


QUADRANTS = ("good_above", "bad_below", "good_below", "bad_above")
MASSES = {f"rollout_corr/quadrant/{name}_mass": at / 10 for at, name in enumerate(QUADRANTS, start=1)}


LEDGER = {"ledger/staleness/share": 0.75, "ledger/rest/share": 0.25}


def test_ledger_when_drawn_then_a_line_in_percent_for_each_term_at_the_steps_that_have_one(make_steps):
    axes = drawn("ledger", [row | (LEDGER if row["step"] % 2 else {}) for row in make_steps(3)])
    assert {line.get_label(): list(line.get_ydata()) for line in axes.lines} == {
        "staleness": [75, 75],
        "rest": [25, 25],
    }
    assert all(list(line.get_xdata()) == [1, 3] for line in axes.lines)


CAUSES = {"ledger/as_square": 1e-3, "ledger/as/norm_epsilon/1e-05/share": 0.98}


def test_causes_when_drawn_then_those_that_explain_most_and_0_for_what_explains_nothing(make_steps):
    shares = {"norm_epsilon/1e-05": 0.98, "logit_scale": -4.0} | {
        f"other_{at}": at / 100 for at in range(1, 7)
    }
    causes = {f"ledger/as/{name}/share": share for name, share in shares.items()} | {"ledger/as_square": 1e-3}
    axes = drawn("ledger_causes", [row | (causes if row["step"] % 2 else {}) for row in make_steps(3)])
    lines = {line.get_label(): list(line.get_ydata()) for line in axes.lines}
    assert list(lines) == ["norm_epsilon/1e-05", *(f"other_{at}" for at in range(6, 1, -1))]
    assert lines["norm_epsilon/1e-05"] == [98, 98] and axes.get_ylim()[0] < 0 < 100 < axes.get_ylim()[1]
    few = [row | {name: causes[name] for name in list(causes)[:2]} for row in make_steps(2)]
    assert {line.get_label(): list(line.get_ydata()) for line in drawn("ledger_causes", few).lines}[
        "logit_scale"
    ] == [0, 0]


PLACES = {"ledger/at/server/1/share": 0.2, "ledger/at/server/2/share": 0.8}


def test_places_when_drawn_then_those_with_most_of_the_rest_at_the_steps_that_have_one(make_steps):
    shares = {"server/1": 0.2, "server/2": 0.8, "expert_rank/0": 0.5}
    places = {f"ledger/at/{name}/share": share for name, share in shares.items()}
    axes = drawn("ledger_places", [row | (places if row["step"] % 2 else {}) for row in make_steps(3)])
    lines = {line.get_label(): list(line.get_ydata()) for line in axes.lines}
    assert lines == {"server 2": [80, 80], "expert rank 0": [50, 50], "server 1": [20, 20]}
    many = {f"ledger/at/server/{at}/share": at / 100 for at in range(1, 21)}
    axes = drawn("ledger_places", [row | many for row in make_steps(2)])
    assert [line.get_label() for line in axes.lines] == [f"server {at}" for at in range(20, 12, -1)]


def test_quadrants_when_drawn_then_a_line_for_each_share_of_the_gradient(make_steps):
    axes = drawn("quadrants", [row | MASSES for row in make_steps(3)])
    assert {line.get_label(): list(line.get_ydata()) for line in axes.lines} == {
        "good, above": [0.1] * 3,
        "bad, below": [0.2] * 3,
        "good, below": [0.3] * 3,
        "bad, above": [0.4] * 3,
    }


EVALUATED = {
    "eval/reward": 0.5,
    "eval/pass@1": 0.25,
    "eval/aime/reward": 0.1,
    "eval/aime/pass@1": 0.0,
    "eval/aime/pass@4": 0.5,
}


BY_TURN = {
    f"rollout_corr/by_turn/{name}": value
    for name, value in {
        "first/k3_kl": 1e-4,
        "later/k3_kl": 1e-3,
        "first/log_ratio_abs_mean": 0.01,
        "1/log_ratio_abs_mean": 0.02,
        "2_to_3/log_ratio_abs_mean": 0.03,
        "16+/log_ratio_abs_mean": 0.04,
    }.items()
}


def test_panels_when_several_sets_are_evaluated_at_some_steps_then_a_line_for_each(make_steps):
    rows = [row | ({} if row["step"] % 10 else EVALUATED) for row in make_steps(40)]
    shown = {}
    for panel in PAGE_PANELS:
        axes = Figure().subplots()
        if panel.name.startswith("eval"):
            panel.draw_on(axes, Series(rows))
            shown[panel.name] = {line.get_label(): list(line.get_xdata()) for line in axes.lines}
    at = [10, 20, 30, 40]
    assert shown == {
        "eval_reward": {"aime": at, "held out": at},
        "eval_pass": {"aime pass@1": at, "aime pass@4": at, "pass@1": at},
    }
    assert not any(name.startswith("eval") for name in render_panels(make_steps(3)))


def test_panels_when_rendered_as_svg_then_valid_local_and_the_same_every_time(make_steps):
    rows = [
        row | ({} if row["step"] % 2 else EVALUATED) | BY_TURN | MASSES | LEDGER | CAUSES | PLACES
        for row in make_steps(5)
    ]
    images = render_panels(rows)
    assert list(images) == [panel.name for panel in PAGE_PANELS]
    for content in images.values():
        root = ElementTree.fromstring(content)
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert not [node for node in root.iter() if node.tag.endswith(("script", "image"))]
    assert render_panels(rows) == images


def test_turn_panels_when_drawn_then_a_line_for_each_kind_of_turn(make_steps):
    rows = [row | BY_TURN for row in make_steps(20)]
    axes = drawn("by_turn", rows)
    assert axes.get_yscale() == "log"
    assert {line.get_label(): line.get_ydata()[0] for line in axes.lines} == {
        "first turns": 1e-4,
        "later turns": 1e-3,
    }
    axes = drawn("by_turn_number", rows)
    assert {line.get_label(): line.get_ydata()[0] for line in axes.lines} == {
        "turn 0": 0.01,
        "1": 0.02,
        "2-3": 0.03,
        "16+": 0.04,
    }
    assert not {"by_turn", "by_turn_number"} & set(render_panels(make_steps(3)))


def test_panels_when_batches_make_several_updates_then_lines_go_from_batch_to_batch(make_steps):
    rows = make_steps(40)  # too many for markers, and a line between NaNs has no length
    batchs = ("reward/mean", "reward/std", "rollout_corr/k3_kl", "weight_lag")
    rows = [
        {name: value for name, value in row.items() if name not in batchs or row["step"] % 4 == 1}
        | {"update": (row["step"] - 1) % 4 + 1}
        for row in rows
    ]
    for name in ("reward", "kl", "lag"):
        line = drawn(name, rows).lines[0]
        assert line.get_xdata().tolist() == list(range(1, 41, 4)) and np.isfinite(line.get_ydata()).all(), (
            name
        )
    # the band of the spread
    assert drawn("reward", rows).collections[0].get_paths()[0].vertices.shape[0] > 10
    assert drawn("grad_norm", rows).lines[0].get_xdata().tolist() == list(range(1, 41))


def test_panels_when_metrics_are_missing_then_only_those_with_data_are_rendered():
    images = render_panels([{"step": 1, "grad_norm": 1.0, "weight_lag": 0}], kind="png")
    assert list(images) == ["grad_norm", "lag"]
    assert Image.open(io.BytesIO(images["lag"])).size == (520, 340)


def test_kl_panel_when_drawn_then_log_scale_with_the_alert_level_as_a_line(make_steps):
    rows = make_steps(3)
    rows[1]["rollout_corr/k3_kl"] = 0.0
    axes = drawn("kl", rows)
    assert axes.get_yscale() == "log"
    assert [0.01, 0.01] in [list(line.get_ydata()) for line in axes.lines]


def test_kl_panel_when_every_value_is_zero_then_linear_scale(make_steps):
    assert drawn("kl", make_steps(3, **{"rollout_corr/k3_kl": 0.0})).get_yscale() == "linear"


def test_time_panel_when_few_steps_then_bars_stack_to_the_sum(make_steps):
    axes = drawn("times", make_steps(2))
    tops = [bar.get_y() + bar.get_height() for bar in axes.patches]
    # collect 8, score 2, train 6, push 1, stacked: 8, 10, 16, 17 at each of two steps.
    assert tops == [8, 8, 10, 10, 16, 16, 17, 17]


def test_sizes_panel_when_drawn_then_a_cell_for_each_bin_with_tokens_and_percentiles_at_their_ends(
    make_steps,
):
    rows = make_steps(3)
    rows[2] |= {"rollout_corr/log_ratio_abs_bin/above_100": 0.25, "rollout_corr/log_ratio_abs_p999": 100.0}
    axes = drawn("log_ratio_sizes", rows)
    (mesh,) = axes.collections
    cells = mesh.get_array()
    # 27 bins of three steps; ends 1, 2, 5 from 1e-6 on: 0.01 is the 13th, 0.5 the 18th, ln 2 the 19th.
    assert cells.shape == (27, 3)
    assert cells.filled(0).T.tolist() == [
        [0.25 if at == 26 and step == 2 else {12: 0.5, 17: 0.499, 18: 0.001}.get(at, 0.0) for at in range(27)]
        for step in range(3)
    ]
    assert [line.get_ydata().tolist() for line in axes.lines] == [[13] * 3, [18] * 3, [18, 18, 26]]
    assert [text.get_text() for text in axes.get_yticklabels()] == [
        "1e-06",
        "1e-05",
        "0.0001",
        "0.001",
        "0.01",
        "0.1",
        "1",
        "10",
        "100",
    ]


def test_sizes_panel_when_steps_are_many_then_neighbours_share_a_column(make_steps):
    rows = make_steps(100)
    (mesh,) = drawn("log_ratio_sizes", rows).collections
    # The mean of equal shares is the share; 100 steps in 48 columns, of which none is lost.
    assert mesh.get_array().shape == (27, 48)
    assert mesh.get_array()[12].tolist() == [0.5] * 48
    assert mesh.get_coordinates()[0, :, 0].tolist()[::48] == [0.5, 100.5]


def test_reward_panel_when_a_step_lacks_the_metric_then_the_line_has_a_gap(make_steps):
    rows = make_steps(3)
    del rows[1]["reward/mean"]
    (line,) = drawn("reward", rows).lines
    assert np.array_equal(line.get_ydata(), [1 / 8, np.nan, 3 / 8], equal_nan=True)


def test_shading_when_alerts_are_rare_then_their_steps_and_when_common_then_none(make_steps):
    rows = make_steps(6)
    rows[4]["rollout_corr/ess"] = 0.1
    assert steps_to_shade(rows) == [5]
    for row in rows[:3]:
        row["rollout_corr/ess"] = 0.1
    assert steps_to_shade(rows) == []
