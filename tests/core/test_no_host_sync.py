"""Nothing between the log-probs and the gradient reads the device: it runs on tensors that
hold no data at all.

On the meta device a value cannot be read, so .item(), .tolist(), .cpu(), `if tensor:` and
boolean indexing raise.
"""

import contextlib

import numpy as np
import pytest
import torch

from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.core.correction import compute_correction
from megatron_rl_corr.core.losses import policy_loss
from megatron_rl_corr.core.losses.distillation import TeacherScores, distill
from megatron_rl_corr.core.losses.score_centering import TopPolicies
from megatron_rl_corr.core.quadrants import quadrant_metrics
from megatron_rl_corr.logprobs.sampled_rows import SampledRows
from megatron_rl_corr.logprobs.vocab import vocab_parallel_logprobs
from megatron_rl_corr.mcore.step_scale import sequences_ess
from megatron_rl_corr.reduce.collectives import ParallelGroups
from tools.gpu_check.host_sync import CONFIGS, NoHostReads, check, step


@pytest.mark.parametrize("name", CONFIGS)
def test_step_when_tensors_hold_no_data_then_it_runs(name):
    assert step(CONFIGS[name], "meta").device.type == "meta"


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_step_when_samples_were_drawn_from_a_few_ids_then_none_reads_a_value_either(device):
    with contextlib.nullcontext() if device == "meta" else NoHostReads():
        assert step(CONFIGS["diagnostics only"], device, truncated=True).device.type == device


@pytest.mark.parametrize("name", CONFIGS)
def test_step_when_every_operator_is_watched_then_none_reads_a_value(name):
    with NoHostReads():
        gradient = step(CONFIGS[name], "cpu")
    assert gradient.isfinite().all()


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_step_scale_when_tensors_hold_no_data_or_are_watched_then_its_sums_read_no_value(device):
    rows, zeros = torch.arange(4, device=device), torch.zeros(4, device=device)
    with contextlib.nullcontext() if device == "meta" else NoHostReads():
        correction = compute_correction(
            zeros, zeros, zeros == 0, rows, num_sequences=4, config=RolloutCorrectionConfig()
        )
        assert sequences_ess(correction, ParallelGroups()).values.device.type == device


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_quadrants_when_tensors_hold_no_data_or_are_watched_then_they_read_no_value(device):
    ones = torch.ones(4, device=device)
    with contextlib.nullcontext() if device == "meta" else NoHostReads():
        found = quadrant_metrics(ones, ones, ones, ones, ones > 0)
    assert all(metric.values.device.type == device for metric in found.values())


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_score_centering_when_tensors_hold_no_data_or_are_watched_then_it_reads_no_value(device):
    config = RolloutCorrectionConfig(rollout_is="token", rollout_is_upper=2.0)
    logits = torch.zeros(4, 6, device=device).requires_grad_()
    ids = torch.zeros(4, 2, dtype=torch.int32, device=device)
    ones, rows = torch.ones(4, device=device), torch.arange(4, device=device)
    sampled = SampledRows.of(np.array([1, 0, 1, 1]), device)
    with contextlib.nullcontext() if device == "meta" else NoHostReads():
        logprobs, entropy, of_ids = vocab_parallel_logprobs(
            logits, rows, with_entropy=True, sampled=sampled, ids=ids
        )
        old = logprobs.detach()
        correction = compute_correction(old, old, ones > 0, rows, num_sequences=4, config=config)
        top = TopPolicies(of_ids, of_ids.detach())
        loss = policy_loss("ppo_clip", logprobs, old, ones, correction, config, top=top, metrics={})
        (gradient,) = torch.autograd.grad(loss.sum() + entropy.sum(), logits)
    assert gradient.device.type == device


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: bool(x.sum() > 0),
        lambda x: x[x > 0],
        lambda x: x.cpu().numpy(),
        lambda x: torch.repeat_interleave(x.long()),
    ],
)
def test_the_watch_when_code_does_read_then_one_of_the_two_notices(read):
    noticed = 0
    for device, watch in (("meta", contextlib.nullcontext()), ("cpu", NoHostReads())):
        try:
            with watch:
                read(torch.ones(3, device=device))
        except (AssertionError, RuntimeError, NotImplementedError):
            noticed += 1
    assert noticed


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_steps_when_on_a_gpu_then_no_synchronisation():
    check("cuda")


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize("k", [0, 2])
def test_distillation_when_tensors_hold_no_data_or_are_watched_then_it_reads_no_value(k, device):
    settings = {"rollout_is": "sequence", "rollout_is_upper": 2.0, "distill_top_k": k or None}
    config = RolloutCorrectionConfig(distill_coef=1.0, **settings)
    logits = torch.zeros(4, 6, device=device).requires_grad_()
    ones, rows = torch.ones(4, device=device), torch.arange(4, device=device)
    ids = torch.zeros(4, k, dtype=torch.int32, device=device) if k else None
    teacher = TeacherScores(-ones, ids, -torch.ones(4, k, device=device) if k else None)
    with contextlib.nullcontext() if device == "meta" else NoHostReads():
        logprobs, _, *of_ids = vocab_parallel_logprobs(logits, rows, ids=ids)
        made = distill(logprobs.detach(), teacher, 1.0, labels=rows, top_logprobs=of_ids[0] if k else None)
        old = logprobs.detach()
        correction = compute_correction(old, old, ones > 0, rows, num_sequences=4, config=config)
        metrics = {}
        losses = policy_loss(
            "ppo_clip", logprobs, old, ones, correction, config, distilled=made, metrics=metrics
        )
        losses.sum().backward()
    assert logits.grad.device.type == device and ("distill_top_kl" in metrics) == bool(k)
