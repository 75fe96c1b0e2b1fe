"""What is refused of routers that can not be replayed or watched, in a process of its own: ours
imports no Megatron.
"""

import json

import pytest

from tests.megatron_forks import run_megatron

CODE = """
import json, sys
from types import SimpleNamespace
import torch
from megatron_rl_corr.moe import replay, routers

KINDS = {"watched": ("off", True), "replayed": ("R3", False), "both": ("R2", True)}
GOOD = {
    "num_experts": 8,
    "moe_router_fusion": False,
    "moe_router_load_balancing_type": "none",
    "cuda_graph_impl": "none",
}
WRONG = {
    "num_experts": None,
    "moe_router_fusion": True,
    "moe_router_load_balancing_type": ["none", "sinkhorn"],
    "cuda_graph_impl": "local",
}


def said(check, *args, **more):
    try:
        check(*args, **more)
    except ValueError as error:
        return str(error)


def flags(kind, watch, **wrong):
    return SimpleNamespace(router_replay=kind, expert_statistics=watch, **GOOD | wrong)


found = {}
for name, (kind, watch) in KINDS.items():
    found[name] = {
        flag: said(routers.check_router_replay, flags(kind, watch, **{flag: value}))
        for flag, value in WRONG.items()
    }
    found[name]["good"] = said(routers.check_router_replay, flags(kind, watch))
    router = SimpleNamespace(
        config=SimpleNamespace(moe_router_fusion=False), routing_type="sinkhorn", layer_number=1
    )
    replay.moe_routers = lambda chunk: [router]
    found[name]["made"] = said(
        replay.ReplayedRouters, kind, [torch.nn.Linear(1, 1)], None, num_layers=1, watch=watch
    )
found["neither"] = said(routers.check_router_replay, flags("off", False, num_experts=None))
sys.modules["megatron.core.transformer.moe.router_replay"] = None
for name in ("megatron.core.transformer.moe",):
    vars(sys.modules[name]).pop("router_replay", None)
for name, (kind, watch) in KINDS.items():
    found[name]["old"] = said(routers.check_router_replay, flags(kind, watch))
print("RESULT " + json.dumps(found))
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    script = tmp_path_factory.mktemp("router_flags") / "cases.py"
    script.write_text(CODE)
    done = run_megatron(script)
    [line] = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")] or [
        done.stderr[-3000:]
    ]
    return json.loads(line.removeprefix("RESULT "))


@pytest.mark.parametrize(
    ("name", "given", "remedy"),
    [
        ("watched", "--expert-statistics", "leave --expert-statistics out"),
        ("replayed", "--router-replay R3", "use --router-replay off"),
        ("both", "--router-replay R2", "use --router-replay off and leave --expert-statistics out"),
    ],
)
def test_routers_when_refused_then_the_flag_that_was_given_and_what_is_not_yet_so(
    results, name, given, remedy
):
    found = dict(results[name])
    assert found.pop("good") is None
    assert len(found) == 6
    for said in found.values():
        assert given in said and said.endswith(remedy)
    assert "megatron-core 0.16 or newer, or" in found["old"]
    assert found["made"] == found["moe_router_load_balancing_type"]


def test_routers_when_nobody_asks_anything_of_them_then_nothing_is_refused(results):
    assert results["neither"] is None
