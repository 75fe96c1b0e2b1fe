"""A few steps of the quickstart's model in real Megatron, with the experts that a real SGLang
server chose (R3).

With the optimizer of the recipes: its state is split over replicas, and on a GPU lies on the host. Then
one step more of learning rate 0 from the checkpoint, after which each weight must be what it was: what an
optimizer copies back into the model are the weights that were saved, not those that it was made with.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tools.cpu import environment, megatron_arguments
from tools.gpu_check.outcome import Finding, Outcome, at_most, require
from tools.gpu_check.pushes import make_model, server
from tools.local_server import free_port
from tools.process_group import die_with_parent, end_group

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "examples/quickstart"
STEPS = 3
DISAGREEMENT, K3 = 0.1, 0.01
"""Bounds of the share of tokens that Megatron would route otherwise, and of the KL of both sides."""
FROM_THE_CHECKPOINT = (
    f"--train-iters {STEPS + 1} --override-opt_param-scheduler --lr-decay-style linear"
    f" --lr-decay-iters {STEPS}"
).split()
"""The schedule has come down to 0; another --lr would find no group of parameters in the
optimizer's checkpoint.
"""
METRICS = {"router_replay/disagreement": DISAGREEMENT, "rollout_corr/k3_kl": K3}


def check(device: str) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as name:
        folder = Path(name)
        model = make_model(folder / "model")
        rows = [
            {"prompt": f"{kind} {i}:", "kind": kind}
            for kind in ("digits", "vowels", "signs")
            for i in range(4)
        ]
        (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        with server(model, "bfloat16", device, "--enable-return-routed-experts") as running:
            train(command(folder, model, running.url, device))
            train([*command(folder, model, running.url, device), *FROM_THE_CHECKPOINT])
        outcome = judge(
            [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
        )
        require_kept(*(folder / f"hf/iter_{step:07d}" for step in (STEPS, STEPS + 1)))
        return outcome


def command(folder: Path, model: Path, url: str, device: str) -> list[str]:
    """torchrun's, of one process, for the first steps."""
    from megatron_rl_corr.models.megatron_flags import model_flags

    layers = megatron_arguments()
    if device == "cuda":
        layers = [
            "--transformer-impl",
            "transformer_engine",
            "--no-gradient-accumulation-fusion",
            "--moe-permute-fusion",
            "--optimizer-cpu-offload",
            "--use-precision-aware-optimizer",
        ]
    same = (
        "--seq-length 32 --weight-decay 0 --clip-grad 1.0 --mock-data --split 100,0,0 --num-workers 0"
        " --no-create-attention-mask-in-dataloader --eval-iters 0 --eval-interval 1000 --log-interval 1000"
        f" --micro-batch-size 8 --global-batch-size 16 --train-iters {STEPS} --save-interval {STEPS}"
        " --lr 2e-3 --lr-decay-style constant --bf16 --use-distributed-optimizer"
        " --tokenizer-type HuggingFaceTokenizer --rollout-group-size 4 --rollout-max-new-tokens 12"
        " --rollout-correction-preset decoupled_token_is --router-replay R3"
        # Trainer and server share a GPU, on which NCCL may allow one rank.
        " --rollout-weight-transport tensor"
    )
    paths = {
        "--tokenizer-model": model,
        "--rollout-hf-checkpoint": model,
        "--rollout-url": url,
        "--rollout-prompts": folder / "prompts.jsonl",
        "--rollout-reward-function": f"{QUICKSTART / 'reward.py'}:reward",
        "--rollout-log-dir": folder / "run",
        "--save": folder / "checkpoints",
        "--load": folder / "checkpoints",
        "--rollout-save-hf": folder / "hf",
    }
    flags = [
        *model_flags(json.loads((model / "config.json").read_text())),
        *layers,
        *(["--moe-grouped-gemm"] if "transformer_engine" in layers else ["--rollout-pad-sequences"]),
        *same.split(),
        *(word for pair in paths.items() for word in pair),
    ]
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        "1",
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        str(free_port()),
        "-m",
        "megatron_rl_corr.launch",
        str(QUICKSTART / "pretrain_moe.py"),
        *map(str, flags),
    ]


def train(command: Sequence[str]) -> None:
    """Run it; what it prints goes to this part's log.

    Raises:
        DoesNotHold: it ended with another status than 0.
    """
    base = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    process = subprocess.Popen(
        command,
        env=environment("megatron", base),
        cwd=ROOT,
        start_new_session=True,
        preexec_fn=die_with_parent(signal.SIGTERM),  # torchrun ends its ranks then
    )
    try:
        status = process.wait()
    finally:
        end_group(process.pid, grace_s=5.0, reap=process.poll)
    require(status == 0, f"training ended with status {status}")


def judge(steps: Sequence[Mapping[str, float]]) -> Outcome:
    """The worst step's metrics, held to their bounds.

    Raises:
        DoesNotHold: a step is missing, did not learn, or had tokens without routes, or a metric is
            beyond its bound.
    """
    require(len(steps) == STEPS + 1, f"{len(steps)} of {STEPS + 1} steps were logged")
    for step in steps:
        require("router_replay/disagreement" in step, f"step {step['step']} replayed no routes")
        require(
            step["router_replay/tokens_without_routes"] == 0, f"step {step['step']} had tokens without routes"
        )
        require(step["grad_norm"] > 0, f"step {step['step']} had no gradient")
    found = [
        at_most(f"{name}, largest of {STEPS + 1} steps", max(step[name] for step in steps), bound)
        for name, bound in METRICS.items()
    ]
    overlap = min(step["router_replay/overlap"] for step in steps)
    return Outcome([*found, Finding("router_replay/overlap, smallest", f"{overlap:.4f}")])


def require_kept(saved: Path, later: Path) -> None:
    """Two exported folders have the same weights, bit for bit.

    Raises:
        DoesNotHold: one differs, by name.
    """
    from megatron_rl_corr.models.hf_checkpoint import HFCheckpoint

    before, after = HFCheckpoint(saved), HFCheckpoint(later)
    changed = [name for name in before.names if not before.tensor(name).equal(after.tensor(name))]
    require(not changed, f"a step of learning rate 0 from the checkpoint changed {', '.join(changed[:3])}")
