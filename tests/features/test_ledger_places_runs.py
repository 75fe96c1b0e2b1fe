"""Real servers behind doors that hand them old weights, or two experts exchanged, and one of two servers that
computes otherwise: the ledger of a run says which layers and which server.
"""

import json
from contextlib import closing
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.faults.door import Door
from tests.features.test_ledger_causes_runs import EPSILON, PARALLEL, server_of
from tests.mcore.launched import launch, write_data
from tests.tiers import in_matrix, long, matrix

pytestmark = matrix

SCRIPT = Path(__file__).resolve().parents[1] / "matrix/pretrain_any.py"
RUN = [
    *["--global-batch-size", 32, "--train-iters", 3, "--save-interval", 100],
    *["--moe-grouped-gemm", "--moe-permute-fusion", "--rollout-probe-push", "off"],
    *["--rollout-ledger-interval", 1, "--rollout-ledger-share", 1, "--rollout-max-first-step-kl", 100],
    *["--rollout-weight-transport", "disk", "--rollout-verify-push", "off"],
]
COMPARE = ["--router-replay", "compare"]
PP2 = ["--pipeline-model-parallel-size", 2]
EP2 = ["--expert-model-parallel-size", 2, "--expert-tensor-parallel-size", 1, *COMPARE]
HALF = ["--bf16"]
RUNS = {
    # name: (servers, flags, processes)
    "layer": (["layer"], [*PARALLEL, *COMPARE], 4),
}
MORE = {
    "layer_alone": (["layer"], [], 1),
    "layer_lag": (["layer"], ["--rollout-max-lag", 1, "--train-iters", 5], 1),
    "layer_rounded": (["layer"], ["--rollout-push-rounding", "int4_group"], 1),
    "layer_pp2": (["layer"], PP2, 2),
    "ends": (["ends"], PP2, 2),
    "whole": (["whole"], [], 1),
    "whole_parallel": (["whole"], [*PARALLEL, *COMPARE], 4),
    "experts": (["experts"], EP2, 2),
    "one_epsilon": (["plain", "epsilon"], [], 1),
    "one_epsilon_ep2": (["plain", "epsilon"], EP2, 2),
    "one_layer": (["plain", "layer"], PP2, 2),
    "epsilon": (["epsilon"], EP2, 2),
    "clean": (["plain", "behind"], [], 1),
    "clean_pp2": (["plain", "behind"], [*PP2, *COMPARE], 2),
    "clean_ep2": (["plain", "behind"], EP2, 2),
    "clean_half": (["plain", "behind"], HALF, 1),
}


class Spoiled:
    """What a server gets in the place of a version: changed(tensors, those of the version before)."""

    def __init__(self, folder, changed):
        self._folder, self._changed, self._before = folder, changed, None

    def __call__(self, path, body):
        if path != "/update_weights_from_disk":
            return body
        asked = json.loads(body)
        source = Path(asked["model_path"])
        tensors = {}
        for file in source.glob("*.safetensors"):
            tensors |= load_file(file)
        made = self._folder / source.name
        made.mkdir(parents=True, exist_ok=True)
        for file in source.glob("*"):
            if file.suffix != ".safetensors" and "index" not in file.name:
                (made / file.name).write_bytes(file.read_bytes())
        changed = tensors if self._before is None else self._changed(tensors, self._before)
        save_file(changed, made / "model.safetensors", metadata={"format": "pt"})
        self._before = tensors
        return json.dumps(asked | {"model_path": str(made)}).encode()


def stale(*prefixes):
    return lambda now, before: {name: (before if name.startswith(prefixes) else now)[name] for name in now}


def exchanged(now, before):
    """Experts 4 to 7, which expert-parallel rank 1 of 2 holds, in each other's place in all layers."""
    names = {"4": "5", "5": "6", "6": "7", "7": "4"}

    def other(name):
        parts = name.split(".")
        if ".mlp.experts." in name and parts[5] in names:
            parts[5] = names[parts[5]]
        return ".".join(parts)

    return {name: now[other(name)] for name in now}


CHANGED = {
    "layer": stale("model.layers.2."),
    "ends": stale("model.embed_tokens.", "model.layers.3."),
    "whole": stale(""),
    "experts": exchanged,
    "behind": lambda now, before: now,
}


@pytest.fixture(scope="module")
def servers(tiny_moe_dir, tmp_path_factory):
    """Addresses of three real servers: two alike, and one with another epsilon."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("plain", "spoiled", "epsilon")}
    with (
        server_of(tiny_moe_dir, folders["plain"], {}) as plain,
        server_of(tiny_moe_dir, folders["spoiled"], {}) as spoiled,
        server_of(tiny_moe_dir, folders["epsilon"], EPSILON) as epsilon,
    ):
        yield {"plain": plain, "spoiled": spoiled, "epsilon": epsilon}


@pytest.fixture
def run(servers, tiny_moe_dir, tmp_path):
    """run(name): (its lines of the ledger, its steps), from the first one that has a version before."""
    write_data(tmp_path)

    def made(name):
        wanted, flags, processes = (RUNS | MORE)[name]
        spoiling = next((one for one in wanted if one in CHANGED), "behind")
        door = Door(servers["spoiled"], Spoiled(tmp_path / "spoiled", CHANGED[spoiling]))
        with closing(door):
            urls = [servers.get(one, door.url) for one in wanted]
            flags = [*RUN, "--rollout-weight-dir", tmp_path / "weights", *flags]
            done = launch(tmp_path, name, tiny_moe_dir, urls, SCRIPT, *flags, processes=processes)
        assert done.returncode == 0, done.stderr[-4000:] + done.stdout[-2000:]
        lines = [one for one in done.stdout.splitlines() if "[rollout] ledger of step" in one]
        print(name, *lines, sep="\n")
        steps = [json.loads(one) for one in (tmp_path / name / "log/metrics.jsonl").read_text().splitlines()]
        assert len(lines) == len(steps)
        first = 2 if "--rollout-max-lag" in flags else 1
        return lines[first:], steps[first:]

    return made


def causes_of(step):
    found = [name for name in step if name.startswith("ledger/as/") and name.endswith("/share")]
    return {name.removeprefix("ledger/as/").removesuffix("/share"): step[name] for name in found}


def names(prefix):
    return [name for name in [*RUNS, *in_matrix(*MORE)] if name.startswith(prefix)]


@pytest.mark.parametrize("name", names(("layer", "whole", "ends")))
def test_server_with_old_weights_then_the_ledger_says_in_which_parts(run, name):
    lines, steps = run(name)
    kind = name.split("_")[0]
    wanted = {"layer": "layer_2", "whole": "previous", "ends": "embedding+layer_3"}[kind]
    for line, step in zip(lines, steps, strict=True):
        [(found, share)] = causes_of(step).items()
        assert found == f"weights/{wanted}", line
        assert share > 0.95, line
        if "what no pass takes apart (mean" in line:  # with a lag it may be less than a tenth
            assert "is as if servers had the weights of the version before" in line


@long
@pytest.mark.parametrize("name", ["one_epsilon", "one_epsilon_ep2", "one_layer"])
def test_one_of_two_servers_that_differs_then_it_is_named_with_what_it_does(run, name):
    lines, steps = run(name)
    wanted = "weights/layer_2" if name == "one_layer" else "norm_epsilon/1e-05"
    for line, step in zip(lines, steps, strict=True):
        assert "of the rest is of samples of server 2 of 2 (http://" in line or "routing and rest" in line
        assert "server 2 of 2" in line and "server 1 of 2" not in line, line
        assert list(causes_of(step)) == [wanted] and "is as if that server had" in line, line
        assert step["ledger/at/server/2/share"] > 0.99


@long
def test_experts_exchanged_on_one_rank_then_it_is_named(run):
    lines, steps = run("experts")
    for line, step in zip(lines, steps, strict=True):
        [(found, share)] = causes_of(step).items()
        assert found.startswith("experts/rank_1") and share > 0.2, line
        assert "servers had others in the places of" in line and "of expert-parallel rank 1" in line, line
        assert "expert-parallel rank 0" not in line and "weights of the version before" not in line, line


@long
def test_all_servers_alike_in_another_epsilon_then_no_place_is_named(run):
    lines, steps = run("epsilon")
    assert all(list(causes_of(step)) == ["norm_epsilon/1e-05"] for step in steps), lines
    assert not any("expert-parallel" in line or "server " in line for line in lines), lines


@long
@pytest.mark.parametrize("name", ["clean", "clean_pp2", "clean_ep2", "clean_half"])
def test_two_servers_alike_then_nothing_is_blamed(run, name):
    lines, steps = run(name)
    assert all("nothing is blamed" in line and " server " not in line for line in lines), lines
    assert not any(causes_of(step) for step in steps)
