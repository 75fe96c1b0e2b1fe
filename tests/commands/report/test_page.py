"""The page: everything of the run is on it, nothing is asked of the net, nothing in it can run."""

import base64
import math
from html.parser import HTMLParser

import pytest

from megatron_rl_corr.commands.report import page
from megatron_rl_corr.commands.report.page import flatten, write_page
from megatron_rl_corr.observability.catalogue import GROUPS, grouped, spec_of

DOTTED = "stroke-dasharray: 1,1.65; stroke-dashoffset: 0; stroke: #d55e00"
"""The line of an early warning."""


class Document(HTMLParser):
    """Tags, the text, and whatever an attribute would load."""

    def __init__(self, page: str):
        super().__init__()
        self.tags: list[str] = []
        self.loads: list[str] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.loads += [value for name, value in attributes if name in ("src", "href")]
        if tag not in ("meta", "img", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.text += data + "\n"


def read(path) -> Document:
    document = Document(path.read_text(encoding="utf-8"))
    assert document.open == []
    return document


@pytest.fixture
def words_alone(monkeypatch):
    """Curves take most of a page's time; the tests without this look at them."""
    monkeypatch.setattr(page, "render_panels", lambda rows: {"kl": b"<svg/>"})
    monkeypatch.setattr(page, "write_overview", lambda rows, path, title: None)


def test_page_when_written_then_every_metric_its_meaning_and_the_summary_are_on_it(write_run, make_steps):
    folder = write_run(make_steps(8, **{"my/own": 2.5}))
    path = write_page(folder)
    document = read(path)
    assert path == folder / "report.html"
    for name in make_steps(1)[0]:
        if "_bin/" in name:
            assert name not in document.text  # a figure, not rows
        elif name != "step":
            assert f"\n{name}\n" in document.text and spec_of(name).doc in document.text
    assert "my/own" in document.text and "not described" in document.text
    for label, value in (
        ("steps", "8"),
        ("mean reward, first 5 steps", "0.375"),
        ("max |log-ratio|", "2.5"),
        ("mean reward, last 5 steps", "0.75"),
        ("mean KL (k3)", "0.001234"),
        ("last weight version", "7"),
    ):
        assert f"\n{label}\n{value}\n" in document.text
    assert "Every watched metric stayed in its usual range." in document.text
    headings = [line for line in document.text.splitlines() if line in (*GROUPS, "Others")]
    assert headings == list(grouped({*make_steps(1)[0], "my/own"} - {"step"})) and headings[-1] == "Others"


def test_page_when_written_then_it_loads_nothing_and_leaves_nothing_else_behind(write_run, make_steps):
    folder = write_run(make_steps(3))
    document = read(write_page(folder))
    assert len(document.loads) == 12 and "Experts" not in document.text
    assert all(url.startswith("data:image/svg+xml;base64,") for url in document.loads)
    assert not {"script", "link", "iframe"} & set(document.tags)
    assert sorted(file.name for file in folder.iterdir()) == ["metrics.jsonl", "overview.png", "report.html"]
    assert [file.name for file in folder.parent.iterdir()] == [folder.name]


def test_page_when_texts_hold_markup_then_it_is_escaped(write_run, make_steps, words_alone):
    rows = make_steps(2, **{"<b>metric</b>": 1.0})
    folder = write_run(rows, {"name": "<script>alert(1)</script>", "<i>key</i>": "a & b"})
    content = write_page(folder).read_text()
    document = Document(content)
    assert "<script" not in content and not {"script", "b", "i"} & set(document.tags)
    for text in ("<script>alert(1)</script>", "<b>metric</b>", "<i>key</i>", "a & b"):
        assert text in document.text


def test_page_when_there_are_alerts_then_it_says_what_and_what_to_do(write_run, make_steps, words_alone):
    rows = make_steps(4)
    rows[2] |= {"rollout_corr/k3_kl": 0.05, "loss/policy": math.nan}
    text = read(write_page(write_run(rows))).text
    assert "KL(k3) was 0.05 at worst, usually at most 0.01, on 1 of 4 steps, first at step 3" in text
    assert "lm_head in float32 on both" in text
    assert "loss/policy was nan at worst, on 1 of 4 steps" in text
    assert "stayed in its usual range" not in text
    # One step in four has an alert: few enough to shade it.
    assert "pale band" in text


def test_page_when_a_trend_warns_then_since_which_step_what_it_means_and_a_mark_in_every_figure(
    write_run, make_steps
):
    rows = make_steps(60)
    for row in rows[40:]:  # the median of ten is their middle at step 45, 4.4 times the early one
        row["rollout_corr/k3_kl"] = 9.5e-3
    path = write_page(write_run(rows))
    text = read(path).text
    assert "1. Since step 45 the mismatch grows: KL(k3) 0.001234 early, 0.0095 then." in text
    assert "--router-replay R3" in text and "now(k3) >= 3 early(k3)" in text and "dotted line" in text
    assert text.index("Early warnings") < text.index("Alerts") < text.index("Curves")
    images = [base64.b64decode(url.partition(",")[2]).decode() for url in read(path).loads]
    assert len(images) == 12 and all(DOTTED in image for image in images)


def test_page_when_nothing_warns_then_no_heading_and_no_mark(write_run, make_steps):
    path = write_page(write_run(make_steps(60)))
    assert "Early warnings" not in read(path).text and "dotted line" not in read(path).text
    images = [base64.b64decode(url.partition(",")[2]).decode() for url in read(path).loads]
    assert not any(DOTTED in image for image in images)


def test_page_when_watched_metrics_are_missing_then_it_says_they_were_not_watched(write_run):
    text = read(write_page(write_run([{"step": 1, "reward/mean": 0.5}]))).text
    assert (
        "Not recorded, so not watched: KL(k1), KL(k3), chi2, chi2 geometric, weight, ESS, dropped, skip."
        in text
    )
    assert "stayed in its usual range" not in text


def test_page_when_run_json_is_there_then_nested_settings_are_listed_by_dotted_name(
    write_run, make_steps, words_alone
):
    config = {"rollout_corr": {"rollout_is": "token", "rollout_rs": []}, "lr": 1e-6, "resume": None}
    text = read(write_page(write_run(make_steps(1), config))).text
    assert "\nrollout_corr.rollout_is\ntoken\n" in text and "\nrollout_corr.rollout_rs\n[]\n" in text
    assert "\nlr\n1e-06\n" in text and "\nresume\nnull\n" in text


def test_flatten_when_groups_are_empty_then_they_stay_visible():
    assert flatten({"a": {"b": {"c": [1, "x"]}}, "d": {}, "e": "text"}) == {
        "a.b.c": '[1, "x"]',
        "d": "{}",
        "e": "text",
    }


@pytest.mark.parametrize("content, words", [("{", "is not JSON"), ("[1]", "an object of settings, got list")])
def test_page_when_run_json_is_bad_then_the_error_names_the_file_and_the_old_page_stays(
    write_run, make_steps, content, words
):
    folder = write_run(make_steps(1))
    (folder / "report.html").write_text("the old page")
    (folder / "run.json").write_text(content)
    with pytest.raises(ValueError, match=f"run.json .*{words}"):
        write_page(folder)
    assert (folder / "report.html").read_text() == "the old page"
    assert not (folder / "overview.png").exists()


def test_page_when_the_rename_fails_then_the_old_page_stays_alone(write_run, make_steps, monkeypatch):
    folder = write_run(make_steps(1))
    for name in ("report.html", "overview.png"):
        (folder / name).write_text("old")

    def fail(source, target):
        raise OSError("disk full")

    monkeypatch.setattr("megatron_rl_corr.files.os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_page(folder)
    assert (folder / "report.html").read_text() == (folder / "overview.png").read_text() == "old"
    assert sorted(file.name for file in folder.iterdir()) == ["metrics.jsonl", "overview.png", "report.html"]
