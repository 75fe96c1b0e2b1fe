"""The pages are true: generated pages are current, links lead somewhere, commands and python blocks run."""

import importlib.util
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl_corr import cli
from tests.commands.incident.made_run import HandMadeRun
from tests.conventions.test_floors import FLOORS
from tests.observability.samples import sample, write_run

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ["docs", "examples", "patches", "requirements", "benchmarks", "tools"]
PAGES = sorted([*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))])
IN_ORDER = ["docs/guides/own_fork.md"]
"""Pages whose commands need each other's results: a test of their own runs them in their order."""
PROGRAMS = r"make|torchrun|python|\.venv/bin/python|(?:\.venv/bin/)?megatron-rl-corr"
NEEDS_MORE = ("accept", "doctor", "correct", "model-flags", "patch", "export", "rollout", "plan", "gateway")
"""Subcommands that need a live server, kept samples or a model: tested elsewhere, here their
flags are parsed.
"""

OUR_FLAGS = r"--(?:rollout|router-replay|expert-statistics)[a-z0-9-]*[a-z0-9]"
OTHER_FLAGS = {"--rollout-corr-describe", "--rollout-corr-check"}
"""The launcher's own, which no run has."""
OF_THE_CODE = ("CONTRIBUTING.md", "docs/explanation/architecture.md", "docs/explanation/extend.md")
METRICS = r"`((?:rollout_corr|rollout|reward|router_replay|time|eval)/[a-z0-9_/]*[a-z0-9])`"


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def commands(page: Path) -> list[str]:
    """Indented lines of a page that start a program of ours; continued ones joined, `$(...)` and
    `<...>` left out.
    """
    text = page.read_text().replace("\\\n", " ")
    found = re.findall(rf"^    ((?:{PROGRAMS}) .*)$", text, re.MULTILINE)
    without = [re.sub(r"\$\([^)]*\)|<[^>]*>", "", command) for command in found]
    return [command for command in without if "[...]" not in command]  # a synopsis is no command


def all_commands() -> list[tuple[str, str]]:
    """(page, command) of every command that no earlier page has; reports of two runs are one command."""
    pages = [page for page in PAGES if page.parent.name != "requirements" and name(page) not in IN_ORDER]
    found: dict[str, tuple[str, str]] = {}
    for page in pages:
        for command in commands(page):
            key = re.sub(r"(report) \S+", r"\1", command.removeprefix(".venv/bin/"))
            found.setdefault(key, (name(page), command))
    return list(found.values())


def anchors(page: Path) -> set[str]:
    """The fragments that GitHub gives a page's headings."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
        for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    }


def links(page: Path) -> list[tuple[str, str]]:
    """(path, fragment) of every link to a file, and of every image."""
    text = page.read_text()
    found = re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", text) + re.findall(r'src(?:set)?="([^"#]+)()"', text)
    return [(path, fragment) for path, fragment in found if "://" not in path]


def test_generated_pages_when_made_anew_then_unchanged():
    spec = importlib.util.spec_from_file_location("generate_docs", ROOT / "scripts/generate_docs.py")
    generate_docs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate_docs)
    for path, page in generate_docs.PAGES.items():
        assert (ROOT / path).read_text() == page(), (
            f"run python scripts/generate_docs.py: {path} is out of date"
        )


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_of_a_page_then_lead_to_files_and_headings_that_exist(page):
    for path, fragment in links(page):
        target = page.parent / path if path else page
        assert target.exists(), f"{name(page)} links to {path}"
        assert not fragment or fragment in anchors(target), f"{name(page)} links to {path}#{fragment}"


def test_pages_when_they_name_the_command_then_by_its_one_name():
    assert [name(page) for page in PAGES if "-m megatron_rl_corr.cli" in page.read_text()] == []


def test_flags_of_ours_on_pages_then_the_launcher_has_them():
    known = set(re.findall(r"--[a-z0-9-]+", (ROOT / "docs/reference/flags.md").read_text())) | OTHER_FLAGS
    pages = [page for page in PAGES if page.name != "CHANGELOG.md"]  # it names what was renamed
    named = {(name(page), flag) for page in pages for flag in re.findall(OUR_FLAGS, page.read_text())}
    assert {(page, flag) for page, flag in named if flag not in known} == set()


def test_metrics_on_pages_then_the_catalogue_has_them():
    known = re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs/reference/metrics.md").read_text(), re.MULTILINE)
    families = tuple(metric.removesuffix("NAME") for metric in known if metric.endswith("NAME"))
    named = {(name(page), metric) for page in PAGES for metric in re.findall(METRICS, page.read_text())}
    assert {pair for pair in named if pair[1] not in known and not pair[1].startswith(families)} == set()


def test_source_files_that_pages_name_then_exist():
    pages = [page for page in PAGES if page.name != "CHANGELOG.md"]
    named = {
        (name(page), path)
        for page in pages
        for path in re.findall(r"`([a-z_/]+/[a-z_]+\.py)`", page.read_text())
    }
    roots = [ROOT, ROOT / "megatron_rl_corr"]
    ours = {
        (page, path) for page, path in named if (ROOT / path.split("/")[0]).exists() or page in OF_THE_CODE
    }
    missing = {(page, path) for page, path in ours if not any((root / path).exists() for root in roots)}
    assert ours and missing - {("docs/guides/own_fork.md", "megatron/training/__init__.py")} == set()


def test_picture_of_the_floors_then_it_has_the_folders_in_their_order():
    [*texts] = re.findall(
        r'font-weight="bold" fill="#222222">([a-z_ ]+)</text>', (ROOT / "docs/images/floors.svg").read_text()
    )
    shown = [folder for text in texts for folder in text.split()]
    assert shown[::-1] == FLOORS


def test_commands_then_there_are_some():
    assert len(all_commands()) >= 10


@pytest.mark.parametrize(("page", "command"), all_commands())
def test_command_of_a_page_then_runs(page, command, tmp_path):
    words = shlex.split(command)
    if words[0] == "make":
        # What the targets do is tested with the quickstart; here: they exist and take these variables.
        run = subprocess.run([*words, "--dry-run"], cwd=ROOT, capture_output=True, text=True)
    elif words[0] == "torchrun":
        if "megatron_rl_corr.launch" not in words:
            assert (ROOT / words[3]).is_file()  # tests/examples runs it
            return
        script = words.index("megatron_rl_corr.launch") + 1
        code = (  # its files are the reader's own
            "import sys; from megatron_rl_corr.mcore.checks.early_checks import EarlyChecks; "
            "EarlyChecks.collect = lambda *_: None; from megatron_rl_corr.plugin import prepare; "
            "prepare(sys.argv[1:])"
        )
        flags = words[script + 1 :]
        run = subprocess.run([sys.executable, "-c", code, *flags], cwd=ROOT, capture_output=True, text=True)
    elif words[0].endswith("megatron-rl-corr"):
        assert run_cli(words[1:], tmp_path) == 0
        return
    elif re.fullmatch("examples/[a-z]+/(run|calibrate).py", words[1]):
        run = subprocess.run([sys.executable, words[1], "--help"], cwd=ROOT, capture_output=True, text=True)
        for flag in words[2 : words.index("--") if "--" in words else None]:
            assert not flag.startswith("--") or flag in run.stdout
    elif words[1] == "scripts/generate_docs.py" or words[1:3] == ["-m", "sglang.launch_server"]:
        return  # the first writes pages, and has a test above; flags of the second: test_recipes.py
    else:
        run = subprocess.run([sys.executable, *words[1:]], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def run_cli(words: list[str], folder: Path) -> int:
    """The status of `megatron-rl-corr WORDS`; files of a run are made in `folder`."""
    if words[0] in NEEDS_MORE:
        cli._parser().parse_args(words)
        return 0
    if words[0] == "report":
        (folder / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
        words = ["report", str(folder)]
    if words[0] == "diagnose":
        ledger = (
            '"ledger/tokens": 100, "ledger/mean_abs": 0.5, "ledger/noise": 0.015, "ledger/rest/share": 1.0, '
            '"ledger/mean_square": 0.25'
        )
        (folder / "metrics.jsonl").write_text(f'{{"step": 1, {ledger}, "ledger/rest/mean_abs": 0.5}}\n')
        words = ["diagnose", str(folder)]
    if words[0] == "advise":
        measured = {"ess_sequences": 0.9, "chi2_seq": 0.1, "log_ratio_large_fraction": 0.01, "sequences": 64}
        row = {"step": 1} | {f"rollout_corr/{name}": value for name, value in measured.items()}
        (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
        words = ["advise", str(folder)]
    if words[0] == "incident":
        made = HandMadeRun(folder, steps=340).write()
        out = folder / "bundle"
        assert cli.main(["incident", str(made.log), "--step", "340", "--out", str(out)]) == 0
        words = ["incident", "--check", str(out), "--replayed", str(made.log)]
    if words[0] == "samples":
        run = write_run(folder / "run", {40: [sample([1, 2], [0.0, 0.1], group=812)]}, folder)
        words = ["samples", str(run), *words[2:]]
    try:
        return cli.main(words)
    except SystemExit as end:  # of --help
        return end.code


def python_blocks() -> list[tuple[str, str]]:
    blocks = re.compile(r"```python\n(.*?)```", re.DOTALL)
    return [(name(page), block) for page in PAGES for block in blocks.findall(page.read_text())]


@pytest.mark.parametrize(("page", "block"), python_blocks())
def test_python_of_a_page_then_runs(page, block):
    exec(compile(block, page, "exec"), {"__name__": page})


def test_first_example_of_the_library_then_prints_what_its_comments_say(capsys):
    block, *_ = [block for page, block in python_blocks() if page == "docs/guides/own_loop.md"]
    exec(compile(block, "own_loop.md", "exec"), {"__name__": "own_loop"})
    printed = capsys.readouterr().out
    assert "tensor([1.6487, 0.6065, 0.0000, 2.0000, 0.0000, 0.0000])" in printed
