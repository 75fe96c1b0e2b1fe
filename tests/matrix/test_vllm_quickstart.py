"""The quickstart on a real vLLM server, TP 2 x PP 2 x EP 2: each stage's sender has a broadcast
group of its own.
"""

from megatron_rl_corr.observability.metrics_file import read_metrics
from tests.examples.test_quickstart import (
    FORKED,
    IN_FLOAT32,
    Quickstart,
    assert_no_mismatch,
    left_of,
    saved_samples,
)
from tests.tiers import long

pytestmark = long


def test_quickstart_when_vllm_samples_in_float32_then_log_ratios_after_every_push_are_below_1e_4(tmp_path):
    options = [*IN_FLOAT32, "--rollout-save-trajectories", str(tmp_path / "samples")]
    with Quickstart(
        tmp_path / "run", "--engine", "vllm", "--steps", "4", *options, program=[FORKED]
    ) as quickstart:
        assert quickstart.finish() == 0, quickstart.text
    steps = read_metrics(quickstart.out / "metrics.jsonl")
    assert [step["weight_version"] for step in steps] == [1, 2, 3, 4]
    assert_no_mismatch(saved_samples(tmp_path / "samples", steps))
    assert left_of(quickstart.out) == []
