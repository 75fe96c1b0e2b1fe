"""A server's protocol stands in its engine's folder: nothing else of the package names the server."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from megatron_rl_corr.config.run import ENGINES

PACKAGE = Path(__file__).resolve().parents[2] / "megatron_rl_corr"
MODULES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))

FOLDERS = "megatron_rl_corr.engines."
ENDPOINT = re.compile(r"(/[a-z0-9]+(_[a-z0-9]+|\.json)*)+")

SHARED = "engines/openai_models.py"
"""Paths of OpenAI's API that more than one engine has."""
MAY_NAME = ("config/run.py", "doctor/", "commands/doctor/", "commands/planner/", "integrations/slime.py")
"""The list of engines, texts of the doctor and planner for users, and the hook of a trainer that
has its own SGLang.
"""


def engine_of(module: str) -> str | None:
    """The engine whose folder a file is in."""
    parts = module.split("/")
    return parts[1] if parts[0] == "engines" and len(parts) > 2 else None


def named_in_code(text: str) -> set[str]:
    """Engines that imports, names, attributes or strings of the code contain; documentation may name any.

    A default of an argument that is the very name of an engine is a choice, not its protocol.
    """
    tree = ast.parse(text)
    documentation = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    words = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            words += [node.value] * (node.value not in ENGINES)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            words += [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
        elif isinstance(node, (ast.Name, ast.Attribute)):
            words.append(node.id if isinstance(node, ast.Name) else node.attr)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            words.append(node.name)
    return {name for name in ENGINES for word in words if name in word.lower()}


def imported_folders(text: str) -> set[str]:
    """Folders of engines that code imports, or names as a module to import."""
    names = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.append(node.value)
    return {name for name in ENGINES for full in names if f"{full}.".startswith(f"{FOLDERS}{name}.")}


def endpoints(text: str) -> set[str]:
    """Strings of code that are a path of HTTP of one word or more, as "/generate"."""
    strings = (node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant))
    return {string for string in strings if isinstance(string, str) and ENDPOINT.fullmatch(string)}


def test_package_when_read_then_an_engines_folder_is_imported_by_itself_alone():
    found = {
        module
        for module in set(MODULES) - {"config/run.py"}  # where the one list of engines is
        if imported_folders((PACKAGE / module).read_text(encoding="utf-8")) - {engine_of(module)}
    }
    assert found == set()


def test_package_when_read_then_endpoints_stand_in_the_folders_of_engines():
    strings = {module: endpoints((PACKAGE / module).read_text(encoding="utf-8")) for module in MODULES}
    of_engines = set().union(*(own for module, own in strings.items() if engine_of(module)))
    assert "/generate" in of_engines
    found = {module: own & of_engines for module, own in strings.items() if engine_of(module) is None}
    assert found.pop(SHARED) == {"/v1/models", "/openapi.json"}
    assert [(module, own) for module, own in found.items() if own] == []


def test_package_when_read_then_an_engine_is_named_by_its_own_folder_alone():
    found = {
        module
        for module in MODULES
        if not module.startswith(MAY_NAME)
        and named_in_code((PACKAGE / module).read_text(encoding="utf-8")) - {engine_of(module)}
    }
    assert found == set()


def test_engines_when_listed_then_each_is_one_folder():
    folders = {module.split("/")[1] for module in MODULES if engine_of(module)}
    assert folders == set(ENGINES)
    assert all(module == f"megatron_rl_corr.engines.{name}" for name, module in ENGINES.items())


def test_rule_when_broken_then_it_says_so():
    for text in (
        "from megatron_rl_corr.engines.sglang import requests",
        "import sglang",
        'url + "/sglang/x"',
        "sglang_info(x)",
        'f"use SGLang {version}"',
        "class SGLangThing: pass",
    ):
        assert named_in_code(text) == {"sglang"}, text


def test_rule_of_imports_when_broken_then_it_says_so():
    for text in (
        "from megatron_rl_corr.engines.sglang import requests",
        "from megatron_rl_corr.engines import sglang",
        "def f():\n    import megatron_rl_corr.engines.sglang.requests",
        'importlib.import_module("megatron_rl_corr.engines.sglang")',
    ):
        assert imported_folders(text) == {"sglang"}, text
    for text in (
        "from megatron_rl_corr.engines import load_engine",
        "import sglang",
        'load_engine("sglang")',
    ):
        assert imported_folders(text) == set(), text


def test_rule_of_endpoints_when_broken_then_it_says_so():
    for endpoint in ("/generate", "/v1/models", "/openapi.json", "/update_weights_from_tensor"):
        assert endpoints(f'Request("POST", "{endpoint}")') == {endpoint}
    assert endpoints('x = "/"; y = "POST /flush_cache after every update"') == set()


def test_rule_when_kept_then_it_is_silent():
    for text in ('"""As SGLang does."""', "x = 1  # SGLang", 'def f(engine="sglang"): pass'):
        assert named_in_code(text) == set(), text
