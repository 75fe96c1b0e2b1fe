"""Two context-parallel ranks over gloo that call the function as slime and as miles do; saves
what it returns.

slime_worker.py FOLDER  reads FOLDER/cases.pt, writes FOLDER/<rank>.pt.
"""

import sys
from argparse import Namespace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.multiprocessing import start_processes

from megatron_rl_corr.integrations.slime import correct
from tools.local_server import free_port


def main(rank: int, port: int, folder: Path) -> None:
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    parallel_state.initialize_model_parallel(context_parallel_size=2)
    group = parallel_state.get_context_parallel_group()
    results = {}
    for name, case in torch.load(folder / "cases.pt").items():
        mine = case["ranks"][rank]
        pg_loss = mine["pg_loss"].requires_grad_()
        more = {}
        if case["trainer"] == "miles":
            cp = SimpleNamespace(rank=rank, size=2, group=group)
            more = {"parallel_state": SimpleNamespace(cp=cp), "max_seq_lens": case["max_seq_lens"]}
        loss, masks, metrics = correct(
            args=Namespace(**case["args"]),
            pg_loss=pg_loss,
            train_log_probs=mine["train"],
            rollout_log_probs=mine["rollout"],
            loss_masks=case["loss_masks"],
            total_lengths=case["total_lengths"],
            response_lengths=case["response_lengths"],
            **more,
        )
        # As if every token's loss had a gradient of 1.
        gradient = torch.autograd.grad(loss.sum(), pg_loss)[0]
        results[name] = {"loss": loss.detach(), "masks": masks, "metrics": metrics, "gradient": gradient}
    torch.save(results, folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    start_processes(main, (free_port(), Path(sys.argv[1])), nprocs=2, start_method="fork")
