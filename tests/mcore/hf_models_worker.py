"""Loads Hugging Face checkpoints into real Megatron models built from their flags; compares
logits, exports again.

hf_models_worker.py 1|4 MODEL_DIR ...  in so many processes (4: TP 2, PP 2, and EP 2 of a model with
experts) prints for each model a line of JSON with the worst difference of the logits, and of those with
transformers' routes replayed; writes what each stage exports to
MODEL_DIR/sent/export-PROCESSES-STAGE.safetensors (SGLang loads every *.safetensors that lies in MODEL_DIR
itself), and which tensors of it are sent together to units-PROCESSES-STAGE.json; and saves a Megatron
checkpoint, MODEL_DIR/megatron-PROCESSES. hf_models_worker.py push URL MODEL_DIR  pushes the model from two
pipeline stages to a server, as version "1".
"""

import json
import multiprocessing
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from layout_worker import whole_gradients
from megatron.core import dist_checkpointing
from megatron.core import parallel_state as ps
from megatron.core.dist_checkpointing.strategies.filesystem_async import get_write_results_queue
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    get_transformer_block_with_experimental_attention_variant_spec,
)
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.training.argument_utils import core_transformer_config_from_args
from megatron.training.arguments import parse_args, validate_args
from safetensors.torch import save_file
from tiny_models import LENGTH, ROWS, VOCAB
from torch.multiprocessing import start_processes

from megatron_rl_corr.mcore import compat
from megatron_rl_corr.mcore.reference.policy import ReferenceWeights
from megatron_rl_corr.models.hf_checkpoint import HFCheckpoint
from megatron_rl_corr.models.megatron_flags import add_missing_flags, model_flags
from megatron_rl_corr.models.names import NameTable
from megatron_rl_corr.models.shards import load_shards, local_parameters
from megatron_rl_corr.moe.replay import ReplayedRouters
from megatron_rl_corr.rollout import LoopThread, RolloutClient
from megatron_rl_corr.weight_sync.coverage import make_coverage
from megatron_rl_corr.weight_sync.export import StageExporter
from megatron_rl_corr.weight_sync.rounding import ROUNDINGS, rounded_units
from megatron_rl_corr.weight_sync.servers import WeightServers
from megatron_rl_corr.weight_sync.transports import make_transport
from megatron_rl_corr.weight_sync.update import push_weights
from megatron_rl_corr.weight_sync.verify import make_verifiers
from tools.cpu.cp_attention import ContextParallelAttention
from tools.local_server import free_port

RUN = (
    "--distributed-backend gloo --use-cpu-initialization --lr 1e-3 --train-iters 1 --micro-batch-size 1 "
    f"--seq-length {LENGTH} --global-batch-size {ROWS} --tokenizer-type NullTokenizer "
    "--make-vocab-size-divisible-by 32"
).split()
TE = ["--transformer-impl", "transformer_engine", "--moe-grouped-gemm", "--moe-permute-fusion"]
LOCAL = [
    "--transformer-impl",
    "local",
    "--no-gradient-accumulation-fusion",
    "--no-masked-softmax-fusion",
    "--no-bias-swiglu-fusion",
    "--no-bias-dropout-fusion",
    "--no-rope-fusion",
    "--no-persist-layer-norm",
    "--attention-softmax-in-fp32",
]
NO_FUSED_ROPE = "--no-rope-fusion"
"""Latent attention's fused rotary embedding is a kernel of Megatron's own, which needs a GPU."""
TP2 = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
PP2 = ["--pipeline-model-parallel-size", "2"]
EP2 = ["--expert-model-parallel-size", "2", "--expert-tensor-parallel-size", "1"]


def arguments(config, without=(), extra=(), spec=TE):
    """Megatron's own, from the flags of config.json (but those of `without`, and their values)
    and the layout's.
    """
    flags, dropped = [], False
    for word in model_flags(config):
        dropped = word in without or (dropped and not word.startswith("--"))
        flags += [] if dropped else [word]
    if dist.get_world_size() > 1:
        flags += PP2
    if dist.get_world_size() == 4:
        flags += [*TP2, *(EP2 if "--num-experts" in flags else [])]
    if spec == TE and "--multi-latent-attention" in flags:
        flags.append(NO_FUSED_ROPE)
    sys.argv = ["worker", *flags, *spec, *RUN, *extra]
    args = parse_args(add_missing_flags)
    validate_args(args)
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    args.padded_vocab_size = -(-config["vocab_size"] // multiple) * multiple
    return args


class LatentCoreAttention(ContextParallelAttention):
    """Scores and softmax of latent attention: Megatron's local ones refuse its unequal head sizes, the
    others need a GPU. All around it, the projections and the rotary embedding, is Megatron's.
    """

    def __init__(self, *, k_channels=None, v_channels=None, **arguments):
        super().__init__(**arguments)


def build(args, config=None, **positions):
    """As Megatron's pretrain_gpt.py does, and with the rotary flags that it does not hand on."""
    config = config or core_transformer_config_from_args(args)
    if config.experimental_attention_variant:
        spec = get_transformer_block_with_experimental_attention_variant_spec(config)
    elif args.num_experts:
        te = args.transformer_impl == "transformer_engine"
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=te, normalization=args.normalization)
        for layer in spec.layer_specs if args.multi_latent_attention and not te else ():
            layer.submodules.self_attention.submodules.core_attention = LatentCoreAttention
    elif args.transformer_impl == "transformer_engine":
        spec = get_gpt_layer_with_transformer_engine_spec(
            qk_layernorm=args.qk_layernorm,
            qk_l2_norm=args.qk_l2_norm,
            multi_latent_attention=args.multi_latent_attention,
        )
    else:
        spec = get_gpt_layer_local_spec(
            qk_layernorm=args.qk_layernorm,
            qk_l2_norm=args.qk_l2_norm,
            normalization=args.normalization,
            multi_latent_attention=args.multi_latent_attention,
        )
    rotary = {
        "rotary_base": args.rotary_base,
        "rotary_percent": args.rotary_percent,
        "rope_scaling": args.use_rope_scaling,
        "rope_scaling_factor": args.rope_scaling_factor,
        "seq_len_interpolation_factor": args.rotary_seq_len_interpolation_factor,
        "position_embedding_type": args.position_embedding_type,
    }
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=LENGTH,
        pre_process=ps.is_pipeline_first_stage(),
        post_process=ps.is_pipeline_last_stage(),
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        **(rotary | positions),
    )
    return model.eval()


def inputs_of(row):
    """What a model's forward pass takes of a row of tokens: these, positions, and the causal mask."""
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    return row, torch.arange(LENGTH)[None], mask


def all_gather_logits(model, tokens, layout, before=lambda row: None):
    """[ROWS, LENGTH, VOCAB] on the last stage, None elsewhere. before(number of the row) is called
    before its pass.
    """

    def forward_step(iterator, model):
        number, row = next(iterator)
        before(number)
        return model(*inputs_of(row)), lambda logits, non_loss_data: logits

    rows = enumerate(tokens.split(1))
    with torch.no_grad():
        rows = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=rows,
            model=[model],
            num_microbatches=ROWS,
            seq_length=LENGTH,
            micro_batch_size=1,
            forward_only=True,
            collect_non_loss_data=True,
        )
    if not layout.is_last_stage:
        return None
    shard = torch.cat(rows)
    shards = [torch.empty_like(shard) for _ in range(layout.tp_group.size())]
    dist.all_gather(shards, shard, group=layout.tp_group)
    return torch.cat(shards, dim=-1)[..., :VOCAB]


def load(path):
    """The model with the checkpoint's weights, this rank's place, and the stage's exporter."""
    checkpoint = HFCheckpoint(path)
    args = arguments(checkpoint.config)
    ps.initialize_model_parallel(
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
    )
    model_parallel_cuda_manual_seed(1)
    layout, model = compat.layout(sequence_parallel=args.sequence_parallel), build(args)
    table = NameTable(checkpoint.config, padded_vocab_size=args.padded_vocab_size)
    experts = (args.num_experts or 0) // args.expert_model_parallel_size
    parameters = local_parameters([model], table, experts_per_rank=experts)
    load_shards(parameters, checkpoint, layout.shard)
    exporter = StageExporter(
        parameters, layout.shard, layout.stage_groups, stage=layout.pp_rank, num_stages=layout.pp_size
    )
    return model, layout, exporter, parameters


def check_exchange(model, layout, parameters, tokens, logits):
    """The checkpoint's weights wait on the host and take the place of others: all that the
    logits depend on goes.
    """
    weights, live = ReferenceWeights(parameters), [parameter.tensor for parameter in parameters]
    with torch.no_grad():
        for tensor in live:
            tensor *= 0.5
    halved = [tensor.clone() for tensor in live]
    with weights.in_place():
        inside = all_gather_logits(model, tokens, layout)
    assert all(map(torch.equal, live, halved)), "the exchange is not undone"
    other = all_gather_logits(model, tokens, layout)
    assert logits is None or (torch.equal(inside, logits) and not torch.equal(other, logits)), (
        "not all is exchanged"
    )
    with weights.in_place():
        weights_of_checkpoint = [tensor.clone() for tensor in live]
    with torch.no_grad():
        for tensor, value in zip(live, weights_of_checkpoint, strict=True):
            tensor.copy_(value)


def gradients(model, layout, parameters, reference):
    """{Hugging Face name: the whole gradient} of this stage, on its sender; as tiny_models.save_gradients."""
    shard = layout.tp_group.rank(), layout.tp_group.size()
    rows = reference["pull"].shape[-1]
    model.config.finalize_model_grads_func = finalize_model_grads
    wrapped = DistributedDataParallel(
        model.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model.train()
    )

    def forward_step(iterator, model):
        number, row = next(iterator)

        def loss(logits):
            own = logits.shape[-1]
            pull = torch.nn.functional.pad(reference["pull"][number], (0, own * shard[1] - rows))
            pulled = (logits[0] * pull[:, shard[0] * own : (shard[0] + 1) * own]).sum()
            return pulled, {"pulled": pulled.detach()}

        return model(*inputs_of(row)), loss

    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=enumerate(reference["tokens"].split(1)),
        model=[wrapped],
        num_microbatches=ROWS,
        seq_length=LENGTH,
        micro_batch_size=1,
        forward_only=False,
    )
    trained = [one for one in parameters if one.tensor.requires_grad]
    return whole_gradients(trained, layout)


def replay(model, layout, reference):
    """The logits where the routers take transformers' experts (R3), which must be those that they
    choose themselves.
    """
    tokens, routes, same = reference["tokens"], reference["routes"], []
    replayed = ReplayedRouters("R3", [model], layout, num_layers=model.config.num_layers)
    own = [replayed.shape.layers.index(layer) for layer in replayed.layers]

    def logits_of(routes):
        given = torch.cat([routes[:, own], routes[:1, own]])  # the last row stands for what is no token
        with replayed.scoring(given, lambda *seen: same.append(is_same(*seen[2:4])), tokens=len(routes)):
            return all_gather_logits(
                model,
                tokens,
                layout,
                lambda row: replayed.before_forward(model, torch.arange(LENGTH)[:, None] + row * LENGTH),
            )

    def is_same(given, chosen):
        return torch.equal(given.sort(-1).values, chosen.view(given.shape).sort(-1).values)

    logits = logits_of(routes)
    assert len(same) == ROWS * len(own) and all(same), "Megatron chooses other experts than transformers"
    other = logits_of(routes.roll(1, 0))
    assert logits is None or not torch.equal(other, logits), "routes have no effect"
    return logits


def compare(path):
    """The worst difference on the last stage, and that with routes replayed; exports."""
    model, layout, exporter, parameters = load(path)
    reference = torch.load(path / "reference.pt", weights_only=True)
    logits = all_gather_logits(model, reference["tokens"], layout)
    check_exchange(model, layout, parameters, reference["tokens"], logits)
    units = list(exporter.units())
    sent, folder = [named for unit in units for named in unit], path / "sent"
    folder.mkdir(exist_ok=True)
    if exporter.sends:
        together = [[name for name, _ in unit] for unit in units]
        (folder / f"units-{dist.get_world_size()}-{layout.pp_rank}.json").write_text(json.dumps(together))
        names = [name for name, _ in sent]
        assert len(names) == len(set(names)), "a tensor is sent twice"
        tensors = {name: tensor.contiguous() for name, tensor in sent}
        save_file(tensors, folder / f"export-{dist.get_world_size()}-{layout.pp_rank}.safetensors")
    for rounding in ROUNDINGS:
        rounded = dict(named for unit in rounded_units(exporter.units(), rounding) for named in unit)
        if exporter.sends:
            tensors = {name: tensor.contiguous() for name, tensor in rounded.items()}
            save_file(tensors, folder / f"{rounding}-{dist.get_world_size()}-{layout.pp_rank}.safetensors")
    saved = path / f"megatron-{dist.get_world_size()}"
    saved.mkdir(exist_ok=True)
    dist_checkpointing.save(model.sharded_state_dict(), str(saved))
    with_routes = replay(model, layout, reference) if "routes" in reference else None
    found = gradients(model, layout, parameters, reference)
    if exporter.sends:
        save_file(found, folder / f"gradients-{dist.get_world_size()}-{layout.pp_rank}.safetensors")
    return [
        None if found is None else (found - reference["logits"]).abs().max().item()
        for found in (logits, with_routes)
    ]


def push(url, path):
    """As mcore/session.py does."""
    _, layout, exporter, _ = load(path)
    loop = LoopThread()
    client = RolloutClient([url], vocab_size=VOCAB, timeout_s=60)
    transport = make_transport(
        "distributed",
        client,
        loop,
        backend="gloo",
        checkpoint=path,
        folder=None,
        stage=layout.pp_rank,
        sends=exporter.sends,
    )
    servers = WeightServers(
        client,
        loop,
        transport,
        verifiers=make_verifiers("checksum", path, client.fleet.engines),
        coverage=make_coverage(path),
    )
    push_weights(exporter, servers, version="1", bucket_bytes=20_000)  # several buckets
    servers.close()
    loop.call(client.close())
    loop.close()


def rank_main(rank, size, port, task, *arguments):
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    # Megatron's checkpoints would spawn its process, which imports torch anew
    get_write_results_queue("fork")
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    found = [None] * size
    dist.all_gather_object(found, task(*arguments) or [None, None])
    if rank == 0:
        worst, replayed = (
            max((difference for difference in differences if difference is not None), default=None)
            for differences in zip(*found, strict=True)
        )
        print(
            "RESULT " + json.dumps({"model": arguments[-1].name, "worst": worst, "replayed": replayed}),
            flush=True,
        )
    dist.barrier()
    for writer in multiprocessing.active_children():  # of the checkpoint: os._exit would leave them behind
        writer.terminate()
    os._exit(0)  # Megatron's leftovers may wait for each other at interpreter exit


def main(what, *arguments):
    if what == "push":
        url, path = arguments
        start_processes(rank_main, (2, free_port(), push, url, Path(path)), 2, start_method="fork")
        return
    for path in map(Path, arguments):
        # A fork a model: what was imported is there, and the threads of the gloo groups go with it.
        start_processes(rank_main, (int(what), free_port(), compare, path), int(what), start_method="fork")


if __name__ == "__main__":
    main(*sys.argv[1:])
