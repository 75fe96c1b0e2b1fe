"""Hashes of what is known of a sample, whatever it is: to compare it in another process, bit for bit."""

import hashlib
from dataclasses import replace

import torch


def sha256(value):
    """Of values, tensors and every field of objects."""
    found = hashlib.sha256()

    def add(value):
        if isinstance(value, torch.Tensor):
            found.update(f"{value.dtype} {tuple(value.shape)}".encode() + value.numpy().tobytes())
        elif hasattr(value, "__dict__"):
            add(vars(value))
        elif isinstance(value, dict):
            add(list(value.items()))
        elif isinstance(value, (list, tuple)):
            for one in (len(value), *value):
                add(one)
        else:
            found.update(repr(value).encode())

    add(value)
    return found.hexdigest()


def beginning(trajectory, tokens):
    """The first response tokens of an episode, as they were when it had no more."""
    spans = [
        replace(one, end=min(one.end, tokens)) for one in trajectory.weight_versions if one.start < tokens
    ]
    routes = trajectory.routed_experts
    return replace(
        trajectory,
        output_ids=trajectory.output_ids[:tokens],
        rollout_logprobs=trajectory.rollout_logprobs[:tokens],
        turn_ids=trajectory.turn_ids[:tokens],
        routed_experts=None if routes is None else routes[: trajectory.prompt_ids.numel() + tokens - 1],
        weight_versions=tuple(spans),
        finish_reason="abort",
        environment_reward=None,
    )
