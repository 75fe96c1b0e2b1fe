"""A run's folder made by hand, with all that a bundle is made of."""

import json

from megatron_rl_corr import cli
from megatron_rl_corr.observability.metrics_file import MetricsFile
from megatron_rl_corr.rollout.sample_file import SavedBatch, write_trajectories
from tests.observability.samples import sample

KL = "rollout_corr/k3_kl"
SECRET = "sk-planted0123456789"


class HandMadeRun:
    """A run with a checkpoint behind each even step, in a folder with a space in its name."""

    def __init__(self, root, steps=6):
        self.root = root / "a run"
        self.log = self.root / "log"
        self.arguments = {
            "--lr": ["1e-6"],
            "--train-iters": ["100"],
            "--save": [str(self.root / "checkpoints")],
            "--load": [str(self.root / "checkpoints")],
            "--save-interval": ["2"],
            "--wandb-project": ["mine"],
            "--exit-duration-in-mins": ["60"],
            "--rollout-url": ["http://127.0.0.1:30000", "http://127.0.0.1:30001"],
            "--rollout-prompts": ["a file.jsonl"],
            "--rollout-reward-function": ["reward.py:f"],
            "--rollout-hf-checkpoint": ["my models/tiny"],
            "--rollout-group-size": ["2"],
            "--rollout-max-lag": ["1"],
            "--rollout-log-dir": [str(self.log)],
            "--rollout-save-trajectories": [str(self.root / "samples")],
            "--rollout-events": [str(self.root / "events.jsonl")],
        }
        self.rows = [
            {"step": step, "reward/mean": 0.5, KL: 1e-4 * step, "grad_norm": 0.1}
            for step in range(1, steps + 1)
        ]
        self.launch = {
            "first_step": 1,
            "time": 0.0,
            "script": "pretrain_gpt.py",
            "launcher": True,
            "folder": str(self.root),
            "processes": 4,
            "processes_of_host": 4,
            "environment": {"OMP_NUM_THREADS": "1"},
            "files": {},
            "versions": {"torch": "2.10.0"},
        }
        self.launches, self.settings = [], {"rollout": {"reward_url": [f"http://a/r?key={SECRET}"]}}
        self.updates, self.samples, self.checkpoints = (
            1,
            dict.fromkeys(range(1, steps + 1)),
            list(range(2, steps + 1, 2)),
        )
        self.events = []

    def write(self):
        file = MetricsFile(self.log / "metrics.jsonl")
        for row in self.rows:
            file.write(row)
        words = [word for flag, values in self.arguments.items() for word in (flag, *values)]
        last = self.launch | {"arguments": words}
        launches = [*self.launches, last]
        (self.log / "run.json").write_text(json.dumps(self.settings | {"launches": launches}))
        (self.root / "samples").mkdir()
        for step, changes in self.samples.items():
            batch = SavedBatch(
                step=step,
                updates=self.updates,
                replica=0,
                replicas=1,
                group_size=2,
                packed=True,
                num_turns=None,
                hf_checkpoint="/models/tiny",
            )
            made = [
                sample([5, 6], [0.1, 0.2], index=place, reward=float(place), **(changes or {}))
                for place in (0, 1)
            ]
            write_trajectories(self.root / "samples" / batch.file_name, made, batch=batch)
        for iteration in self.checkpoints:
            folder = self.root / f"checkpoints/iter_{iteration:07d}"
            folder.mkdir(parents=True)
            (folder / "metadata.json").write_text("{}")
            (folder / "__0_0.distcp").write_bytes(bytes(2**20 + 1))
        if self.checkpoints:
            tracker = self.root / "checkpoints/latest_checkpointed_iteration.txt"
            tracker.write_text(str(max(self.checkpoints)))
        lines = [
            json.dumps({"time": 1763978405.0, "rank": 0, "kind": "push_repeated"} | one)
            for one in self.events
        ]
        (self.root / "events.jsonl").write_text("".join(f"{line}\n" for line in lines))
        return self

    def bundle(self, *flags, log=None):
        """(exit status, the bundle's folder, its manifest)."""
        out = self.root.parent / "out" / "the bundle"
        status = cli.main(["incident", str(log or self.log), "--out", str(out), *flags])
        path = out / "manifest.json"
        return status, out, json.loads(path.read_text()) if path.is_file() else None
