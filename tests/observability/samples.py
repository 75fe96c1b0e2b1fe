"""A byte-level tokenizer and a run's folder with samples of known numbers, for tests of what people read."""

import json
from dataclasses import asdict
from pathlib import Path

import torch

from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.engines.trajectory import Trajectory, VersionSpan
from megatron_rl_corr.observability.metrics_file import MetricsFile
from megatron_rl_corr.rollout.sample_file import Origin, Sample, SavedBatch, write_trajectories

END = 256
"""The id of <|im_end|>; those before it are bytes, in the order of ByteLevel's alphabet."""


def save_tokenizer(folder: Path):
    """One token a byte, as of a byte-level BPE without merges: most characters beyond ASCII take several."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={one: place for place, one in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_end|>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    fast.save_pretrained(folder)
    return fast


def sample(ids, ratios, *, index=0, group=7, kept=None, reward=0.0, prompt=(1,), **known):
    """A response whose tokens have these D; kept: which enter the loss, all by default."""
    rollout = torch.full((len(ids),), -1.0)
    trajectory = Trajectory(
        prompt_index=0,
        sample_index=index,
        prompt_ids=torch.tensor(prompt),
        output_ids=torch.tensor(ids),
        rollout_logprobs=rollout,
        finish_reason="stop",
        weight_versions=(VersionSpan("5f2c91ab-4", 0, len(ids)),),
        cached_tokens=0,
        server="http://a",
        turn_ids=known.pop("turn_ids", None),
    )
    mask = torch.ones(len(ids), dtype=torch.bool) if kept is None else torch.tensor(kept, dtype=torch.bool)
    numbers = {"train_logprobs": rollout + torch.tensor(ratios), "advantages": torch.full((len(ids),), 0.5)}
    return Sample(
        trajectory,
        reward,
        loss_mask=mask,
        origin=Origin(group, 40, known.pop("label", "42")),
        **numbers | known,
    )


def write_run(folder: Path, steps: dict[int, list[Sample]], model: Path, correction=None) -> Path:
    """The folder of --rollout-log-dir, with samples beside metrics and settings."""
    (folder / "samples").mkdir(parents=True)
    file = MetricsFile(folder / "metrics.jsonl")
    for step in steps:
        file.write({"step": step, "reward/mean": 0.5})
    for step, samples in steps.items():
        batch = SavedBatch(
            step=step,
            updates=1,
            replica=0,
            replicas=1,
            group_size=2,
            packed=True,
            num_turns=None,
            hf_checkpoint=str(model),
        )
        write_trajectories(folder / "samples" / batch.file_name, samples, batch=batch)
    settings = {
        "rollout": {"save_trajectories": str(folder / "samples")},
        "rollout_correction": asdict(correction or RolloutCorrectionConfig()),
    }
    (folder / "run.json").write_text(json.dumps(settings))
    return folder
