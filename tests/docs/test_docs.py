"""The documents say what is: generated pages are current, links lead somewhere, commands and code run."""

import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("[a-z]*/README.md"))]


def commands(page):
    """Indented lines of a page that start one of our programs; continued lines are joined."""
    text = page.read_text().replace("\\\n", " ")
    found = re.findall(r"^    ((?:make|torchrun|python|\.venv/bin/python) .*)$", text, re.MULTILINE)
    return [command for command in found if "[...]" not in command]  # a synopsis is no command


def all_commands():
    # Those of integrate.md want one another's results: test_integrate.py runs them in their order.
    pages = [page for page in PAGES if page.parent.name != "requirements" and page.name != "integrate.md"]
    return [(page.name, command) for page in pages for command in commands(page)]


def test_generated_pages_when_made_anew_then_unchanged():
    spec = importlib.util.spec_from_file_location("generate_docs", ROOT / "scripts/generate_docs.py")
    generate_docs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate_docs)
    for path, page in generate_docs.PAGES.items():
        assert (ROOT / path).read_text() == page(), f"run python scripts/generate_docs.py: {path} is out of date"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_a_page_then_lead_to_files_that_are_there(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_commands_then_there_are_some():
    assert len(all_commands()) >= 10


@pytest.mark.parametrize(("page", "command"), all_commands())
def test_command_of_a_page_then_runs(page, command, tmp_path):
    words = shlex.split(command)
    if words[0] == "make":
        # What the targets do is tested with the quickstart; here: they exist and take these variables.
        run = subprocess.run([*words, "--dry-run"], cwd=ROOT, capture_output=True, text=True)
    elif words[0] == "torchrun":
        flags = words[words.index("flags>") + 1 :]
        code = "import sys; from megatron_rl_corr.mcore.arguments import parse; parse(sys.argv[1:])"
        run = subprocess.run([sys.executable, "-c", code, *flags], cwd=ROOT, capture_output=True, text=True)
    elif words[1:3] == ["-m", "megatron_rl_corr.cli"] and words[3] == "report":
        (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
        run = subprocess.run([sys.executable, *words[1:4], tmp_path], cwd=ROOT, capture_output=True, text=True)
    elif words[1:3] == ["-m", "megatron_rl_corr.cli"] and words[3] in ("doctor", "correct"):
        # They need a live server or kept samples: their own tests have them. Here: these flags are known.
        code = "import sys; from megatron_rl_corr.cli import _parser; _parser().parse_args(sys.argv[1:])"
        run = subprocess.run([sys.executable, "-c", code, *words[3:]], cwd=ROOT, capture_output=True, text=True)
    elif words[1] == "examples/quickstart/run.py":
        run = subprocess.run([sys.executable, words[1], "--help"], cwd=ROOT, capture_output=True, text=True)
        for flag in words[2 : words.index("--")]:
            assert not flag.startswith("--") or flag in run.stdout
    else:
        run = subprocess.run([sys.executable, *words[1:]], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def python_blocks():
    blocks = re.compile(r"```python\n(.*?)```", re.DOTALL)
    return [(page.name, block) for page in PAGES for block in blocks.findall(page.read_text())]


@pytest.mark.parametrize(("page", "block"), python_blocks())
def test_python_of_a_page_then_runs(page, block):
    exec(compile(block, page, "exec"), {"__name__": page})


def test_readme_example_then_prints_what_its_comments_say(capsys):
    [block] = [block for page, block in python_blocks() if page == "README.md"]
    exec(compile(block, "README.md", "exec"), {"__name__": "readme"})
    printed = capsys.readouterr().out
    assert "tensor([1.6487, 0.6065, 0.0000, 2.0000, 0.0000, 0.0000])" in printed
