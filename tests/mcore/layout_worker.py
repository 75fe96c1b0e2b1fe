"""Loss, gradients and metrics of one corrected step under several layouts against a saved reference.

layout_worker.py PROCESSES MODEL_DIR REFERENCE.pt '{"tp": 2, "sp": true, "runs": [["token", 4]]}' ...
prints a line of JSON for each run, of a case of CONFIGS in so many microbatches: the gradients' worst
error, and the metrics.
"""

import json
import os
import sys
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from layout_cases import CONFIGS, LENGTH
from megatron.core import parallel_state as ps
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.multiprocessing import start_processes
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_rl_corr.core.token_baseline import total_power
from megatron_rl_corr.engines.trajectory import Support, TopLogprobs, Trajectory, VersionSpan
from megatron_rl_corr.mcore import compat
from megatron_rl_corr.mcore.batch.deal import Rewarded, deal_out
from megatron_rl_corr.mcore.batch.packing import PackLimits
from megatron_rl_corr.mcore.batch.packs import Packs
from megatron_rl_corr.mcore.batch.replicas import broadcast_to_replica
from megatron_rl_corr.mcore.batch.rollout_batch import BatchShape, RolloutBatch, chunk_multiple
from megatron_rl_corr.mcore.batch.sampling_masks import cut_sampling_masks, scatter_sampling_masks
from megatron_rl_corr.mcore.batch.slices import share_batch
from megatron_rl_corr.mcore.forward import LogprobSettings, compute_log_probs, make_forward_step
from megatron_rl_corr.mcore.loss import CorrectedLoss, LossScale, make_loss_inputs, make_unscored_loss_inputs
from megatron_rl_corr.mcore.reference.policy import less_reference_kl
from megatron_rl_corr.mcore.scoring import OldPass
from megatron_rl_corr.mcore.step_metrics import batch_metrics
from megatron_rl_corr.models.hf_checkpoint import HFCheckpoint
from megatron_rl_corr.models.layouts import LessOne
from megatron_rl_corr.models.names import NameTable
from megatron_rl_corr.models.shards import load_shards, local_parameters
from megatron_rl_corr.moe.routes import Routes
from megatron_rl_corr.reduce.collectives import ParallelGroups, all_reduce_metrics, merge
from megatron_rl_corr.weight_sync.changes import DeltaPushes, changed_units
from megatron_rl_corr.weight_sync.export import StageExporter
from tools.cpu.cp_attention import ContextParallelAttention
from tools.local_server import free_port

GROUP_SIZE, PADDED_VOCAB = 4, 96
DEALT = []
"""Numbers of the last packed batch's samples in its order, on a data leader."""


def transformer_config(hf, layout, **settings):
    moe = (
        {}
        if "num_experts_per_tok" not in hf
        else {
            "num_moe_experts": hf.get("num_experts") or hf["num_local_experts"],
            "moe_router_topk": hf["num_experts_per_tok"],
            "moe_ffn_hidden_size": hf["moe_intermediate_size"],
            "moe_token_dispatcher_type": "alltoall",
            "moe_router_load_balancing_type": "none",
            "moe_router_dtype": "fp32",
            "expert_model_parallel_size": layout.get("ep", 1),
            "expert_tensor_parallel_size": layout.get("etp", 1),
            "moe_grouped_gemm": not layout.get("local"),
            "moe_permute_fusion": not layout.get("local"),
        }
    )
    return TransformerConfig(
        **{
            **dict(
                num_layers=hf["num_hidden_layers"],
                hidden_size=hf["hidden_size"],
                ffn_hidden_size=hf["intermediate_size"],
                num_attention_heads=hf["num_attention_heads"],
                num_query_groups=hf["num_key_value_heads"],
                kv_channels=hf["head_dim"],
                normalization="RMSNorm",
                layernorm_epsilon=hf["rms_norm_eps"],
                qk_layernorm=True,
                gated_linear_unit=True,
                activation_func=F.silu,
                add_bias_linear=False,
                hidden_dropout=0.0,
                attention_dropout=0.0,
                attention_softmax_in_fp32=True,
                use_cpu_initialization=True,
                pipeline_dtype=torch.float32,
                bias_dropout_fusion=False,
                bias_activation_fusion=False,
                masked_softmax_fusion=False,
                gradient_accumulation_fusion=not layout.get("local", False),
                apply_rope_fusion=not layout.get("local", False),
                # As Megatron's own arguments demand: in one batch, two stages would take each other's sends
                # for one another.
                overlap_p2p_comm="vpp" in layout,
                batch_p2p_comm="vpp" not in layout,
                calculate_per_token_loss=layout.get("per_token", False),
                tensor_model_parallel_size=layout.get("tp", 1),
                sequence_parallel=layout.get("sp", False),
                context_parallel_size=layout.get("cp", 1),
                pipeline_model_parallel_size=layout.get("pp", 1),
                virtual_pipeline_model_parallel_size=layout.get("vpp"),
                **moe,
                **(
                    {
                        "recompute_granularity": "full",
                        "recompute_method": "uniform",
                        "recompute_num_layers": 1,
                    }
                    if layout.get("recompute")
                    else {}
                ),
            ),
            **(
                {"variable_seq_lengths": True, "moe_token_dispatcher_type": "alltoall"}
                if "packed" in layout
                else {}
            ),
            **settings,
        }
    )


def build(hf, config, layout):
    """The model's chunks on this rank."""
    if layout.get("local"):
        spec = get_gpt_layer_local_spec(
            num_experts=config.num_moe_experts,
            moe_grouped_gemm=False,
            qk_layernorm=True,
            normalization="RMSNorm",
        )
        if "packed" in layout:  # the local spec's own attention does not take packed sequences
            spec.submodules.self_attention.submodules.core_attention = ContextParallelAttention
    else:
        spec = get_gpt_layer_with_transformer_engine_spec(
            num_experts=config.num_moe_experts,
            moe_grouped_gemm=config.num_moe_experts is not None,
            qk_layernorm=True,
        )
    virtual = config.virtual_pipeline_model_parallel_size
    stages = range(virtual) if virtual else [None]
    return [
        GPTModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=PADDED_VOCAB,
            max_sequence_length=LENGTH,
            parallel_output=True,
            pre_process=ps.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            post_process=ps.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            vp_stage=stage,
            share_embeddings_and_output_weights=False,
            position_embedding_type="rope",
            rotary_base=10000,
        )
        for stage in stages
    ]


def replica_batch(samples, layout, *, packed=False):
    """This data-parallel replica's rows, as the collector would make them; or its sequences packed."""
    share = len(samples) // layout.dp_size
    mine = samples[layout.dp_rank * share : (layout.dp_rank + 1) * share]
    first_group = 0 if packed else mine[0]["group"]
    trajectories = [
        Trajectory(
            prompt_index=s["group"] - first_group,
            sample_index=number,
            prompt_ids=s["prompt"],
            output_ids=s["output"],
            rollout_logprobs=s["rollout"].float(),
            finish_reason="length" if s.get("masked") else "stop",
            weight_versions=(VersionSpan("0", 0, len(s["output"])),),
            cached_tokens=0,
            server="http://none",
            support=support_of(s),
            top_logprobs=top_of(s),
        )
        for number, s in enumerate(mine, layout.dp_rank * share)
    ]
    rewards = torch.tensor([s["reward"] for s in mine], dtype=torch.float32)
    top = {"top_logprobs": mine[0].get("top", 0)}
    if packed:
        mine, shift, trajectories = packed_batch(trajectories, rewards, samples, layout)
        return with_sampling_masks(mine, trajectories, layout), shift
    batch = RolloutBatch.from_trajectories(
        trajectories, rewards, length=LENGTH, version=0, multiple=LENGTH, mask_truncated=True, **top
    )
    shift = torch.zeros(len(mine), LENGTH)
    for row, s in enumerate(mine):
        start = len(s["prompt"]) - 1
        shift[row, start : start + len(s["output"])] = s["old_shift"].float()
    mine = share_batch(batch if layout.is_data_leader else None, len(mine), layout, multiple=LENGTH, **top)
    return with_sampling_masks(mine, trajectories, layout), shift[mine.seq_ids, mine.positions]


def with_sampling_masks(mine, trajectories, layout):
    if trajectories[0].support is None:
        return mine
    parts = (
        cut_sampling_masks(trajectories, mine.cu_seqlens, layout.cp_size) if layout.is_data_leader else None
    )
    with Traffic() as traffic:
        sampling_masks = scatter_sampling_masks(parts, mine.num_tokens, layout=layout)
    Traffic.seen = traffic.bytes
    return replace(mine, sampling_masks=sampling_masks)


def packed_batch(trajectories, rewards, samples, layout):
    """As the collector makes it of this replica's trajectories: dealt out over replicas, then packed."""
    multiple, batch, scored = chunk_multiple(layout.cp_size), None, None
    top = {"top_logprobs": samples[0].get("top", 0)}
    if layout.is_data_leader:
        scored = list(map(Rewarded, trajectories, rewards.tolist()))
    if layout.pp_rank == 0 and layout.tp_group.rank() == 0:
        scored, sent = deal_out(scored, len(trajectories), PackLimits(0, 0.01), layout)
        assert scored is None or sent > 0 or layout.dp_size == 1, "nothing moved"
    if layout.is_data_leader:
        trajectories, rewards = (
            [one.trajectory for one in scored],
            torch.tensor([one.reward for one in scored]),
        )
        DEALT[:] = [one.sample_index for one in trajectories]
        batch = RolloutBatch.from_trajectories(
            trajectories, rewards, length=LENGTH, version=0, multiple=multiple, mask_truncated=True, **top
        )
    batch = share_batch(batch, len(trajectories), layout, multiple=multiple, **top)
    if layout.dp_size > 1:
        batch = replace(batch, parted_groups=len(samples) // GROUP_SIZE)
    numbers = torch.tensor([one.sample_index for one in trajectories])  # as dealt, on the leader
    broadcast_to_replica([numbers], layout)
    shift = torch.zeros(batch.num_sequences, LENGTH)
    for row, number in enumerate(numbers.tolist()):
        s = samples[number]
        start = len(s["prompt"]) - 1
        shift[row, start : start + len(s["output"])] = s["old_shift"].float()
    return batch, shift[batch.seq_ids, batch.positions], trajectories


def packs_of(batch, layout, spec, microbatches):
    """The batch's microbatches; of padded rows so many."""
    rows = batch.num_sequences // microbatches
    return Packs.balanced(batch, BatchShape(0, GROUP_SIZE, rows, LENGTH, packing=limits_of(spec)), layout)


def limits_of(spec):
    """None for padded rows."""
    if "packed" not in spec:
        return None
    return PackLimits(spec["packed"], 0.01, count_multiple=spec["pp"] if "vpp" in spec else 1)


def support_of(sample):
    if "support" not in sample:
        return None
    lengths = torch.tensor([len(ids) for ids in sample["support"]], dtype=torch.int32)
    return Support(torch.cat(sample["support"]).int(), lengths)


def top_of(sample):
    if "top" not in sample:
        return None
    return TopLogprobs(sample["top_ids"].int(), sample["top_logprobs"].float())


class Traffic(TorchDispatchMode):
    """`bytes` that this rank sends to others, gets from them, and shares with its tensor-parallel group."""

    seen = None
    """Of the last batch with sampling masks."""

    def __init__(self):
        super().__init__()
        self.bytes = {"send": 0, "recv_": 0, "broadcast_": 0}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            name = func._schema.name.removeprefix("c10d::")
            self.bytes[name] += sum(tensor.numel() * tensor.element_size() for tensor in args[0])
        return func(*args, **(kwargs or {}))


def set_up(model_dir, samples, spec, **settings):
    """Groups, model with the checkpoint's weights, and this rank's share of the batch;
    settings are Megatron's.
    """
    ps.initialize_model_parallel(
        tensor_model_parallel_size=spec.get("tp", 1),
        pipeline_model_parallel_size=spec.get("pp", 1),
        virtual_pipeline_model_parallel_size=spec.get("vpp"),
        context_parallel_size=spec.get("cp", 1),
        expert_model_parallel_size=spec.get("ep", 1),
        expert_tensor_parallel_size=spec.get("etp", 1),
    )
    model_parallel_cuda_manual_seed(1)
    layout, checkpoint = compat.layout(sequence_parallel=spec.get("sp", False)), HFCheckpoint(model_dir)
    config = transformer_config(checkpoint.config, spec, **settings)
    chunks = build(checkpoint.config, config, spec)
    table = NameTable(checkpoint.config, padded_vocab_size=PADDED_VOCAB)
    parameters = local_parameters(
        chunks, table, experts_per_rank=(config.num_moe_experts or 0) // spec.get("ep", 1)
    )
    load_shards(parameters, checkpoint, layout.shard)
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    model = [
        DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=i > 0)
        for i, chunk in enumerate(chunks)
    ]
    config.finalize_model_grads_func = finalize_model_grads
    batch, shift = replica_batch(samples, layout, packed="packed" in spec)
    vocab_size, from_hidden = checkpoint.config["vocab_size"], spec.get("hidden", False)
    copies = not from_hidden and compat.has_output_processor(compat.unwrapped(model))
    logprobs = LogprobSettings(
        layout.tp_group, 1.0, vocab_size, from_hidden=from_hidden, before_copies=copies
    )
    return model, parameters, layout, config, batch, shift, logprobs


def run(model_dir, reference, spec):
    """(case, number of microbatches, metrics on the last stage, this rank's share of the
    gradients) of each run.
    """
    model, parameters, layout, config, batch, shift, settings = set_up(model_dir, reference["samples"], spec)
    scored = compute_log_probs(
        model, packs_of(batch, layout, spec, spec["runs"][0][1]), settings, routes=Routes()
    )
    for case, microbatch_count in spec["runs"]:
        name, _, how = case.partition("/")
        once = name.startswith("once")
        # Another pi_old, as in a later update of a batch, but for the cases of one update.
        shifted = scored if scored is None or once else (scored[0] + shift, scored[1])
        metrics = step(
            model,
            layout,
            CONFIGS[name],
            packs_of(batch, layout, spec, microbatch_count),
            shifted,
            settings,
            config,
            updates=1 if once else 2,
            in_loss=once and how != "scored",
        )
        numbers = all_reduce_metrics(metrics, layout.dp_cp_group) if layout.is_last_stage else {}
        yield case, microbatch_count, numbers, whole_gradients(parameters, layout)
    assert_changes_are_exact(gradient_exporter(parameters, layout))


def step(
    model,
    layout,
    correction,
    packs,
    scored,
    settings,
    config,
    *,
    updates=2,
    in_loss=False,
    reference=None,
    teacher=None,
    routes=None,
):
    """Correct, and one forward and backward pass into the gradient buffers; the metrics of the step.

    updates: of the batch; with more than one pi_old is `scored`. in_loss: the loss makes the correction.
    reference: log pi_ref of the labels. teacher: the loss inputs of distillation. routes: replay experts,
    within their `training`.
    """
    groups = ParallelGroups(cp=layout.cp_group, dp_cp=layout.dp_cp_group)
    in_loss = in_loss or correction.bypass_mode
    batch, inputs, metrics = packs.batch, None, {}
    if scored is not None and in_loss:
        inputs = make_unscored_loss_inputs(batch, correction, groups, group_size=GROUP_SIZE)
        metrics = batch_metrics(batch, inputs.correction, None, groups)
    elif scored is not None:
        lowered, kl = less_reference_kl(batch, scored[0], reference, correction, groups)
        collisions = scored[2] if correction.advantage_by_token else None
        inputs = make_loss_inputs(
            lowered,
            OldPass(scored[0], collisions=collisions),
            correction,
            groups,
            group_size=GROUP_SIZE,
            seq_length=LENGTH,
        )
        inputs = replace(inputs, ref_logprobs=reference)
        metrics = batch_metrics(batch, inputs.correction, scored[1], groups) | kl
        if correction.advantage_by_token:
            made, owner = inputs.correction, groups.cp_rank == 0
            metrics |= total_power(
                inputs.energies, inputs.advantages, made.weights, made.mask, made.kept_sequences, owner=owner
            )
    if inputs is not None and teacher:
        inputs = replace(inputs, **teacher)
    scale = LossScale(
        num_microbatches=packs.count,
        dp_size=layout.dp_size,
        per_token=config.calculate_per_token_loss,
        global_positions=packs.counted(layout),
    )
    loss = CorrectedLoss(correction, settings, scale, scored=not in_loss, groups=groups, updates=updates)
    for chunk in model:
        chunk.zero_grad_buffer()
    iterators = [packs.microbatches(inputs) for _ in model]
    get_forward_backward_func()(
        forward_step_func=make_forward_step(
            loss, settings, with_entropy=loss.with_entropy, routes=routes or Routes()
        ),
        model=model,
        data_iterator=iterators if len(model) > 1 else iterators[0],
        num_microbatches=packs.count,
        seq_length=LENGTH,
        micro_batch_size=packs.height,
        forward_only=False,
    )
    made = merge(loss.metrics.values())
    return metrics | {name: metric for name, metric in made.items() if not name.startswith("decision/")}


def gradient_exporter(parameters, layout):
    """Gathers the gradients in the place of the weights."""
    grads = [replace(p, tensor=p.tensor.main_grad) for p in parameters]
    return StageExporter(
        grads, layout.shard, layout.stage_groups, stage=layout.pp_rank, num_stages=layout.pp_size
    )


def whole_gradients(parameters, layout):
    """Hugging Face names -> whole gradients of this stage, on its sender: the exporter run over main_grad."""
    exporter = gradient_exporter(parameters, layout)
    tensors = {name: tensor.clone() for unit in exporter.units() for name, tensor in unit}
    for parameter in parameters:
        rule = parameter.rule(layout.shard.ep_rank)
        for name in rule.hf_names if isinstance(rule.layout, LessOne) else ():
            if name in tensors:
                tensors[name] -= 1  # a weight that is kept less 1 has its own gradient
    if not exporter.sends:
        assert exporter.planned() == {}
        return {}
    assert exporter.planned() == {name: list(tensor.shape) for name, tensor in tensors.items()}
    return tensors


@torch.no_grad()
def assert_changes_are_exact(exporter):
    """What a push of changes brings makes of the tensors of before those that are gathered whole now."""
    before = {name: tensor.clone() for unit in exporter.units() for name, tensor in unit}
    deltas = DeltaPushes(exporter, full_every=3)
    assert deltas.changes(same_servers=True) is None  # nothing is known to be there
    deltas.note_pushed("0", None)
    for number, parameter in enumerate(exporter.parameters):
        if number % 3:  # every third stays as it is
            parameter.tensor.view(-1)[number % 11 :: 11] += 1
    assert deltas.changes(same_servers=False) is None
    changes = deltas.changes(same_servers=True)
    assert 0.03 < changes.share < 0.1 and changes.due and changes.base == "0"
    now = {name: tensor.clone() for unit in exporter.units() for name, tensor in unit}
    applied, came = {name: tensor.clone() for name, tensor in before.items()}, set()
    for unit in changed_units(exporter.units(gather=changes.gather_changed)):
        for name, one in unit:
            applied[name].view(-1)[one.places.long()] = one.values
            came.add(name)
    assert applied.keys() == now.keys() == exporter.planned().keys()
    assert all(torch.equal(applied[name], now[name]) for name in now)
    assert not exporter.sends or 0 < len(came) < len(now)
    deltas.note_proof(changes, is_right=True)
    deltas.note_pushed("1", None)
    dues = []
    for number in range(2, 5):
        again = deltas.changes(same_servers=True)
        assert again.share == 0 and again.base == str(number - 1)
        assert list(changed_units(exporter.units(gather=again.gather_changed))) == []
        dues.append(again.due)
        deltas.note_pushed(str(number), again)
    assert dues == [False, False, True]  # of three pushes one sends everything


def gradient_error(expected, grads):
    """The worst relative error of a parameter's gradient, and its name."""
    worst = {
        name: float((grads[name].double() - grad).norm() / grad.norm().clamp(min=1e-6))
        for name, grad in expected.items()
    }
    name = max(worst, key=worst.get)
    return worst[name], name


def rank_main(rank, size, port, model_dir, reference, spec):
    torch.set_num_threads(1)
    reference = next((reference[name] for name in ("truncated", "centered") if spec.get(name)), reference)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    for case, microbatch_count, numbers, grads in run(model_dir, reference, spec):
        everything = [None] * size
        dist.all_gather_object(everything, (numbers, grads, Traffic.seen))
        if rank == 0:
            merged = {name: grad for _, part, _ in everything for name, grad in part.items()}
            error, worst = gradient_error(reference["cases"][case.partition("/")[0]]["grads"], merged)
            print(
                "RESULT "
                + json.dumps(
                    {
                        "layout": spec,
                        "case": case,
                        "microbatches": microbatch_count,
                        "gradient": error,
                        "worst": worst,
                        "metrics": next(found for found, _, _ in reversed(everything) if found),
                        "traffic": [seen for _, _, seen in everything],
                    }
                ),
                flush=True,
            )
    dist.barrier()
    os._exit(0)  # Megatron's leftovers may wait for each other at interpreter exit


def main(processes, model_dir, reference_path, *specs, of_rank=rank_main):
    reference = torch.load(reference_path, weights_only=True)
    for spec in map(json.loads, specs):
        # A fork a layout: what was imported is there, and the threads of the layout's gloo groups go with it.
        arguments = (int(processes), free_port(), model_dir, reference, spec)
        start_processes(of_rank, arguments, int(processes), start_method="fork")


if __name__ == "__main__":
    main(*sys.argv[1:])
