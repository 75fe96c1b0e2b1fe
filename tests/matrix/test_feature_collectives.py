"""What each feature adds to the collectives of a step, on two ranks: nothing that is not written here."""

import json
from collections import Counter
from pathlib import Path

import pytest

from megatron_rl_corr.config.features import FEATURES
from tests.matrix.releases import OVERLAID, chosen
from tests.mcore.launched import launch, replayed

pytestmark = pytest.mark.skipif(chosen() != OVERLAID, reason="make test-matrix runs it")
SCRIPT = Path(__file__).resolve().parent / "counted_pretrain.py"
RUN = [
    *["--global-batch-size", 16, "--save-interval", 100, "--train-iters", 3],
    # With a scoring pass and replay in every run: some features need them.
    *["--rollout-rs", "seq_mean_k3", "--rollout-rs-threshold", 1, "--router-replay", "R3"],
    *[
        "--rollout-group-filter",
        "FOLDER/filter.py:keep",
        "--rollout-group-filter-measured",
        0,
        "--rollout-probe-push",
        "off",
    ],
]
FLAGS = {
    "router_replay_effect": ["--router-replay-effect-every", 1],
    "filtered_mismatch": ["--rollout-group-filter-measured", 0.25],
    "ledger": ["--rollout-ledger-interval", 1],
    "exact": ["--rollout-expect-exact", 1e9],
    "samples": ["--rollout-save-trajectories", "OUT/samples"],
    "export": ["--rollout-save-hf", "OUT/hf", "--rollout-save-hf-interval", 1],
    "trace": ["--rollout-trace", "OUT/traces"],
    "peak_memory": ["--rollout-peak-memory"],
    "push_probe": ["--rollout-probe-push", "on"],
    "evaluation": ["--rollout-eval-prompts", "FOLDER/prompts.jsonl", "--eval-interval", 1],
}
ADDED: dict[str, dict[str, int]] = {
    "router_replay_effect": {},
    "filtered_mismatch": {"all_reduce 2": 3},
    "ledger": {"all_reduce 2": 4},
    "exact": {"all_reduce 2": 1, "broadcast_object_list 2": 1},  # after a push: what the servers are
    "samples": {"all_reduce 2": 1},
    "export": {"all_reduce 2": 3},
    "trace": {},
    "peak_memory": {},
    "push_probe": {"all_reduce 2": 5, "broadcast 2": 1, "broadcast_object_list 2": 2},
    "evaluation": {"all_reduce 2": 2},
}
"""On rank 0, in the second of three steps. The ledger's: how many samples, how many microbatches, scores of
servers, whether anything is left.
"""


@pytest.fixture(scope="module")
def counts(keeping_server, tiny_moe_dir, tmp_path_factory):
    """Feature, or "" for none -> for each rank and step the collectives."""
    folder, found = tmp_path_factory.mktemp("counted"), {}
    (folder / "filter.py").write_text("def keep(prompt, group):\n    return prompt.input_ids[-1] % 2 == 0\n")
    with replayed(keeping_server, tiny_moe_dir, folder) as door:
        for name in ("", *FEATURES):
            door.replay()
            out = folder / f"with-{name}"
            out.mkdir()
            flags = [str(flag).replace("OUT", str(out)) for flag in (*RUN, *FLAGS.get(name, []))]
            flags = [flag.replace("FOLDER", str(folder)) for flag in flags]
            done = launch(
                folder, out.name, tiny_moe_dir, door.url, SCRIPT, *flags, processes=2, COUNTS=str(out)
            )
            assert done.returncode == 0, done.stderr[-4000:] + done.stdout[-2000:]
            found[name] = [json.loads((out / f"{rank}.json").read_text()) for rank in (0, 1)]
    return found


# An agent's episodes need a chat template, which this model lacks: tests/features/test_agent.py runs them. It
# has no sparse attention either: tests/mcore/test_indexer_replay.py replays keys.
@pytest.mark.parametrize("name", [name for name in FEATURES if name not in ("agent", "indexer_replay")])
def test_step_with_a_feature_then_these_collectives_and_no_others_are_added(name, counts):
    with_it, without = Counter(counts[name][0][1]), Counter(counts[""][0][1])
    added = {key: with_it[key] - without[key] for key in with_it | without if with_it[key] != without[key]}
    assert added == ADDED[name]


@pytest.mark.parametrize("name", ["", *FEATURES])
def test_step_then_both_ranks_take_part_in_the_same_collectives(name, counts):
    one, other = counts[name]
    assert one[1] == other[1]
