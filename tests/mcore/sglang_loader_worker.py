"""Sends checkpoints to SGLang's own models through its own loaders, in this process and without a server.

sglang_loader_worker.py MODEL_DIR ...  prints a line of JSON for each: what differs from the model that has
loaded the folder itself, once with the units of two stages (sent/units-4-*.json) as requests and once with
a request for each tensor; what the checksums prove; and what the count of parameters says of a push that is
whole, and of one without its last unit.
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from sglang.srt.utils.weight_checker import WeightChecker

from megatron_rl_corr.engines import load_engine
from megatron_rl_corr.engines.errors import RolloutError
from megatron_rl_corr.engines.types import ServerChecksums
from megatron_rl_corr.weight_sync.coverage import make_coverage
from megatron_rl_corr.weight_sync.export import buckets
from megatron_rl_corr.weight_sync.verify import make_verifiers
from tests.sglang_loader import load_model, start_rank

ENGINE = load_engine("sglang")


def told(call):
    try:
        return call()
    except RolloutError as error:
        return f"{type(error).__name__}: {error}"


def count(path, shown, *requests):
    """What the count says of a server that shows this, after these requests."""
    coverage = make_coverage(path)
    for bucket in requests:
        coverage.count(bucket)
    return told(coverage.check_all_sent) or told(lambda: coverage.check_servers([shown], ENGINE))


def judge(path):
    loaded = load_model(start_rank(path))
    expected = {name: tensor.clone() for name, tensor in loaded.state().items()}

    def wrong():
        return sorted(
            name
            for name, tensor in loaded.state().items()
            if not torch.equal(tensor, expected[name]) and not name.startswith("visual.")  # is not sent
        )

    def show():
        sums = WeightChecker(get_model=lambda: loaded.model).handle("checksum", role="target")["checksums"]
        layout = (1, 1, 1, "float32", "cpu", 1)
        return ServerChecksums("http://a", "cpu", 1, layout, None, ((0, sums),), layout_is_known=True)

    tensors = load_file(path / "model.safetensors")
    names = [
        unit for stage in (0, 1) for unit in json.loads((path / f"sent/units-4-{stage}.json").read_text())
    ]
    units = [[(name, tensors[name]) for name in unit] for unit in names]
    singly = [[named] for unit in units for named in unit]
    found = {"model": path.name, "tensors": len(tensors)}
    for how, requests in {"singly": singly, "units": list(buckets(units, 1))}.items():
        loaded.send(requests)
        shown, verifier = show(), make_verifiers("checksum", path, {"sglang": ENGINE})["sglang"]
        for bucket in requests:
            verifier.keep(bucket, "1")
        found[how] = {
            "wrong": wrong(),
            "proven": told(lambda verifier=verifier, shown=shown: verifier.compare([shown])),
            "held": sum(make_coverage(path).why_kept(name) is None for name in shown.ranks[0][1]),
        }
    found["whole"] = count(path, shown, *units)
    found["left out"] = [name for name, _ in units[-1]]
    found["incomplete"] = count(path, shown, *units[:-1])
    sums = shown.ranks[0][1]
    more = replace(shown, ranks=((0, sums | {"model.layers.0.extra.weight": "0"}),))
    less = replace(
        shown, ranks=((0, {name: told for name, told in sums.items() if name != "model.norm.weight"}),)
    )
    found |= {"more": count(path, more, *units), "less": count(path, less, *units)}
    return found


def main():
    for folder in sys.argv[1:]:
        if child := os.fork():
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, folder
            continue
        print("RESULT " + json.dumps(judge(Path(folder))), flush=True)
        dist.destroy_process_group()
        os._exit(0)


if __name__ == "__main__":
    main()
