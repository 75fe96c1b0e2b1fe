"""Two data-parallel ranks over gloo whose train step calls as Megatron's RL does; real
megatron.training around it.

megatron_rl_worker.py FOLDER  writes FOLDER/log. No wheel holds megatron.rl: FOLDER/megatron/rl (first on
the path) has a stand-in with the two functions that are replaced, under their names; the forward step
calls as train_rl.py does.
"""

import sys
from argparse import Namespace
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.training import global_vars, training
from torch.multiprocessing import start_processes

from megatron_rl_corr import plugin
from tools.local_server import free_port

FLAGS = [
    "--perform-rl-step",
    "--rl-inference-logprobs-is-correction",
    "--rollout-is",
    "token",
    "--rollout-is-threshold",
    "1.5",
]


def train_step(forward_step_func, data_iterator, model, *others):
    """Megatron's, as far as the microbatches go: two of them."""
    return [forward_step_func(data_iterator, model) for _ in range(2)]


def microbatch(rank, number):
    """Two rows of three log-probs, with log-ratios of 0.1 * (1 + rank + number), in the form
    of train_rl.py's.
    """
    old = torch.full((2, 3), -1.0)
    mask = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1]]).float()
    rollout = torch.full((2, 3), -1.0 - 0.1 * (1 + rank + number))
    return "tokens", torch.ones(2), old, mask, "position_ids", old.clone(), rollout


def main(rank, port, folder):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    parallel_state.initialize_model_parallel()
    training.train_step = train_step
    plugin.prepare([*FLAGS, "--rollout-log-dir", str(folder / "log")])()
    # after the plugin, as a script does under the launcher
    from megatron.rl.rl_utils import calculate_grpo_loss

    def forward_step(data_iterator, model):
        _, advantages, old, _, _, ref, rollout = next(data_iterator)
        return calculate_grpo_loss(
            current_logprobs=old,
            old_logprobs=old,
            ref_logprobs=ref,
            advantages=advantages,
            clamp_eps_lower=0.2,
            clamp_eps_upper=0.2,
            kl_beta=0.0,
            entropy_weight=0.0,
            inference_logprobs=rollout,
            is_truncation_coef=None,
            seq_starts=None,
            seq_lengths=None,
        )[0]

    for iteration in range(2):
        global_vars.set_args(Namespace(curr_iteration=iteration))
        losses = training.train_step(
            forward_step, iter([microbatch(rank, n) for n in range(2)]), "model", 1, 2, 3
        )
        torch.save(losses, folder / f"losses_{rank}.pt")
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(context_parallel_size=2)
    global_vars.set_args(Namespace(curr_iteration=2))
    for with_context_parallelism in (False, True):
        if with_context_parallelism:  # as on Megatron's main, where both ranks are given the same log-probs
            sys.modules["megatron.rl.rl_utils"]._scatter_for_context_parallel = lambda *_: None
        try:
            training.train_step(forward_step, iter([microbatch(0, n) for n in range(2)]), "model", 1, 2, 3)
        except ValueError as error:
            (folder / f"refused_{rank}.txt").write_text(str(error))
    dist.destroy_process_group()


if __name__ == "__main__":
    start_processes(main, (free_port(), Path(sys.argv[1])), nprocs=2, start_method="fork")
