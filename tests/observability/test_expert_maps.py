"""The page's heat maps of experts: there where a run wrote its experts, and of the last step."""

import json

import pytest

from megatron_rl_corr.commands.report.page import write_page

pytestmark = pytest.mark.usefixtures("figures_drawn_once")

STEP = {
    "step": 2,
    "layers": [1, 3],
    "tokens": [[4, 0, 2], [1, 2, 3]],
    "log_ratio_abs_mean": [[0.1, None, 0.2], [0.1] * 3],
    "weight_mean": [[1.0, None, 1.1]] * 2,
    "rejected_fraction": [[0.0, None, 0.5]] * 2,
}


def test_page_when_the_run_wrote_its_experts_then_four_heat_maps_of_the_last_step(write_run, make_steps):
    folder = write_run(make_steps(2))
    (folder / "experts.jsonl").write_text(json.dumps(STEP | {"step": 1}) + "\n" + json.dumps(STEP) + "\n")
    page = write_page(folder).read_text()
    assert "<h2>Experts, step 2</h2>" in page
    for title in ("Tokens", "Mean |log-ratio|", "Mean weight", "Rejected fraction"):
        assert f'alt="{title} of every expert, layers x experts"' in page
    assert page.count("<figure>") == 12 + 4


@pytest.mark.parametrize("torn", [json.dumps(STEP | {"step": 3})[:-20], json.dumps(STEP | {"step": 3})])
def test_page_when_the_last_line_is_not_yet_whole_then_of_the_one_before(write_run, make_steps, torn):
    folder = write_run(make_steps(2))
    (folder / "experts.jsonl").write_text(json.dumps(STEP) + "\n" + torn)
    assert "<h2>Experts, step 2</h2>" in write_page(folder).read_text()
    (folder / "experts.jsonl").write_text(torn)
    assert "<h2>Experts" not in write_page(folder).read_text()


@pytest.mark.parametrize("line", ["{", "[]", '{"step": 1}', json.dumps(STEP | {"tokens": [[1], [1, 2]]})])
def test_page_when_the_last_line_is_no_table_then_the_page_says_so_and_shows_the_rest(
    write_run, make_steps, line
):
    folder = write_run(make_steps(2))
    (folder / "experts.jsonl").write_text(line + "\n")
    page = write_page(folder).read_text()
    assert "experts.jsonl: its last line holds no tables of experts" in page and page.count("<figure>") == 12
