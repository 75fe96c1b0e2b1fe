"""Megatron's own schedule over ten steps, packed and in padded rows: the same, whatever the
microbatches are.
"""

import re

from tests.matrix.patched import unchanged
from tests.matrix.test_reference import REPLICAS, launch, steps_of
from tests.tiers import long

pytestmark = long
STEPS = 10
SCHEDULE = [
    "--train-iters",
    STEPS,
    "--lr-decay-style",
    "cosine",
    "--lr-warmup-iters",
    3,
    "--lr-decay-iters",
    STEPS,
    "--min-lr",
    1e-5,
    "--micro-batch-size",
    2,
]


def test_schedule_after_ten_steps_when_packed_then_learning_rate_and_consumed_samples_are_those_of_rows(
    tmp_path, tiny_moe_dir, sglang_server_fp32
):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = {}
    for kind, flags in (("packed", []), ("rows", ["--rollout-pad-sequences"])):
        folder = tmp_path / kind
        logs = ["--tensorboard-dir", tmp_path / f"{kind}_tensorboard"]
        with unchanged(sglang_server_fp32, tiny_moe_dir):
            done = launch(folder, tiny_moe_dir, sglang_server_fp32.url, *REPLICAS, *SCHEDULE, *logs, *flags)
        assert done.returncode == 0, done.stderr[-4000:]
        events = EventAccumulator(str(logs[1])).Reload()
        rates = [event.value for event in events.Scalars("learning-rate")]
        consumed = [int(number) for number in re.findall(r"consumed samples:\s+(\d+)", done.stdout)]
        found[kind] = rates, consumed
        assert all(step["skipped"] == 0 for step in steps_of(folder))
    moved = [step["packing/moved_bytes"] for step in steps_of(tmp_path / "packed")]
    assert any(number > 0 for number in moved), "no sample was dealt to the other replica"
    packs = [step["packing/microbatches"] for step in steps_of(tmp_path / "packed")]
    assert len(packs) == STEPS and 4 not in packs, "as many microbatches as the calculator knows: 16 / 2 / 2"
    assert found["packed"] == found["rows"]
    rates, consumed = found["rows"]
    assert (
        consumed == [16 * step for step in range(1, STEPS + 1)]
        and len(set(rates)) > 5
        and len(rates) == STEPS
    )
