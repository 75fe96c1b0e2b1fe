"""Texts of policies, servers, data and other people's bundles reach neither a terminal, nor the page, nor a
line of a log that is not theirs.
"""

import base64
import json
import logging
import os
import pty
import re
import subprocess
import sys
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from megatron_rl_corr import cli, plugin
from megatron_rl_corr.commands.accept.command import _inert
from megatron_rl_corr.commands.report.page import write_page
from megatron_rl_corr.config.flags import warn
from megatron_rl_corr.engines.errors import RolloutServerError, SampleFailure
from megatron_rl_corr.files import sha256_of
from megatron_rl_corr.moe.statistics import COLUMNS
from megatron_rl_corr.observability.metrics_file import MetricsFile
from megatron_rl_corr.tables import one_message, visible
from tests.commands.samples.test_samples import RULES
from tests.faults.drills import drill
from tests.observability.samples import sample, save_tokenizer, write_run

ACTS = "\x1b]0;taken\x07\x1b[2J\r\x9b31m\u202egnp.exe\u2066\u2028\u200f\x00"
"""Renames a terminal's window, clears it, goes back to its line's begin, turns the direction of writing."""
MARKUP = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)></title></svg><a href=javascript:alert(3)>"
FORMULA = "$\\frac{$ $x_$ {{ 7 * 191 }} {% raw %}"
SPOOF = "\n[rollout] all is well\nmegatron_rl_corr: step 7\ngroup 9, sample 9 | reward 9\n"
HOSTILE = ACTS + MARKUP + FORMULA + SPOOF
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""What is in no text that we print: all controls but the new line and the tab."""
EVENTS = re.compile("on[a-z]+")
XLINK = "{http://www.w3.org/1999/xlink}href"


def test_visible_when_a_text_acts_then_its_escapes_are_shown_and_others_stay_themselves():
    assert visible("plain 中文 é🙂\tb\nc") == "plain 中文 é🙂\tb\nc"
    assert visible("\x1b[31m\r\x9b\u202e\u2028\x00") == "\\x1b[31m\\r\\x9b\\u202e\\u2028\\x00"
    assert one_message("a\nb\n  c\n\nd") == "a\n  b\n  c\n\n  d"


@drill(
    "texts of a server and a reward that look like our own lines", promised="each stays within its message"
)
def test_messages_when_texts_look_like_lines_of_ours_then_they_are_indented(
    capsys, caplog, monkeypatch, seen
):
    factory = logging.getLogRecordFactory()
    try:
        plugin.name_flags_in_logs()
        logging.getLogger("megatron_rl_corr.rollout").warning("failed: %s", SampleFailure("agent", HOSTILE))
    finally:
        logging.setLogRecordFactory(factory)
    warn(RolloutServerError("http://a", "/generate", 500, HOSTILE))
    warn(HOSTILE)
    plugin.refuse("megatron_rl_corr", HOSTILE.replace("\n", " "))
    monkeypatch.setattr(plugin, "_leave", lambda status: None)
    plugin._leave_after_peer(HOSTILE)
    printed = capsys.readouterr().err + caplog.text
    assert "taken" in printed and "all is well" in printed
    assert not CONTROLS.search(printed)
    assert not re.search("^(\\[rollout\\] all is well|megatron_rl_corr: step 7)", printed, re.MULTILINE)
    seen("indented")


class Tags(HTMLParser):
    """Every tag with its attributes; a browser would run what this finds."""

    def __init__(self, text):
        super().__init__()
        self.found, self.texts = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.texts.append(data)


def check_inert(page):
    """No script, no frame, nothing that listens, no address but data:, nothing that turns directions."""
    tags = Tags(page)
    assert not {tag for tag, _ in tags.found} & {
        "script",
        "iframe",
        "object",
        "embed",
        "base",
        "form",
        "a",
        "link",
    }
    for tag, attributes in tags.found:
        assert not [name for name in attributes if EVENTS.fullmatch(name)], (tag, attributes)
        for name in ("src", "href", "xlink:href", "action", "formaction", "srcset"):
            assert attributes.get(name, "data:").startswith("data:"), (tag, attributes)
    assert not CONTROLS.search(page.replace("\r", ""))
    for image in re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', page):
        for one in ElementTree.fromstring(base64.b64decode(image)).iter():
            assert one.tag.rpartition("}")[2] not in ("script", "foreignObject", "a")
            assert not [name for name in one.attrib if EVENTS.fullmatch(name)], one.attrib
            assert one.attrib.get(XLINK, "#").startswith(("#", "data:image/png;base64,")), one.attrib
    return "".join(tags.texts)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return folder, save_tokenizer(folder)


def hostile_run(folder, model):
    """A run whose names, events, settings, samples, labels and versions are HOSTILE."""
    path, tokenizer = model
    ids = tokenizer.encode(HOSTILE)
    samples = [
        sample(ids, [0.9] * len(ids), index=n, label=HOSTILE, prompt=tokenizer.encode(HOSTILE))
        for n in (0, 1)
    ]
    run = write_run(folder / "run", {1: samples, 2: samples}, path, RULES)
    (run / "metrics.jsonl").unlink()
    file = MetricsFile(run / "metrics.jsonl")
    names = (
        "rollout_corr/by_engine/{}/k3_kl",
        "eval/{}/reward/mean",
        "ledger/at/server/{}",
        "reward/{}",
        "{}",
    )
    for step in (1, 2):
        own = {name.format(HOSTILE): 0.5 for name in names}
        file.write({"step": step, "reward/mean": 0.5, "rollout_corr/k3_kl": 1e-3} | own)
    event = {
        "time": 1.7e9,
        "rank": 0,
        "step": 1,
        "kind": "sample_failed",
        "reason": HOSTILE,
        HOSTILE: HOSTILE,
    }
    (run / "events.jsonl").write_text(json.dumps(event) + "\n")
    tables = dict.fromkeys(COLUMNS, [[1.0]])
    (run / "experts.jsonl").write_text(json.dumps({"step": 1, "layers": [HOSTILE]} | tables) + "\n")
    settings = json.loads((run / "run.json").read_text())
    settings["rollout"] |= {"events": str(run / "events.jsonl"), HOSTILE: HOSTILE}
    (run / "run.json").write_text(json.dumps(settings))
    return run


@drill("a run of somebody else's whose every name and text is markup", promised="its page runs nothing")
def test_page_when_every_text_of_a_run_is_hostile_then_it_is_inert(tmp_path, model, seen):
    page = write_page(hostile_run(tmp_path, model)).read_text()
    shown = check_inert(page)
    assert shown.count("alert(1)") >= 6 and "{{ 7 * 191 }}" in shown and "1337" not in shown
    assert "Not shown" not in shown
    seen(f"{shown.count('alert(1)')} texts shown as text")


def through_a_terminal(*words):
    """(exit status, all that the command has written to the terminal that it had)."""
    ours, its = pty.openpty()
    environment = os.environ | {"TERM": "xterm-256color", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "megatron_rl_corr.cli", *map(str, words)]
    process = subprocess.Popen(command, stdin=its, stdout=its, stderr=its, env=environment)
    os.close(its)
    parts = []
    while True:
        try:
            parts.append(os.read(ours, 65536))
        except OSError:  # its end was closed
            break
        if not parts[-1]:
            break
    os.close(ours)
    return process.wait(60), b"".join(parts).decode().replace("\r\n", "\n")


OWN = re.compile("\x1b\\[(?:\\d+(?:;\\d+)*)?m")
"""Our own colours."""


@drill("samples with terminal escapes, printed on a real terminal", promised="they are shown, and do nothing")
def test_samples_when_printed_on_a_terminal_then_only_our_colours_are_obeyed(tmp_path, model, seen):
    run = hostile_run(tmp_path, model)
    status, printed = through_a_terminal("samples", run)
    assert status == 0 and OWN.search(printed)
    plain = OWN.sub("", printed)
    assert not CONTROLS.search(plain) and "\\x1b]0;taken" in plain.replace("\n", "")
    assert not re.search("^(group 9, sample 9|\\[rollout\\])", plain, re.MULTILINE)
    assert len(re.findall("^group 7, sample [01] ", plain, re.MULTILINE)) == 2
    seen("escapes shown")


@pytest.mark.parametrize("command", ["diagnose", "advise"])
def test_commands_when_names_of_metrics_act_then_they_are_shown(tmp_path, model, capsys, command):
    status = cli.main([command, str(hostile_run(tmp_path, model))])
    printed = "".join(capsys.readouterr())
    assert status in (0, 2) and printed and not CONTROLS.search(printed)


def test_errors_when_they_name_what_a_file_holds_then_it_is_shown(tmp_path, capsys):
    assert cli.main(["report", str(tmp_path / "no\x1b[2Jsuch\u202e")]) == 2
    told = capsys.readouterr().err
    assert "no?[2Jsuch?" in told and not CONTROLS.search(told)
    (tmp_path / "run.json").write_text("[" * 10**5)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    assert cli.main(["report", str(tmp_path)]) == 2 and "run.json is not JSON" in capsys.readouterr().err


@drill("somebody's incident bundle with terminal escapes", promised="--check shows them, and they do nothing")
def test_bundle_when_its_manifest_acts_then_check_shows_it(tmp_path, capsys, seen):
    (tmp_path / "README.txt").write_text("x")
    described = {"bytes": 1, "sha256": sha256_of(tmp_path / "README.txt")}
    manifest = {
        **{"format": 1, "step": HOSTILE, "cannot_come_back": [HOSTILE], "versions": {"torch": HOSTILE}},
        "files": {"README.txt": described},
    }
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    assert cli.main(["incident", "--check", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "taken" in printed and not CONTROLS.search(printed)
    assert not re.search("^(\\[rollout\\]|megatron_rl_corr: step 7|group 9)", printed, re.MULTILINE)
    manifest["files"] |= {ACTS.replace("\x00", ""): described, "../" + ACTS.replace("\x00", ""): described}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    assert cli.main(["incident", "--check", str(tmp_path)]) == 2
    printed = capsys.readouterr().err
    assert "missing" in printed and "a path out of the bundle" in printed and not CONTROLS.search(printed)
    seen("shown")


def test_acceptance_page_when_a_server_tells_markup_then_it_is_a_cell_of_text():
    told = _inert("0.5\n| x | <b>|`c` [a](javascript:1)\x1b[2J")
    assert told == "0.5 \\| x \\| \\<b>\\|\\`c\\` \\[a](javascript:1)\\x1b\\[2J"
