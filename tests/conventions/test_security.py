"""What may run code, and what may write files: each place in the package is known, and is here
with its reason.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "megatron_rl_corr"
MODULES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))

RUNS_CODE = {
    # a file of functions that the user names, read once, before anything is asked for
    "data/loading.py": {"exec"},
    "mcore/batch/deal.py": {"pickle.loads"},  # samples from another rank of the run
    "rollout/ingest/messages.py": {"pickle.loads"},  # between a process and the one that it has started
    "config/yaml_file.py": {"yaml.load"},  # by a subclass of SafeLoader
}
"""Calls that can run what they read."""
WRITES = {
    "rollout/agents/starter.py": "in a new folder of its own, which no other user can read",
    "files.py": "files that are replaced in one move, a probe, and files that are added to, none through a "
    "link",
    "events.py": "opened without following a link",
    "models/hf_folder.py": "in a new folder beside its place, which may be no link",
    "weight_sync/transports/disk.py": "in a new folder in --rollout-weight-dir, which may be no link",
    "observability/metrics_file.py": "mends the end of a file that is no link",
    "commands/incident/bundle.py": "in a new folder beside its place, which may be no link",
    "commands/incident/command.py": "in that folder",
    "cli.py": "opens /dev/null",
}
"""Modules that open files to write them; others go through `files.py`."""
LOADS = {
    "eval",
    "exec",
    "pickle.load",
    "pickle.loads",
    "torch.load",
    "yaml.load",
    "marshal.loads",
    "joblib.load",
}
MODES = {"'w'", "'wb'", "'a'", "'ab'", "'w+'", "'a+'", "'x'", "'r+b'", "'r+'"}
METHODS = {"write_text", "write_bytes", "touch", "symlink_to", "hardlink_to"}


@cache
def calls(text: str) -> list[tuple[str, ast.Call]]:
    """(dotted name, call) of the code; of a method on anything but a name, its own name alone."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call):
            function = node.func
            if isinstance(function, ast.Name):
                found.append((function.id, node))
            elif isinstance(function, ast.Attribute):
                owner = function.value.id if isinstance(function.value, ast.Name) else ""
                found.append((f"{owner}.{function.attr}", node))
    return found


def may_run_code(text: str) -> list[str]:
    """Calls that may load a model's own code: `from_pretrained` without trust_remote_code=False,
    and True anywhere.
    """
    found = []
    for name, call in calls(text):
        given = {keyword.arg: keyword.value for keyword in call.keywords}
        trust = given.get("trust_remote_code")
        is_false = isinstance(trust, ast.Constant) and trust.value is False
        if (name.endswith(".from_pretrained") and not is_false) or (trust is not None and not is_false):
            found.append(f"line {call.lineno}: {name}")
    return found


def loads(text: str) -> set[str]:
    """Names of calls that can run what they read."""
    found = {name for name, _ in calls(text) if name in LOADS}
    for name, call in calls(text):
        if any(
            keyword.arg == "allow_pickle" and ast.unparse(keyword.value) != "False"
            for keyword in call.keywords
        ):
            found.add(f"{name} allow_pickle")
    return found


def writes(text: str) -> list[str]:
    """Calls that open a file to write it, or write one."""
    found = []
    for name, call in calls(text):
        last = name.rpartition(".")[2]
        words = [
            ast.unparse(value) for value in (*call.args[:2], *(keyword.value for keyword in call.keywords))
        ]
        opens = last == "open" and (MODES.intersection(words) or "O_WRONLY" in ast.unparse(call))
        if opens or last in METHODS or last == "save_file":
            found.append(f"line {call.lineno}: {name}")
    return found


def test_modules_then_they_run_no_code_of_a_model_and_load_and_write_only_where_known():
    for module in MODULES:
        text = (PACKAGE / module).read_text()
        assert may_run_code(text) == [], module
        assert loads(text) == RUNS_CODE.get(module, set()), module
        assert module in WRITES or writes(text) == [], module


@pytest.mark.parametrize(
    "text",
    [
        "AutoModel.from_pretrained(folder)",
        "AutoTokenizer.from_pretrained(folder, trust_remote_code=trust)",
        "load(folder, trust_remote_code=True)",
        "transformers.AutoConfig.from_pretrained(f, **{})",
    ],
)
def test_rule_when_a_models_code_may_run_then_found(text):
    assert may_run_code(text)
    assert not may_run_code("AutoModel.from_pretrained(folder, trust_remote_code=False)")


def test_rules_when_something_is_loaded_or_written_then_found():
    assert loads("torch.load(f); pickle.loads(b); exec(t); numpy.load(f, allow_pickle=True)") == {
        "torch.load",
        "pickle.loads",
        "exec",
        "numpy.load allow_pickle",
    }
    assert loads("numpy.load(f, allow_pickle=False); json.loads(t); re.compile(t)") == set()
    for text in (
        "open(p, 'w')",
        "p.open('ab')",
        "p.write_text(t)",
        "os.open(p, os.O_WRONLY)",
        "save_file(t, p)",
        "path.open(mode='a')",
    ):
        assert writes(text), text
    assert not writes("open(p); open(p, 'rb'); p.open(); json.dumps(w)")
