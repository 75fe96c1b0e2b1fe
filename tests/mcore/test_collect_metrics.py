"""How a batch's samples came, in numbers: a batch that met nothing unusual alarms nobody."""

import pytest
import torch

from megatron_rl_corr.mcore.batch.collect_metrics import COUNTED, collection_metrics
from megatron_rl_corr.observability.alerts import find_alerts


@pytest.mark.parametrize("ended", [0.0, 8.0])
def test_batch_when_its_samples_had_all_ended_before_then_no_alert(ended):
    """As the last batches of an asynchronous run, whose samples were there by the batch before."""
    counts = dict.fromkeys(COUNTED, 0.0) | {"samples": 8.0, "tokens": 64.0, "ended": ended}
    made = collection_metrics(torch.tensor(list(counts.values()), dtype=torch.float64), with_routes=False)
    # What is of samples that there were none of has no value: a step leaves it out.
    numbers = {name: metric.value() for name, metric in made.items() if "/by_fate/" not in name}
    assert numbers["rollout/failed_fraction"] == 0 and find_alerts([{"step": 1, **numbers}]) == []
