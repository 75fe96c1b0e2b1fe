"""Updates of one batch with the step scale on real Megatron ranks; for test_step_scale.py.

step_scale_worker.py PROCESSES MODEL_DIR REFERENCE.pt OUT.pt '{"tp": 2, "losses": ["ppo_clip"]}' ...
saves of each layout every rank's results: with the scale, with its factors put into the rates by
hand, and without.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from forked_layouts import save_results
from updates_cases import RATE
from updates_worker import trained

ADAM = {"optimizer": "adam", "lr": 1e-3, "weight_decay": 0.1, "clip_grad": 1.0}


def three_runs(model_dir, samples, spec, case):
    settings = ADAM if case.endswith("adam") else None
    loss, rate, seen = case.removesuffix(" adam"), RATE if settings is None else ADAM["lr"], []

    def note(optimizer, update):
        seen.append([group["lr"] for group in optimizer.param_groups])

    def run(**more):
        return trained(model_dir, samples, spec, loss, made_with=settings, **more)

    scaled = run(ess_step_scale=True, before_update=note)
    factors = [report["step_scale"] for report in scaled[0]]
    if not factors:  # a rank that does not report
        factors = [1.0] * 4
    everywhere = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everywhere, factors)

    def by_hand(optimizer, update):
        for group in optimizer.param_groups:
            group["lr"] = rate * everywhere[-1][update]  # the last rank reports

    return {
        "scaled": scaled,
        "by hand": run(before_update=by_hand),
        "plain": run(),
        "rates": seen,
        "rate": rate,
    }


def every_case(model_dir, reference, spec):
    return {case: three_runs(model_dir, reference["samples"], spec, case) for case in spec["losses"]}


def main(processes, model_dir, reference_path, out, *specs):
    reference = torch.load(reference_path, weights_only=True)
    save_results(every_case, processes, model_dir, reference, out, specs)


if __name__ == "__main__":
    main(*sys.argv[1:])
