"""Gradients of MoE's auxiliary losses and the balancing bias's token counts, of padded rows and
of unpadded ones.

padding_worker.py PROCESSES MODEL_DIR OUT.pt '{"tp": 2, "sp": true, "length": 48, "lengths": [6, 12]}' ...
saves a list with, for each layout, its ranks' (gradients, {layer: counts}, {logged loss: sum}); a
microbatch is a group of samples of so many tokens. "old": as of a Megatron whose models take no mask.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.mcore import compat
from megatron_rl_corr.mcore.batch.packs import Packs
from megatron_rl_corr.mcore.batch.rollout_batch import chunk_multiple
from megatron_rl_corr.mcore.forward import compute_log_probs
from megatron_rl_corr.moe import padding
from megatron_rl_corr.moe.routers import moe_routers
from megatron_rl_corr.moe.routes import Routes

sys.path.insert(0, str(Path(__file__).parent))
import layout_worker
from forked_layouts import save_results
from layout_worker import GROUP_SIZE, local_parameters, set_up, step, whole_gradients

LEARNING = {
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.1,
    "moe_z_loss_coeff": 0.1,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
}


def without_bias(*args, **kwargs):
    """The tiny model's checkpoint has no bias that balances."""
    return [one for one in local_parameters(*args, **kwargs) if not one.local_name.endswith("expert_bias")]


def group_of(length, number):
    """Equal rewards, so no advantage: what is left of the gradients is the auxiliary losses'."""
    ids = torch.randint(1, 60, (GROUP_SIZE, length + 1), generator=torch.Generator().manual_seed(length))
    empty = torch.zeros(length - 2)
    return [
        {
            "group": number,
            "prompt": row[:3],
            "output": row[3:],
            "rollout": empty,
            "old_shift": empty,
            "reward": 1.0,
        }
        for row in ids
    ]


def learned(model_dir, spec):
    """This rank's share of the gradients, and the tokens that its routers counted for each
    expert of a layer.
    """
    layout_worker.LENGTH = spec["length"]
    samples = [sample for number, length in enumerate(spec["lengths"]) for sample in group_of(length, number)]
    layout_worker.local_parameters = without_bias
    if spec.get("old"):
        padding.takes_padding_mask = lambda chunk: False
    settings = LEARNING | spec.get("settings", {})
    model, parameters, layout, config, batch, _, logprobs = set_up(model_dir, samples, spec, **settings)
    counts, finalize = {}, config.finalize_model_grads_func

    def counted(*args, **kwargs):
        for chunk in compat.unwrapped(model):
            for router in moe_routers(chunk):
                counts[router.layer_number] = router.local_tokens_per_expert.clone()
        finalize(*args, **kwargs)

    config.finalize_model_grads_func = counted
    packs = Packs.of_rows(batch, GROUP_SIZE, spec["length"])  # one microbatch a group, so of other lengths
    if "packed" in spec:
        multiple = chunk_multiple(layout.cp_size) * layout.tp_group.size()
        empty = ((),) * spec.get("empty", 0)  # as where another replica has more sequences
        packs = Packs(batch, packs.samples + empty, spec["length"], multiple)
    scored = compute_log_probs(model, packs, logprobs, routes=Routes())
    if "packed" in spec:
        padding.set_packed_share(model, packs.real_token_share(layout, known=spec.get("known", packs.count)))
    get_moe_metrics_tracker().clear()
    step(model, layout, RolloutCorrectionConfig(), packs, scored, logprobs, config)
    logged = {name: metric.values.sum() for name, metric in get_moe_metrics_tracker().metrics.items()}
    for tokens in counts.values():
        dist.all_reduce(tokens, group=layout.tp_cp_group)
    gradients = whole_gradients(parameters, layout)
    ps.destroy_model_parallel()
    return gradients, counts, logged


def main(processes, model_dir, out, *specs):
    save_results(lambda model_dir, _, spec: learned(model_dir, spec), processes, model_dir, None, out, specs)


if __name__ == "__main__":
    main(*sys.argv[1:])
