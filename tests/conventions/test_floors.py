"""The rules that keep the source readable: floors of imports, host reads, errors that go on, names, paths.

Each rule is a function from source text to what breaks it, and is tried on text that does.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "megatron_rl_corr"
MODULES = sorted(path.relative_to(ROOT).as_posix() for path in PACKAGE.rglob("*.py"))
TOOLS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "tools").rglob("*.py"))

FLOORS = [
    "files",
    "tables",
    "events",
    "config",
    "models",
    "engines",
    "reduce",
    "core",
    "logprobs",
    "data",
    "rollout",
    "weight_sync",
    "doctor",
    "moe",
    "mcore",
    "features",
    "observability",
    "integrations",
    "commands",
    "plugin",
    "launch",
    "cli",
]
"""A folder imports only from itself and from those before it; no files import each other in a circle."""

MOST_LINES = 80
KNOWN_CLIMBS: set[tuple[str, str]] = set()
KNOWN_CIRCLES: list[set[str]] = []

KNOWN_HOMONYMS: list[str] = []
"""Class names that still occur twice; never add one."""

HOST_READS = {
    ("reduce/metrics.py", "value"): "one rank's number, when a person asks",
    ("reduce/collectives.py", "all_reduce_metrics"): "the one read of a step's metrics",
    ("reduce/slices.py", "_wait"): "a leader makes no further slice before one has left its memory",
    ("reduce/failure.py", "_meet"): "whether to stop decides what Python does next",
}
"""(file, function): why it may wait for the device."""

BROAD_EXCEPTIONS = {
    ("data/reward_worker.py", "attempt"): "the trainer counts it, and shows the traceback",
    ("data/worker_pool.py", "_run"): "raised where the call is awaited",
    ("mcore/batch/collector.py", "_deal_and_lay_out"): "all_reduce_failure raises it on all ranks",
    ("mcore/membership.py", "_run"): "raised by change, on the main thread",
    ("reduce/failure.py", "all_reduce_results"): "all_reduce_done raises it once the other ranks know",
    ("reduce/failure.py", "broadcast_made"): "all_reduce_failure raises it once the other ranks know",
    ("weight_sync/update.py", "run"): "the thread's error is raised where its answer is read",
    ("rollout/queue.py", "_replace"): "raised by take",
    ("rollout/ingest/process.py", "_read"): "raised where the answers are waited for",
    ("rollout/ingest/process.py", "_send"): "raised where the answer is waited for",
    (
        "rollout/ingest/worker.py",
        "_receive",
    ): "the process ends, which is raised where its answers are waited for",
    ("rollout/ingest/worker.py", "_answer"): "raised in the process that waits for the answer",
    ("rollout/ingest/worker.py", "_portable"): "the error goes there by its words",
    ("rollout/agents/starter.py", "_be_harness"): "the fork ends, and its failure has its standard error",
    ("rollout/group_filter.py", "passes"): "counted as a failure, with the user's traceback",
    ("engines/vllm/worker/extension.py", "answered"): "the client raises it, as the answer to its request",
}
"""(file, function): how an error that is caught broadly is raised after all."""


@functools.cache
def parsed(text: str) -> ast.Module:
    """Ten rules read the same 300 files."""
    return ast.parse(text)


@functools.cache
def source(module: str) -> str:
    return (ROOT / module).read_text(encoding="utf-8")


def place(module: str) -> str:
    """The folder or top-level module that a file belongs to: core, launch, tools; '' for the
    package's __init__.
    """
    path = Path(module)
    first = path.parts[0] if path.parts[0] == "tools" else path.relative_to("megatron_rl_corr").parts[0]
    return first.removesuffix(".py").removeprefix("__init__")


def without_types(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those under `if TYPE_CHECKING:`, which are never imported."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        yield node
        yield from without_types(node)


def imported(text: str, *, for_types: bool = True) -> Iterator[str]:
    """Full names of what is imported, within functions too; for_types: and for type checking."""
    tree = parsed(text)
    for node in ast.walk(tree) if for_types else without_types(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def functions(text: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(parsed(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node


def enclosing(text: str, line: int) -> str:
    """The innermost function around a line; '' outside all."""
    around = [f for f in functions(text) if f.lineno <= line <= f.end_lineno]
    return max(around, key=lambda f: f.lineno).name if around else ""


# The rules


def wrong_floors(module: str, text: str) -> list[str]:
    mine, wrong = place(module), []
    for name in imported(text):
        if name.startswith("tools"):
            wrong.append(f"{module} imports {name}: the package is whole without tools/")
        if not mine or not name.startswith("megatron_rl_corr.") or name == "megatron_rl_corr.__version__":
            continue
        other = place(name.replace(".", "/"))
        known = (module.removeprefix("megatron_rl_corr/"), other) in KNOWN_CLIMBS
        if FLOORS.index(other) > FLOORS.index(mine) and not known:
            wrong.append(
                f"{module} (floor {FLOORS.index(mine)}) imports {name} (floor {FLOORS.index(other)})"
            )
    return wrong


def circles(texts: dict[str, str]) -> list[set[str]]:
    """The sets of modules that import each other. texts: module as core.metrics -> source."""
    arrows = {}
    for module, text in texts.items():
        found = set()
        for name in imported(text):
            name = name.removeprefix("megatron_rl_corr.")
            while name and name not in texts:
                name = name.rpartition(".")[0]
            found |= {name} - {"", module}
        arrows[module] = found
    reached = {module: set() for module in texts}
    for module in texts:
        waiting = list(arrows[module])
        while waiting:
            if (name := waiting.pop()) not in reached[module]:
                reached[module].add(name)
                waiting += arrows[name]
    found = []
    for module in texts:
        circle = {other for other in reached[module] if module in reached[other]}
        if len(circle) > 1 and circle not in found:
            found.append(circle)
    return found


def repeated_classes(texts: dict[str, str]) -> dict[str, list[str]]:
    """Class names that several files define: name -> those files. texts: file -> source."""
    files: dict[str, list[str]] = {}
    for module, text in texts.items():
        for name in {node.name for node in ast.walk(parsed(text)) if isinstance(node, ast.ClassDef)}:
            files.setdefault(name, []).append(module)
    return {name: where for name, where in files.items() if len(where) > 1}


def wrong_frameworks(module: str, text: str) -> list[str]:
    mine, wrong = place(module), []
    for name in imported(text, for_types=False):
        if name.split(".")[0] == "megatron" and mine not in ("moe", "mcore", "features", "integrations"):
            wrong.append(
                f"{module} imports {name}: only moe/, mcore/, features/ and integrations/ may know Megatron"
            )
        if (
            name.startswith("torch.distributed")
            and mine
            not in (
                "reduce",
                "logprobs",
                "weight_sync",
                "moe",
                "mcore",
                "features",
                "integrations",
                "commands",
            )
            and "/worker/" not in module
        ):  # which runs inside a server
            wrong.append(f"{module} imports {name}: only reduce/ and above may know process groups")
        if mine == "config" and name.split(".")[0] in ("torch", "numpy"):
            wrong.append(f"{module} imports {name}: the configuration is read before anything heavy")
    return wrong


def host_reads(module: str, text: str) -> list[str]:
    """Calls that wait for the device, in the code that a loss reaches."""
    wrong = []
    for node in ast.walk(parsed(text)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        name = node.func.attr
        if name in ("item", "tolist", "cpu", "numpy", "nonzero", "masked_select", "unique", "synchronize"):
            where = (module.removeprefix("megatron_rl_corr/"), enclosing(text, node.lineno))
            if where not in HOST_READS:
                wrong.append(f"{module}:{node.lineno} .{name}() reads the device")
    return wrong


def broad_excepts(module: str, text: str) -> list[str]:
    """Handlers of everything that do not end by raising."""
    wrong = []
    for node in ast.walk(parsed(text)):
        if not isinstance(node, ast.ExceptHandler):
            continue
        caught = "" if node.type is None else ast.unparse(node.type)
        if caught and not re.search(r"\b(Base)?Exception\b", caught):
            continue
        where = (module.removeprefix("megatron_rl_corr/"), enclosing(text, node.lineno))
        if not isinstance(node.body[-1], ast.Raise) and where not in BROAD_EXCEPTIONS:
            wrong.append(f"{module}:{node.lineno} except {caught or 'everything'} goes on")
    return wrong


def unsafe_yaml(module: str, text: str) -> list[str]:
    """Any reading of YAML but by safe_load, or by a loader that this file derives from SafeLoader."""
    tree = parsed(text)
    safe = {"yaml.SafeLoader"} | {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        and [ast.unparse(base) for base in node.bases] == ["yaml.SafeLoader"]
    }
    wrong = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("yaml."):
            name, loaders = ast.unparse(node.func), [k.value for k in node.keywords if k.arg == "Loader"]
            if (
                "load" in name
                and name != "yaml.safe_load"
                and not (name == "yaml.load" and loaders and ast.unparse(loaders[0]) in safe)
            ):
                wrong.append(f"{module}:{node.lineno} {name} is not safe")
    return wrong


def guessed_arguments(module: str, text: str) -> list[str]:
    """getattr(args, "x", default): an argument that does not exist would pass for one that is off."""
    return [
        f"{module}:{node.lineno} {ast.unparse(node)}"
        for node in ast.walk(parsed(text))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) == "getattr"
        and len(node.args) == 3
        and ast.unparse(node.args[0]) in ("args", "values", "settings", "options", "config")
    ]


def vague_names(module: str, text: str = "") -> list[str]:
    vague = {"utils", "util", "helpers", "helper", "common", "misc"}
    return [f"{module}: name it after its idea" for part in Path(module).parts if Path(part).stem in vague]


def too_long(module: str, text: str) -> list[str]:
    """Functions of more than MOST_LINES lines behind the docstring; a file is as long as its idea."""
    wrong = []
    for function in functions(text):
        body = function.body[1:] if ast.get_docstring(function) else function.body
        if body and (n := function.end_lineno - body[0].lineno + 1) > MOST_LINES:
            wrong.append(f"{module}:{function.lineno} {function.name} has {n} lines")
    return wrong


def headless(module: str, text: str) -> list[str]:
    """Docstrings that begin with "Of": what they are about stands nowhere."""
    return [
        f"{module}:{number} {line.strip()}"
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip().startswith('"""Of ')
    ]


def undocumented(module: str, text: str) -> list[str]:
    return [] if ast.get_docstring(parsed(text)) else [f"{module} does not say what it is"]


EVERYWHERE = [
    wrong_floors,
    wrong_frameworks,
    broad_excepts,
    unsafe_yaml,
    guessed_arguments,
    vague_names,
    too_long,
    headless,
    undocumented,
]


@pytest.mark.parametrize("rule", EVERYWHERE, ids=lambda rule: rule.__name__)
def test_package_when_checked_then_no_file_breaks_the_rule(rule):
    assert [line for module in MODULES for line in rule(module, source(module))] == []


def test_extras_when_training_starts_then_none_is_imported():
    # A function may import one: what needs it says which extra of setup.py brings it.
    wrong = [
        f"{module}:{node.lineno}"
        for module in MODULES
        if place(module) != "commands"
        for node in parsed(source(module)).body
        if isinstance(node, (ast.Import, ast.ImportFrom))
        if re.search(r"\b(matplotlib|math_verify|sympy)\b", ast.unparse(node))
    ]
    assert wrong == []


def test_tools_when_checked_then_no_file_breaks_the_rules_of_style():
    rules = (broad_excepts, guessed_arguments, too_long, undocumented)
    assert [line for module in TOOLS for rule in rules for line in rule(module, source(module))] == []
    # The stand-in has Transformer Engine's names.
    own = [module for module in TOOLS if not module.startswith("tools/cpu/te/")]
    assert [line for module in own for line in vague_names(module)] == []


def test_files_when_they_import_each_other_then_in_no_circle():
    texts = {
        module.removeprefix("megatron_rl_corr/")
        .removesuffix(".py")
        .replace("/", ".")
        .removesuffix(".__init__"): source(module)
        for module in MODULES
        if module != "megatron_rl_corr/__init__.py"
    }
    assert [circle for circle in circles(texts) if circle not in KNOWN_CIRCLES] == []
    assert circles({"a": "from megatron_rl_corr.b import c", "b": "import megatron_rl_corr.a", "c": ""}) == [
        {"a", "b"}
    ]


def test_classes_when_named_then_each_name_occurs_once_in_the_package():
    repeated = repeated_classes({module: source(module) for module in MODULES})
    # an entry that is not needed any more goes too
    assert sorted(repeated) == sorted(KNOWN_HOMONYMS), repeated
    assert repeated_classes({"a": "class X:\n    class Y: pass", "b": "class X: pass"}) == {"X": ["a", "b"]}


def test_loss_path_when_checked_then_nothing_reads_the_device():
    path = [m for m in MODULES if place(m) in ("core", "reduce", "logprobs")]
    path += ["megatron_rl_corr/mcore/loss.py", "megatron_rl_corr/mcore/forward.py"]
    assert [line for module in path for line in host_reads(module, source(module))] == []


@pytest.mark.parametrize("allowed", [HOST_READS, BROAD_EXCEPTIONS], ids=["host reads", "broad exceptions"])
def test_exceptions_to_a_rule_when_listed_then_they_exist(allowed):
    for file, function in allowed:
        assert function in [f.name for f in functions(source(f"megatron_rl_corr/{file}"))]


# Tracked files


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


MACHINE_PATH = re.compile(r"(?<![\w.$~}-])/(?:work|root|mnt|data|scratch|workspace)/\w")
ANOTHER_INDEX = re.compile(r"--(?:extra-)?index-url|--trusted-host|--find-links|PIP_INDEX|UV_INDEX")
URL_HOST = re.compile(r"https?://([A-Za-z0-9.-]+)")
PACKAGE_HOSTS = {"pypi.org", "files.pythonhosted.org", "download.pytorch.org", "github.com"}


def machine_traces(name: str, text: str) -> list[str]:
    """Paths of one machine; in what installs packages, hosts that are not everybody's."""
    wrong = [f"{name}: {match.group()}" for match in MACHINE_PATH.finditer(text)]
    if name.startswith(("requirements/", "scripts/", ".ci/")) or name in (
        "setup.py",
        "pyproject.toml",
        "Makefile",
    ):
        wrong += [f"{name}: {match.group()}" for match in ANOTHER_INDEX.finditer(text)]
        wrong += [f"{name}: {host}" for host in URL_HOST.findall(text) if host not in PACKAGE_HOSTS]
    return wrong


def test_tracked_files_when_read_then_no_path_or_index_of_one_machine():
    wrong = []
    for path in tracked():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a picture
        wrong += machine_traces(path.relative_to(ROOT).as_posix(), text)
    assert wrong == []


# Each rule on what breaks it

CORE, MCORE = "megatron_rl_corr/core/x.py", "megatron_rl_corr/mcore/x.py"


@pytest.mark.parametrize(
    "rule, module, text",
    [
        (wrong_floors, CORE, "from megatron_rl_corr.logprobs.vocab import vocab_parallel_logprobs"),
        (
            wrong_floors,
            CORE,
            "if TYPE_CHECKING:\n    from megatron_rl_corr.mcore.batch.rollout_batch import RolloutBatch",
        ),
        (wrong_floors, CORE, "def f():\n    import megatron_rl_corr.rollout.client"),
        (wrong_floors, "megatron_rl_corr/config/x.py", "from megatron_rl_corr.core import correction"),
        (wrong_floors, "megatron_rl_corr/reduce/x.py", "from megatron_rl_corr.rollout import client"),
        (wrong_floors, "megatron_rl_corr/weight_sync/x.py", "from megatron_rl_corr.mcore import compat"),
        (wrong_floors, MCORE, "from tools.cpu import environment"),
        (wrong_frameworks, CORE, "import torch.distributed as dist"),
        (wrong_frameworks, "megatron_rl_corr/weight_sync/x.py", "from megatron.core import mpu"),
        (wrong_frameworks, "megatron_rl_corr/config/x.py", "import torch"),
        (host_reads, CORE, "def f(x):\n    return x.sum().item()"),
        (host_reads, CORE, "def value(x):\n    return x.tolist()"),
        (broad_excepts, CORE, "try:\n    f()\nexcept Exception:\n    pass"),
        (broad_excepts, CORE, "try:\n    f()\nexcept (ValueError, BaseException) as e:\n    print(e)"),
        (broad_excepts, CORE, "try:\n    f()\nexcept:\n    raise_it = True"),
        (unsafe_yaml, CORE, "import yaml\nyaml.load(f)"),
        (unsafe_yaml, CORE, "import yaml\nyaml.load(f, Loader=yaml.Loader)"),
        (unsafe_yaml, CORE, "import yaml\nyaml.unsafe_load(f)"),
        (guessed_arguments, MCORE, "x = getattr(args, 'seq_length', 0)"),
        (vague_names, "megatron_rl_corr/core/utils.py", ""),
        (vague_names, "megatron_rl_corr/helpers/x.py", ""),
        (too_long, CORE, "def f():\n    'a'\n" + "    x = 1\n" * 81),
        (headless, CORE, 'x: int = 1\n"""Of a text."""'),
        (undocumented, CORE, "x = 1"),
        (machine_traces, "README.md", "see /" + "work/main"),
        (machine_traces, "requirements/x.lock", "--index-url https://pypi.org/simple"),
        (machine_traces, "setup.py", "https://" + "mirror.internal/simple"),
    ],
)
def test_rule_when_broken_then_it_says_so(rule, module, text):
    assert len(rule(module, text)) >= 1


@pytest.mark.parametrize(
    "rule, module, text",
    [
        (
            wrong_floors,
            CORE,
            "if TYPE_CHECKING:\n    from megatron_rl_corr.reduce.collectives import ParallelGroups",
        ),
        (wrong_floors, MCORE, "from megatron_rl_corr.weight_sync import push"),
        (host_reads, "megatron_rl_corr/reduce/metrics.py", "def value(x):\n    return x.tolist()"),
        (broad_excepts, CORE, "try:\n    f()\nexcept BaseException:\n    g()\n    raise"),
        (broad_excepts, CORE, "try:\n    f()\nexcept RolloutError:\n    pass"),
        (unsafe_yaml, CORE, "class L(yaml.SafeLoader): pass\nyaml.load(f, Loader=L)\nyaml.safe_load(f)"),
        (machine_traces, "README.md", "https://example.org/work/x and ./data/x and $HOME/data/x"),
    ],
)
def test_rule_when_kept_then_it_is_silent(rule, module, text):
    assert rule(module, text) == []
