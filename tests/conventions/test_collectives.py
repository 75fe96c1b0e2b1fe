"""A function that exchanges something between ranks is marked @collective, and so is what calls it.

Ranks that leave such a call out make the others wait for ever, so a reader must see where they are. Calls are
found by their names: a marked function's name is followed where all functions of that name are marked.
"""

import ast
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "megatron_rl_corr"
FOLDERS = ("reduce", "core", "logprobs", "weight_sync", "moe", "mcore", "features")
EXCHANGE = re.compile(
    r"((^|\.)(dist|distributed)\.(all_|broadcast|reduce|barrier|gather|scatter|send|recv|batch_isend)"
    r"|^(all_gather|reduce_scatter)_single$)"
)
"""How a call is written that exchanges something."""
MARKED_BY_THEIR_NAMES = {
    "start",
    "after_scoring",
    "save_batch",
    "settle",
    "before_push",
    "after_push",
    "after_join",
    "end_step",
    "after_step",
    "forward",
    "backward",
    "__init__",
    "__call__",
}
"""Phases of mcore/feature.Feature, and methods that torch or Python calls."""
TOO_COMMON = {
    "broadcast",
    "check",
    "close",
    "collect",
    "log_probs",
    "open",
    "routing",
    "run",
    "scatter",
    "send",
    "units",
}
"""Names of marked functions that tensors, processes and others have too."""
OVER_GIVEN_GROUPS = {"compute_correction"}
"""Without groups they exchange nothing, and so may be called by one process."""


@dataclass(eq=False)
class Function:
    where: str
    name: str
    calls: set[str]
    exchanges: bool
    marked: bool


def body_of(node):
    """The nodes of a function without those of functions within it."""
    left = list(ast.iter_child_nodes(node))
    while left:
        yield (child := left.pop())
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            left.extend(ast.iter_child_nodes(child))


def functions_of(module, text):
    """All functions and methods of a file but those within functions."""

    def walk(node):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield child
            else:
                yield from walk(child)

    for node in walk(ast.parse(text)):
        calls = [ast.unparse(one.func) for one in body_of(node) if isinstance(one, ast.Call)]
        yield Function(
            f"{module}:{node.lineno} {node.name}",
            node.name,
            {call.rpartition(".")[2] for call in calls},
            any(EXCHANGE.search(call) for call in calls),
            any(ast.unparse(one) == "collective" for one in node.decorator_list),
        )


def wrong_marks(texts):
    """What breaks the rule in files: name -> text."""
    functions = [one for module, text in texts.items() for one in functions_of(module, text)]
    by_name = defaultdict(list)
    for one in functions:
        by_name[one.name].append(one)
    left_out = TOO_COMMON | MARKED_BY_THEIR_NAMES | OVER_GIVEN_GROUPS
    followed = {name for name, those in by_name.items() if all(one.marked for one in those)} - left_out
    return [
        f"{one.where} exchanges something, or calls {sorted(one.calls & followed)}, and is not marked"
        for one in functions
        if not one.marked and one.name not in MARKED_BY_THEIR_NAMES
        if one.exchanges or one.calls & followed
    ]


def package():
    return {
        path.relative_to(PACKAGE).as_posix(): path.read_text("utf-8")
        for folder in FOLDERS
        for path in sorted((PACKAGE / folder).rglob("*.py"))
    }


def test_package_when_checked_then_every_collective_function_is_marked():
    assert wrong_marks(package()) == []


def test_marks_when_counted_then_there_are_many():
    marked = [one for module, text in package().items() for one in functions_of(module, text) if one.marked]
    assert len(marked) > 100


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("def count(x):\n    dist.all_reduce(x)", 1),
        ("@collective\ndef count(x):\n    dist.all_reduce(x)", 0),
        ("@collective\ndef share(x):\n    dist.all_reduce(x)\n\ndef step(x):\n    self.share(x)", 1),
        ("@collective\ndef share(x):\n    dist.broadcast(x)\n\n@collective\ndef step(x):\n    share(x)", 0),
        ("def wait():\n    torch.distributed.barrier()", 1),
        ("def forward(x):\n    dist.all_reduce(x)", 0),
        ("def outer():\n    def inner(x):\n        dist.all_reduce(x)\n    return inner", 0),
    ],
)
def test_rule_when_tried_then_it_finds_what_is_not_marked(text, wrong):
    assert len(wrong_marks({"a.py": text})) == wrong
