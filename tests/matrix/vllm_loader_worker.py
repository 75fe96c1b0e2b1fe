"""Sends checkpoints to vLLM's own models through our extension, in this process and without a server.

vllm_loader_worker.py MODEL_DIR ...  where each folder has a checkpoint `one` and another of the same
shapes, `two`. Prints a line of JSON for each: what `two` left as it was, what differs after `one` was sent
again, in buckets of one tensor, what the checksums prove, and what the count of parameters says; and what
differs after changes of `one` from what it is after everything.
"""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file
from vllm.config import set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.model_loader.reload import layerwise

from megatron_rl_corr.engines import load_engine
from megatron_rl_corr.engines.errors import RolloutError
from megatron_rl_corr.engines.vllm.checks import BACKEND
from megatron_rl_corr.engines.vllm.worker import Extension
from megatron_rl_corr.engines.vllm.worker.transfer import WeightTransfer
from megatron_rl_corr.engines.vllm.worker_code import worker_code
from megatron_rl_corr.engines.weight_changes import ChangedTensor, end_of_stage, packed
from megatron_rl_corr.weight_sync.coverage import make_coverage
from megatron_rl_corr.weight_sync.verify import make_verifiers

ENGINE, CPU = load_engine("vllm"), torch.device("cpu")


def worker_of(folder):
    """A vLLM worker with the folder's model, as far as the extension needs one."""
    config = EngineArgs(
        model=str(folder),
        dtype="float32",
        enforce_eager=True,
        max_model_len=128,
        skip_tokenizer_init=True,
        distributed_executor_backend="uni",
        kv_cache_memory_bytes=1 << 26,
        weight_transfer_config={"backend": BACKEND},
        # of latent attention: the default of a CPU with AMX does not take float32
        attention_backend="CPU_MLA",
    ).create_engine_config()
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        model = get_model(vllm_config=config)
    worker = Extension()
    worker.vllm_config, worker.device, worker.rank = config, CPU, 0
    worker.weight_transfer_engine = WeightTransfer(SimpleNamespace(), config, CPU, model)
    return worker, model


def state(model):
    """Every tensor that a module shows: what is packed on a CPU is hidden, and only its checksum tells."""
    return {
        f"{path}.{name}": value
        for path, module in model.named_modules()
        for name, value in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    }


def answered(answer):
    assert not answer or "error" not in answer, answer
    return answer


def push(worker, folder):
    """What checksums and count say of a whole push."""
    coverage, verifier = make_coverage(folder), make_verifiers("checksum", folder, {"vllm": ENGINE})["vllm"]
    tensors = load_file(folder / "model.safetensors")
    sent = {name: tensor for name, tensor in tensors.items() if not coverage._why_kept(name)}
    send(worker, sent, [[named] for named in sent.items()])
    verifier.keep(list(sent.items()), "1")
    coverage.count(list(sent.items()))
    server = ENGINE.checksums("http://a", {}, {"results": [answered(worker.rl_corr_checksums())]})
    try:
        coverage.check_all_sent()
        coverage.check_servers([server], ENGINE)
        return {"proven": verifier.compare([server]), "held": len(server.ranks[0][1])}
    except RolloutError as error:
        return {"told": str(error)}


def send(worker, weights, buckets, changes=False):
    """An update of these weights."""
    shapes = {name: list(tensor.shape) for name, tensor in weights.items()}
    answered(worker.rl_corr_begin(shapes, code=worker_code(), keep=True))
    if changes:
        answered(worker.rl_corr_begin_changes("1", "0", 1))
    for bucket in buckets:
        answered(worker.rl_corr_bucket([{"serialized": ENGINE.serialized(bucket)}]))
    answered(worker.rl_corr_end())


def computed(model):
    """What the kernels of every linear layer make of the same numbers."""
    found = {}
    for path, module in model.named_modules():
        if hasattr(module, "cpu_linear"):
            names = ("input_size_per_partition", "input_size", "embedding_dim")
            wide = next(getattr(module, name) for name in names if hasattr(module, name))
            numbers = torch.randn(3, wide, generator=torch.Generator().manual_seed(wide))
            found[f"{path} computes"] = module.cpu_linear(numbers, module.weight, None)
    return found


def judge_changes(worker, model, folder):
    """What changes make that everything does not, from state to state."""
    coverage, everything = make_coverage(folder), load_file(folder / "model.safetensors")
    old = {name: tensor for name, tensor in everything.items() if not coverage._why_kept(name)}
    generator = torch.Generator().manual_seed(5)
    changed = {n: torch.rand(w.shape, generator=generator) < 0.05 for n, w in old.items()}
    changed["model.norm.weight"][:] = False
    new = {n: torch.where(changed[n], w + 0.1, w) for n, w in old.items()}

    def pushed(weights, buckets, changes=False):
        send(worker, weights, buckets, changes)
        copies = {name: tensor.clone() for name, tensor in (state(model) | computed(model)).items()}
        return copies, answered(worker.rl_corr_checksums())["checksums"]

    # what is mostly zeros may look the same packed, as which nothing may be kept that comes later
    worker.weight_transfer_engine._kept.clear()
    few = {name: torch.zeros_like(tensor) for name, tensor in old.items()}
    for tensor in few.values():
        tensor.view(-1)[0] = 1
    pushed(few, [[named] for named in few.items()])
    expected, checksums = pushed(new, [[named] for named in new.items()])
    before, _ = pushed(old, [[named] for named in old.items()])
    changes = [
        (n, ChangedTensor.of(torch.where(changed[n], w, torch.nan)))
        for n, w in new.items()
        if n != "model.norm.weight"
    ]
    buckets = [packed([one], stage=0, number=number) for number, one in enumerate(changes)]
    told = []
    layerwise.logger.warning, warning = (lambda *words: told.append(words)), layerwise.logger.warning
    got, found = pushed(new, [*buckets, end_of_stage(stage=0, buckets=len(buckets))], changes=True)
    layerwise.logger.warning = warning
    loaders = {name: getattr(tensor, "weight_loader", None) for name, tensor in state(model).items()}
    return {
        "told": [str(words) for words in told],
        "loaders of the update": sorted(name for name, one in loaders.items() if hasattr(one, "__wrapped__")),
        "computing": sum("computes" in name for name in expected),
        "moved": sum(not torch.equal(expected[name], before[name]) for name in expected),
        "wrong": sorted(name for name in expected if not torch.equal(expected[name], got[name])),
        "hashed otherwise": sorted(name for name in checksums if checksums[name] != found[name]),
    }


def judge(folder):
    worker, model = worker_of(folder / "one")
    before = {name: tensor.clone() for name, tensor in state(model).items()}

    def changed():
        after = state(model)
        assert before.keys() == after.keys()
        return {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}

    other = push(worker, folder / "two")
    stayed = sorted(name for name in before.keys() - changed() if before[name].numel() > 1)
    again = push(worker, folder / "one")
    return {
        "model": folder.name,
        "other": other,
        "stayed": stayed,
        "again": again,
        "wrong": sorted(changed()),
        "changes": judge_changes(worker, model, folder / "one"),
    }


for folder in sys.argv[1:]:
    if child := os.fork():
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, folder
        continue
    print("RESULT " + json.dumps(judge(Path(folder))), flush=True)
    os._exit(0)
