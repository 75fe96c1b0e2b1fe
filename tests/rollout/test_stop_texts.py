"""Where a response ends by a stop text: the token that completes it, with all that belongs to
the tokens before.
"""

import pytest
import torch

from megatron_rl_corr.engines.trajectory import TopLogprobs, Trajectory, VersionSpan
from megatron_rl_corr.rollout.stop_texts import cut_at_stop, tokens_through_stop

PIECES = ["a", "b", "<", "/", ">", "</", "b>", "</b>", "\N{EURO SIGN}"]


def decode(ids):
    return "".join(PIECES[token] for token in ids)


@pytest.mark.parametrize(
    ("ids", "stop", "tokens"),
    [
        ([0, 2, 3, 1], ["</"], 3),  # "a", "<", "/", "b"
        ([0, 2, 3, 1], ["/b"], 4),
        ([0, 2, 3, 1, 4], ["</b>"], 5),  # in four tokens, where the tokenizer makes one
        ([0, 7, 0, 7], ["b>", "</b"], 2),  # within one token
        ([5, 6, 0, 0, 0, 0, 0], ["</b>"], 2),  # the first of many tokens
        ([0, 0, 0], ["b"], None),
        ([], ["b"], None),
        ([1, 0, 1], ["a", "b"], 1),
    ],
)
def test_tokens_through_stop_when_the_text_has_one_then_those_up_to_its_end(ids, stop, tokens):
    assert tokens_through_stop(ids, stop, decode) == tokens
    # The plain search.
    plain = [n for n in range(len(ids) + 1) if any(one in decode(ids[:n]) for one in stop)]
    assert tokens == (plain[0] if plain else None)


def test_cut_when_the_server_went_on_then_what_follows_is_gone_from_all_that_there_is():
    routes = torch.arange(6 * 2, dtype=torch.uint8).reshape(6, 2, 1)  # 3 + 4 tokens, but the last
    sample = Trajectory(
        0,
        0,
        torch.tensor([0, 0, 0]),
        torch.tensor([0, 2, 3, 1]),
        torch.tensor([-1.0, -2, -3, -4]),
        "length",
        (VersionSpan("v1", 0, 1), VersionSpan("v2", 1, 3), VersionSpan("v3", 3, 4)),
        0,
        "url",
        routed_experts=routes,
        top_logprobs=TopLogprobs(torch.arange(8, dtype=torch.int32).view(4, 2), -torch.rand(4, 2)),
    )
    cut = cut_at_stop(sample, ["</"], decode)
    assert cut.output_ids.tolist() == [0, 2, 3] and cut.rollout_logprobs.tolist() == [-1, -2, -3]
    assert cut.finish_reason == "stop" and cut.weight_versions == sample.weight_versions[:2]
    assert torch.equal(cut.routed_experts, routes[:5])
    assert cut.top_logprobs.ids.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert torch.equal(cut.top_logprobs.logprobs, sample.top_logprobs.logprobs[:3])
    assert cut_at_stop(sample, ["zz"], decode) is sample
