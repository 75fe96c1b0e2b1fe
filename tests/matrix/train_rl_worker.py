"""Two updates by a checkout's own train_rl.py over gloo: all of it but the sampling, on rollouts
that are made up.

train_rl_worker.py FOLDER RUN...  RUN: {"name": ..., "processes": N, "flags": [...], "corrected": bool} in
JSON. Writes FOLDER/<name>.pt, each update's gradients and their norm, of rank 0.
"""

import json
import os
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn
from megatron.core.distributed import finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.utils import get_model_config, unwrap_model
from megatron.inference.utils import add_inference_args
from megatron.rl import rl_utils
from megatron.rl.agent.api import TokenRollout
from megatron.training import arguments, get_tokenizer, initialize, training
from torch.multiprocessing import start_processes

from megatron_rl_corr import plugin
from tools.local_server import free_port

GROUP, UPDATES = 4, 2
PROMPTS = [3, 8, 4, 2, 7, 3, 5, 2]
RESPONSES = [13, 7, 11, 12, 7, 10, 8, 11]
"""Tokens of each prompt and response. Two samples of 16, 15, 15, 14, 14, 13, 13, 13 tokens fill one bin of
32, also where context parallelism rounds each up to a multiple of 4.
"""


def rollouts():
    """Two groups of four whose log-probs are near log(1 / 128), as those of the untrained model are."""
    generator = torch.Generator().manual_seed(3)
    made = []
    for number, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        made.append(
            TokenRollout(
                trajectory=[torch.randint(5, 60, (prompt + response,), generator=generator).tolist()],
                generation_mask=[[False] * prompt + [True] * response],
                generation_cap=response,
                logprobs=[(-4.85 + 0.3 * torch.randn(response, generator=generator)).tolist()],
                reward=3.0 * number % 7,
                env_id="made up",
            )
        )
    return [made[at : at + GROUP] for at in range(0, len(made), GROUP)]


def forward_in_float32(forward, *args, fp32_output, **others):
    """The model's, with an argument that Megatron's RL gives and that only its wrapper of
    16-bit models takes.
    """
    assert fp32_output
    return forward(*args, **others)


def all_gather_backward(ctx, *gradients):
    """What torch's differentiable all_gather does over NCCL; over gloo it takes a group's ranks
    for global ones.
    """
    part = torch.empty_like(gradients[0])
    dist.reduce_scatter(part, list(gradients), group=ctx.group)
    return None, part


def take_updates(folder, run):
    sys.argv = ["train_rl.py", *run["flags"]]
    if run["corrected"]:
        plugin.prepare(sys.argv[1:])()  # before train_rl imports what is replaced, as the launcher does
    import train_rl
    from model_provider import model_provider

    args = arguments.parse_and_validate_args(extra_args_provider=add_inference_args)
    initialize.initialize_megatron(get_embedding_ranks=None)
    model, optimizer, scheduler = training.setup_model_and_optimizer(
        ModelType.encoder_or_decoder, partial(model_provider, train_rl._gpt_builder)
    )
    inner = unwrap_model(model[0])
    inner.forward = partial(forward_in_float32, inner.forward)
    reference = {
        name: None if value is None else value.cpu() for name, value in model[0].state_dict().items()
    }
    data, *_ = rl_utils.prepare_data_for_update(
        model,
        reference,
        rollouts(),
        get_tokenizer(),
        sequence_packing=args.rl_use_sequence_packing,
        is_correction=True,
        request_ledger={},
    )
    config = get_model_config(model[0])
    # as train()
    config.grad_scale_func, config.finalize_model_grads_func = optimizer.scale_loss, finalize_model_grads
    found = []
    for args.curr_iteration in range(UPDATES):
        norm = training.train_step(
            train_rl.forward_step,
            data,
            model,
            optimizer,
            scheduler,
            config,
            training.get_forward_backward_func(),
            iteration=args.curr_iteration,
        )[5]
        gradients = {name: parameter.main_grad.clone() for name, parameter in model[0].named_parameters()}
        found.append({"norm": norm, "gradients": gradients})
    if dist.get_rank() == 0:
        torch.save(found, folder / f"{run['name']}.pt")


def rank_main(rank, port, folder, run):
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(run["processes"]),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    take_updates(folder, run)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # Megatron's leftovers may wait for each other at interpreter exit


if __name__ == "__main__":
    torch.distributed.nn.functional._AllGather.backward = staticmethod(all_gather_backward)
    for run in map(json.loads, sys.argv[2:]):
        start_processes(
            rank_main, (free_port(), Path(sys.argv[1]), run), run["processes"], start_method="fork"
        )
