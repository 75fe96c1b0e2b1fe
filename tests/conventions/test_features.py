"""The house without one of its features: its folder and its name are deleted, and nothing else misses it."""

import ast
import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl_corr.config.features import FEATURES, feature_options
from megatron_rl_corr.config.fields import options_of
from megatron_rl_corr.config.flags import PREFIX
from tests.features_removed import package_without
from tests.tiers import long, matrix

pytestmark = matrix

ROOT = Path(__file__).resolve().parents[2]
FLAGS = ["--rollout-url", "http://127.0.0.1:1", "--rollout-hf-checkpoint", "m", "--rollout-prompts", "p"]
FLAGS += ["--rollout-reward-function", "f1", "--rollout-group-size", "2", "--rollout-max-new-tokens", "4"]
USE = """
import json, sys
from megatron_rl_corr.config.flags import parse
from megatron_rl_corr.config.run import RunConfig
from megatron_rl_corr.config.fields import options_of
from megatron_rl_corr.observability.catalogue import catalogue
_, options = parse(json.loads(sys.argv[1]))
refused = []
for flag in json.loads(sys.argv[2]):
    try:
        parse(json.loads(sys.argv[1]) + [flag, "1"])
    except ValueError as error:
        refused.append(str(error))
import megatron_rl_corr
print(json.dumps({
    "from": megatron_rl_corr.__file__, "options": sorted(options_of(RunConfig)), "refused": refused,
    "metrics": sorted(catalogue()),
}))
"""


@functools.cache
def whole():
    return shown(ROOT, FLAGS, [])


def shown(folder, *arguments):
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", USE, *map(json.dumps, arguments)],
        capture_output=True,
        text=True,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"},
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


@pytest.mark.parametrize(
    ("name", "owner"),
    [
        pytest.param(name, owner, marks=[long] * (at % 5 > 0))
        for at, (name, owner) in enumerate(zip(FEATURES, feature_options(), strict=True))
    ],
)
def test_feature_when_deleted_then_its_flags_and_metrics_are_unknown_and_no_other(tmp_path, name, owner):
    # others are left to Megatron, which refuses them too
    flags = [one.flag for one in options_of(owner).values() if one.flag.startswith(PREFIX)]
    left = shown(package_without(tmp_path, name), FLAGS, flags)
    assert left["from"].startswith(str(tmp_path.resolve()))
    assert set(whole()["options"]) - set(left["options"]) == set(options_of(owner))
    assert len(left["refused"]) == len(flags)
    assert all(
        text.startswith(f"unknown flag {flag};") for text, flag in zip(left["refused"], flags, strict=True)
    )
    texts = [path.read_text("utf-8") for path in (ROOT / "megatron_rl_corr/features" / name).rglob("*.py")]
    measures = any(re.search("^METRICS", text, re.MULTILINE) for text in texts)
    assert set(left["metrics"]) <= set(whole()["metrics"])
    assert (left["metrics"] != whole()["metrics"]) == measures


def imported(path):
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom):
            yield node.module or ""
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_kernel_when_read_then_it_names_no_feature():
    package = ROOT / "megatron_rl_corr"
    kernel = [path for path in package.rglob("*.py") if package / "features" not in path.parents]
    assert len(kernel) > 300
    wrong = [(path.name, name) for path in kernel for name in imported(path) if ".features." in name]
    assert wrong == []


@pytest.mark.parametrize("name", FEATURES)
def test_options_of_a_feature_when_read_then_they_import_nothing_heavy(name):
    names = list(imported(ROOT / "megatron_rl_corr/features" / name / "options.py"))
    assert [one for one in names if one.startswith("megatron_rl_corr.config.fields")]
    ours = ("megatron_rl_corr.config.",)
    assert [one for one in names if not one.startswith(ours) and one not in sys.stdlib_module_names] == []
