"""The page's command that starts vLLM: vLLM's own parser takes it, and the tests' servers are started so."""

import json
import re
import shlex
from pathlib import Path

import pytest

from megatron_rl_corr.engines.vllm.updates import EXTENSION, EXTENSION_CLASS
from tests.preloaded import run_preloaded
from tools.cpu import gpu_available
from tools.local_server import PROGRAMS

ROOT = Path(__file__).resolve().parents[2]
FOR_COUNTS = "--enable-prompt-tokens-details"
"""A flag of the tests' servers that no run needs."""
OF_A_RUN = {"--router-replay"}
"""Flags in the page's table that are not the server's."""
PARSE = """
import json, sys
try:
    from vllm.entrypoints.common.cli_args import make_arg_parser
except ModuleNotFoundError:  # 0.32
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = make_arg_parser(FlexibleArgumentParser())
args = parser.parse_args(sys.argv[1:])
taken = [args.model_tag, args.host, args.logprobs_mode, args.worker_extension_cls]
print("\\n" + json.dumps({"taken": taken, "flags": list(parser._option_string_actions)}))
"""


def commands() -> list[list[str]]:
    """The words of each `vllm serve` on a page, with the variables before it."""
    pages = [page.read_text().replace("\\\n", " ") for page in sorted((ROOT / "docs").rglob("*.md"))]
    return [
        shlex.split(line)
        for page in pages
        for line in re.findall(r"^    (.*vllm serve .*)$", page, re.MULTILINE)
    ]


def test_command_of_the_page_then_it_is_what_tests_start_and_vllm_has_its_flags(tmp_path):
    [words] = commands()
    serve, program = words.index("vllm"), PROGRAMS["vllm"]
    assert dict(word.split("=") for word in words[:serve]) == dict(program.variables)
    assert [word for word in (*program.arguments, *shlex.split(EXTENSION)) if word not in words] == [
        FOR_COUNTS
    ]
    if gpu_available():
        pytest.skip("make setup-vllm installs vLLM without a GPU only")
    (tmp_path / "parse.py").write_text(PARSE)
    run = run_preloaded([tmp_path / "parse.py", *words[serve + 2 :]], engine="vllm")
    assert run.returncode == 0, run.stderr[-2000:]
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["taken"] == [words[serve + 2], "127.0.0.1", "processed_logprobs", EXTENSION_CLASS]
    page = (ROOT / "docs/get_started/install.md").read_text()
    named = {
        flag for row in page.splitlines() if row.startswith("| `--") for flag in re.findall(r"--[a-z-]+", row)
    }
    assert named - set(found["flags"]) == OF_A_RUN and FOR_COUNTS in named
