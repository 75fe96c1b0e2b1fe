"""A push to a real vLLM server with the V2 model runner, while it samples a response."""

import pytest
import torch

from megatron_rl_corr.rollout import SamplingParams
from tests.hf_truth import inside
from tests.matrix.patched import unchanged
from tests.server_load import wait_until_sampling
from tests.tiers import long
from tests.weight_sync.test_push_real_servers import PROMPT, Pushing, model_of, noisy, weights  # noqa: F401

pytestmark = [long, pytest.mark.usefixtures("one_rank")]
LONG = SamplingParams(48, temperature=1.5, top_k=20, ignore_eos=True)


def test_push_when_a_response_is_running_then_retracted_and_its_tokens_are_of_the_weights_that_its_spans_say(
    vllm_v2_server_fp32,
    weights,  # noqa: F811
    tiny_moe_dir,
    tmp_path,
):
    new = noisy(weights, seed=11)
    with unchanged(vllm_v2_server_fp32, tiny_moe_dir):
        trainer = Pushing([vllm_v2_server_fp32.url], "tensor", tiny_moe_dir, None, "vllm")
        try:
            trainer.push(weights, "old")
            running = trainer.loop.submit(trainer.client.generate([PROMPT], LONG))
            wait_until_sampling(vllm_v2_server_fp32.url)
            trainer.push(new, "new")
            (sample,) = running.result(120)
            assert trainer.compared == len(trainer.parameters())
        finally:
            trainer.close()
    old_span, new_span = sample.weight_versions
    assert (old_span.version, new_span.version, new_span.end) == ("old", "new", 48)
    ids, kept = torch.cat([sample.prompt_ids, sample.output_ids]), inside(sample, 83)
    for tensors, span in ((weights, old_span), (new, new_span)):
        model = model_of(tiny_moe_dir, tensors, tmp_path / span.version)
        with torch.no_grad():
            logits = model(ids[None]).logits[0, sample.prompt_ids.numel() - 1 : -1] / LONG.temperature
        own = (
            logits.masked_fill(~kept, -torch.inf).log_softmax(-1).gather(1, sample.output_ids[:, None])[:, 0]
        )
        assert (own - sample.rollout_logprobs)[span.start : span.end].abs().max() < 2e-5
