"""The fused router, which Megatron imports by name and calls with --moe-router-fusion only."""


def _needs_a_gpu(*args, **kwargs):
    raise NotImplementedError("the fused router needs a GPU; train without --moe-router-fusion")


fused_topk_with_score_function = fused_compute_score_for_moe_aux_loss = fused_moe_aux_loss = _needs_a_gpu
