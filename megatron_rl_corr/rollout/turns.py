"""Joins the turns of an episode: each turn's answer was sampled behind everything before it.

R response tokens so far, B tokens that the environment says.
"""

from dataclasses import replace

import torch

from megatron_rl_corr.engines.trajectory import ENVIRONMENT, Trajectory, concatenated


def first_turn(answer: Trajectory) -> Trajectory:
    """The answer to the first prompt, as the start of an episode."""
    return replace(answer, turn_ids=torch.zeros_like(answer.output_ids))


def join_turn(episode: Trajectory, said: torch.Tensor, answer: Trajectory) -> Trajectory:
    """The episode so far, what the environment said to it ([B] int64), and the policy's next turn.

    The prompt of `answer` is all tokens before it. Sampled tokens keep log-prob, weight version and set of ids;
    routes are those of the first pass that has them, as in `join`.
    """
    number = int(episode.turn_ids.max()) + 1
    turn_ids = [episode.turn_ids, torch.full_like(said, ENVIRONMENT), torch.full_like(answer.output_ids, number)]
    whole = concatenated(replace(episode, turn_ids=None), answer, between=said)
    return replace(whole, turn_ids=torch.cat(turn_ids))
