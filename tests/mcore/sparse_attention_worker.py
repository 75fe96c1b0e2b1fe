"""Which keys sparse attention takes, and what learns of it, in real Megatron on one process.

sparse_attention_worker.py MODEL_DIR  prints a line of JSON: how far logits move by each flag of the indexer,
and by weights of other sizes; the norms of gradients with and without the indexer's own loss; and what the
checks of a run say.
"""

import argparse
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from hf_models_worker import all_gather_logits, arguments, build, gradients
from megatron.core import parallel_state as ps
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from megatron_rl_corr.mcore import compat
from megatron_rl_corr.mcore.checks import policy_check, run_flags
from megatron_rl_corr.models.hf_checkpoint import HFCheckpoint
from megatron_rl_corr.models.megatron_flags import model_flags
from megatron_rl_corr.models.names import NameTable
from megatron_rl_corr.models.shards import load_shards, local_parameters
from tools.local_server import free_port

FLIPS = {
    "--dsa-indexer-topk": "--dsa-indexer-topk 6",
    "--dsa-indexer-rope-interleaved": "--dsa-indexer-rope-interleaved",
    "--no-dsa-indexer-scoring-relu": "--no-dsa-indexer-scoring-relu",
    "--dsa-indexer-k-norm-epsilon": "--dsa-indexer-k-norm-epsilon 10",
    "--dsa-indexer-k-norm-fp32": "--dsa-indexer-k-norm-fp32",
}
"""Flag -> the words that flip it."""
LINEAR = ("linear_wq_b.weight", "linear_wk.weight", "linear_weights_proj.weight")


class Sparse:
    """The model of a folder, by other flags and from the checkpoint's weights each time."""

    def __init__(self, path):
        self.checkpoint = HFCheckpoint(path)
        self.reference = torch.load(path / "reference.pt", weights_only=True)
        self.layout = compat.layout()

    def arguments(self, words=""):
        return arguments(self.checkpoint.config, extra=words.split())

    def model(self, words=""):
        args = self.arguments(words)
        model = build(args)
        table = NameTable(self.checkpoint.config, padded_vocab_size=args.padded_vocab_size)
        parameters = local_parameters([model], table, experts_per_rank=args.num_experts)
        load_shards(parameters, self.checkpoint, self.layout.shard)
        return model, parameters

    def logits(self, model):
        return all_gather_logits(model, self.reference["tokens"], self.layout)

    def moved(self, words):
        one, other = (self.logits(self.model(given)[0]) for given in ("", words))
        return (other - one).abs().max().item()

    def named(self, words):
        """The flags that differ from config.json's, by the check of a run."""
        lines = policy_check.model_differences(
            self.arguments(words), model_flags(self.checkpoint.config), policy_check.MegatronParser()
        )
        return [line.removeprefix("no ").split(" ")[0].rstrip(":") for line in lines]

    def moved_by_decay(self):
        model, parameters = self.model()
        before = self.logits(model)
        decayed = [one.tensor for one in parameters if one.local_name.endswith(LINEAR)]
        with torch.no_grad():
            for tensor in decayed:
                tensor *= 0.9
        return len(decayed), (self.logits(model) - before).abs().max().item()

    def gradients(self, words=""):
        model, parameters = self.model(words)
        return gradients(model, self.layout, parameters, self.reference)


def refusal(**given):
    args = argparse.Namespace(
        experimental_attention_variant="dsa",
        dsa_indexer_loss_coeff=None,
        context_parallel_size=1,
        tensor_model_parallel_size=1,
        sequence_parallel=False,
        mtp_num_layers=None,
    )
    vars(args).update(given)
    try:
        run_flags.check_sparse_attention(args)
    except ValueError as error:
        return str(error)
    return None


def main(path):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    ps.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    sparse = Sparse(path)
    flips = {
        flag: {"moved": sparse.moved(words), "named": sparse.named(words)} for flag, words in FLIPS.items()
    }
    alone, with_loss = sparse.gradients(), sparse.gradients("--dsa-indexer-loss-coeff 1.0")
    found = {
        "flips": flips,
        "decay": sparse.moved_by_decay(),
        "gradients": {name: tensor.norm().item() for name, tensor in alone.items()},
        "of its own loss": {name: tensor.norm().item() for name, tensor in with_loss.items()},
        "same": [name for name, tensor in alone.items() if torch.equal(tensor, with_loss[name])],
        "refused": [
            refusal(),
            refusal(experimental_attention_variant=None, dsa_indexer_loss_coeff=0.5, context_parallel_size=2),
            refusal(dsa_indexer_loss_coeff=0.0),
            refusal(dsa_indexer_loss_coeff=0.5),
            refusal(context_parallel_size=2),
            refusal(tensor_model_parallel_size=2),
            refusal(tensor_model_parallel_size=2, sequence_parallel=True),
            refusal(mtp_num_layers=1),
        ],
    }
    print("RESULT " + json.dumps(found), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
