"""pretrain_any.py, whose experts add up as SUMS says, several words with "+" between.

behind: a token's weight of an expert is multiplied behind the expert's second product, as SGLang does, not
before it. slots: a token's experts are summed in the order in which the server names them, not by their
numbers. weights: an expert's weight is softmax over all experts, then normalised, as SGLang's torch code has
it, not softmax over the chosen ones. rolled: the routes' slots go round by one, and nothing else changes.
"""

import os
import runpy
from pathlib import Path

import torch
from megatron.core.transformer.moe import router, token_dispatcher
from megatron.core.transformer.moe.experts import SequentialMLP

from megatron_rl_corr.engines.sglang import responses
from megatron_rl_corr.moe.replay import ReplayedRouter

SUMS = os.environ.get("SUMS", "").split("+")
chosen = []
"""The ids [T, K] that the last router gave, in the server's order where they are replayed."""


def kept(get_replay_topk):
    def replaced(self, *arguments, **settings):
        values, ids = get_replay_topk(self, *arguments, **settings)
        chosen[:] = [ids]
        return values, ids

    return replaced


def weighed_behind(forward):
    def replaced(self, hidden, tokens_per_expert, probs):
        output, bias = forward(self, hidden, tokens_per_expert, torch.ones_like(probs))
        assert bias is None
        return output * probs[:, None], None

    return replaced


def in_slots(unpermute):
    def replaced(permuted, sorted_indices, restore_shape, **settings):
        [ids] = chosen
        by_token = sorted_indices.argsort(stable=True).view(ids.shape)  # by the experts' numbers
        rows = by_token.gather(1, ids.argsort(1).argsort(1))
        return permuted[rows].sum(dim=1)

    return replaced


def softmax_of_all(topk_routing):
    def replaced(logits, topk, *arguments, **settings):
        probs, routing_map = topk_routing(logits, topk, *arguments, **settings)
        [ids] = chosen
        shares = logits.float().softmax(-1).gather(1, ids)
        shares = shares / shares.sum(-1, keepdim=True)
        return torch.zeros_like(probs).scatter(1, ids, shares.to(probs.dtype)), routing_map

    return replaced


def rolled(decode):
    def decoded(*given, **named):
        return decode(*given, **named).roll(1, -1)

    return decoded


ReplayedRouter.get_replay_topk = kept(ReplayedRouter.get_replay_topk)
if "behind" in SUMS:
    SequentialMLP.forward = weighed_behind(SequentialMLP.forward)
if "slots" in SUMS:
    token_dispatcher.unpermute = in_slots(token_dispatcher.unpermute)
if "weights" in SUMS:
    router.topk_routing_with_score_function = softmax_of_all(router.topk_routing_with_score_function)
if "rolled" in SUMS:
    responses.decode = rolled(responses.decode)
runpy.run_path(str(Path(__file__).with_name("pretrain_any.py")), run_name="__main__")
