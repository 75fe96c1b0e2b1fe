"""Log-probs that Megatron's hook takes from hidden states, in real models over gloo, against those
from the logits.
"""

import json
import re
from pathlib import Path

import pytest

from tests.megatron_forks import run_megatron

WORKER = Path(__file__).with_name("output_processor_worker.py")
LAYOUTS = {
    1: [{}, {"tied": True}],
    2: [
        {"tp": 2},
        {"tp": 2, "sp": True},
        {"tp": 2, "sp": True, "bf16": True},
        {"tp": 2, "tied": True},
        {"pp": 2},
    ],
    4: [{"tp": 2, "sp": True, "pp": 2}],
}


@pytest.mark.parametrize("processes", sorted(LAYOUTS))
def test_hidden_states_when_instead_of_logits_then_the_same_loss_scores_and_every_gradient(processes):
    run = run_megatron(WORKER, *map(json.dumps, LAYOUTS[processes]), ranks=processes)
    results = [
        json.loads(x.removeprefix("RESULT ")) for x in run.stdout.splitlines() if x.startswith("RESULT ")
    ]
    assert [result["layout"] for result in results] == LAYOUTS[processes], run.stderr[-3000:]
    for result in results:
        narrow = "bf16" in result["layout"]
        assert sum(rank["microbatches"] for rank in result["ranks"]) == 2 * processes // result["layout"].get(
            "pp", 1
        )
        for rank in result["ranks"]:
            # Megatron copies the logits, and their gradient: into rows, and in 16 bits into float32.
            before, after = rank["copies"]
            assert after == 0 and (before > 0 or rank["microbatches"] == 0), result
            for errors in (rank, rank["sampled rows"], rank["layer"]):
                assert errors["parameters"] >= 7
                assert errors["loss"] < 1e-5 and errors["scores"] < (1e-4 if narrow else 1e-5), result
                # bfloat16: shares and tiles of a gradient are rounded before they are summed, to 2^-9 each.
                assert errors["gradient"] < (1e-2 if narrow else 1e-5), result


@pytest.fixture(scope="module")
def refusals() -> dict[str, str]:
    """What output_refusals.py prints: importing Megatron changes how tensors are pickled, so not
    in this process.
    """
    run = run_megatron(WORKER.with_name("output_refusals.py"))
    lines = [line.removeprefix("RESULT ") for line in run.stdout.splitlines() if line.startswith("RESULT ")]
    assert run.returncode == 0, run.stderr[-3000:]
    return dict(map(json.loads, lines))


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("bias", "need an output layer without bias; take log-probs from the logits"),
        ("mup", "do not know MuP's scaled logits; take log-probs from the logits"),
        ("mtp", "do not know MTP, got 2 layers; take log-probs from the logits"),
        ("deferred", "--defer-embedding-wgrad-compute; leave it out"),
        ("fused", "would be lost: .* --no-gradient-accumulation-fusion"),
    ],
)
def test_output_layer_when_it_does_what_the_hook_does_not_then_refused(refusals, case, words):
    assert re.search(words, refusals[case])
