"""Puts weights into a real server, behind a trainer's back."""

from megatron_rl_corr.rollout.client import RolloutClient


async def load(engine, url, tensors):
    """Put a whole model into a server, without a new name for its weights."""
    async with RolloutClient([url], vocab_size=83, engine=engine) as client:
        await client.pause_generation("retract")
        await client.reopen_weight_update()
        await client.update_weights_from_tensor([[client.engine_of(url).serialized(list(tensors.items()))]])
        await client.end_weight_update()
        await client.flush_cache()
        await client.continue_generation()
