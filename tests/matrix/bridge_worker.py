"""Builds models by Megatron-Bridge, those that are refused too; loads and exports them by this package and by
Bridge itself.

bridge_worker.py 1|4 MODEL_DIR ...  in so many processes (4: PP 2, TP 2 where Bridge's layers are right with
it, EP 2 of a model with experts) prints for each model a line of JSON: the worst difference of the logits,
names of what is sent, of what of it is not the folder's or not Bridge's own export, and relative errors of
gradients.
"""

import json
import os
import sys
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from bridge_models import VOCAB, WITHOUT_TP
from hf_models_worker import (
    EP2,
    NO_FUSED_ROPE,
    PP2,
    RUN,
    TE,
    TP2,
    all_gather_logits,
    check_exchange,
    gradients,
)
from megatron.core import parallel_state as ps
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.training.arguments import parse_args, validate_args
from megatron.training.global_vars import set_args, unset_global_variables
from torch.multiprocessing import start_processes

from megatron_rl_corr.mcore import bridge_model, compat
from megatron_rl_corr.mcore.bridge_names import auto_bridge, parameter_names
from megatron_rl_corr.models import bridge
from megatron_rl_corr.models.hf_checkpoint import HFCheckpoint
from megatron_rl_corr.models.megatron_flags import add_missing_flags
from megatron_rl_corr.models.shards import load_shards, local_parameters
from megatron_rl_corr.weight_sync.export import StageExporter
from tools.local_server import free_port


def arguments(path):
    """Megatron's own, from the flags that Bridge's model has, and the layout's."""
    flags = bridge_model.flags_of(path)
    if dist.get_world_size() > 1:
        flags += PP2
    if dist.get_world_size() == 4:
        flags += [] if path.name in WITHOUT_TP else TP2
        flags += EP2 if "--num-experts" in flags else []
    # whether experts are grouped is Bridge's to say: some of its mappings have no names for them one by one
    kernels = [flag for flag in TE if flag != "--moe-grouped-gemm"]
    sys.argv = ["worker", *flags, *kernels, NO_FUSED_ROPE, *RUN]
    args = parse_args(add_missing_flags)
    validate_args(args)
    args.rollout_hf_checkpoint = str(path)
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    args.padded_vocab_size = -(-VOCAB // multiple) * multiple
    return args


def load(path):
    """The model with the folder's weights, this rank's place and parameters, and the folder."""
    args = arguments(path)
    ps.initialize_model_parallel(
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
    )
    model_parallel_cuda_manual_seed(1)
    set_args(args)
    model = bridge_model.bridge_model(ps.is_pipeline_first_stage(), ps.is_pipeline_last_stage()).eval()
    layout, checkpoint = compat.layout(sequence_parallel=args.sequence_parallel), HFCheckpoint(path)
    names = parameter_names(checkpoint.config, "bridge", padded_vocab_size=args.padded_vocab_size)
    experts = (args.num_experts or 0) // args.expert_model_parallel_size
    parameters = local_parameters([model], names, experts_per_rank=experts)
    # MiniMax's norms ask for the number of this rank's GPU, which is a device without one
    with mock.patch("torch.cuda.current_device", return_value=0):
        load_shards(parameters, checkpoint, layout.shard)
    problems = bridge_model.model_problems(model, bridge_model.configured_provider(args))
    assert not problems, problems
    return model, layout, parameters, checkpoint


def compare(path):
    """This rank's part of the line of JSON."""
    model, layout, parameters, checkpoint = load(path)
    reference, found = torch.load(path / "reference.pt", weights_only=True), {}
    logits = all_gather_logits(model, reference["tokens"], layout)
    if logits is not None:
        found["logits"] = float((logits - reference["logits"]).abs().max())
    check_exchange(model, layout, parameters, reference["tokens"], logits)
    exporter = StageExporter.of(parameters, layout)
    sent = dict(named for unit in exporter.units() for named in unit)
    theirs = auto_bridge(checkpoint.config).export_hf_weights([model], cpu=True, show_progress=False)
    # Bridge leaves the rows of the padded vocabulary in
    theirs = {name: tensor[: sent[name].shape[0]] for name, tensor in theirs if name in sent}
    if exporter.sends:
        assert exporter.planned() == {name: list(tensor.shape) for name, tensor in sent.items()}
        found["sent"] = sorted(sent)
        found["not the folder's"] = [n for n, t in sent.items() if not torch.equal(t, checkpoint.tensor(n))]
        found["not Bridge's"] = [
            n for n, t in sent.items() if n not in theirs or not torch.equal(t, theirs[n])
        ]
    if (path / "gradients").is_dir():
        expected, made = HFCheckpoint(path / "gradients"), gradients(model, layout, parameters, reference)
        found["gradients"] = {
            name: float((one.double() - expected.tensor(name)).norm() / expected.tensor(name).norm())
            for name, one in made.items()
        }
    unset_global_variables()
    ps.destroy_model_parallel()
    return found


@mock.patch.dict(bridge.OTHER_MODEL, clear=True)
def work(rank, processes, port, folders):
    os.environ |= {"WORLD_SIZE": str(processes), "RANK": str(rank), "LOCAL_RANK": str(rank)}
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=processes)
    for folder in folders:
        found = [None] * processes
        dist.all_gather_object(found, compare(Path(folder)))
        if rank == 0:
            keys = ("sent", "not the folder's", "not Bridge's")
            whole = {key: [name for one in found for name in one.get(key, [])] for key in keys}
            whole["gradients"] = {n: x for one in found for n, x in one.get("gradients", {}).items()}
            whole["logits"] = max(one["logits"] for one in found if "logits" in one)
            print(json.dumps({"model": Path(folder).name, **whole}), flush=True)


if __name__ == "__main__":
    processes = int(sys.argv[1])
    arguments_of_all = (processes, free_port(), sys.argv[2:])
    if processes == 1:
        work(0, *arguments_of_all)
    else:
        start_processes(work, arguments_of_all, nprocs=processes, start_method="spawn")
