"""The ids that tokens were drawn from, as flat and as padded tensors, and what a trajectory refuses."""

from dataclasses import replace

import pytest
import torch

from megatron_rl_corr.engines.trajectory import TopLogprobs, concatenated
from megatron_rl_corr.rollout import Support, Trajectory, VersionSpan, join

INT = {"dtype": torch.int32}
# Three tokens, drawn from {7, 1}, {0} and {3, 9, 8}.
SUPPORT = Support(torch.tensor([7, 1, 0, 3, 9, 8], **INT), torch.tensor([2, 1, 3], **INT))


def trajectory(tokens, support):
    return Trajectory(
        prompt_index=0,
        sample_index=0,
        prompt_ids=torch.tensor([1]),
        output_ids=torch.zeros(tokens, dtype=torch.int64),
        rollout_logprobs=torch.zeros(tokens),
        finish_reason="length",
        weight_versions=(VersionSpan("v1", 0, tokens),),
        cached_tokens=0,
        server="http://rollout-3:30000",
        support=support,
    )


@pytest.mark.parametrize(
    "ids, lengths, named",
    [
        (torch.tensor([7, 1]), torch.tensor([2], **INT), "ids must be 1-d torch.int32, got 1-d torch.int64"),
        (torch.tensor([7, 1], **INT), torch.tensor([[2]], **INT), "lengths must be 1-d torch.int32, got 2-d"),
        (torch.tensor([7, 1], **INT), torch.tensor([3], **INT), "lengths that sum to 3 have 2 ids"),
        (torch.tensor([7, 1], **INT), torch.tensor([2, 0], **INT), "lengths must be at least 1, got 0"),
        (torch.tensor([7, 1], **INT), torch.tensor([3, -1], **INT), "lengths must be at least 1, got -1"),
    ],
)
def test_support_when_ids_and_lengths_disagree_then_refused(ids, lengths, named):
    with pytest.raises(ValueError, match=named):
        Support(ids, lengths)


def test_trajectory_when_its_support_has_a_set_for_each_token_then_taken_and_otherwise_refused():
    assert trajectory(3, SUPPORT).support is SUPPORT
    with pytest.raises(ValueError, match="2 output_ids have a support of 3 sets"):
        trajectory(2, SUPPORT)


def sample(prompt, output, spans, *, finish="abort", sets=None, routes=None, server="http://a:1"):
    """Output token 5 has log-prob -5; `sets` are the ids that tokens were drawn from, `routes`
    one expert a token.
    """
    return Trajectory(
        prompt_index=3,
        sample_index=1,
        prompt_ids=torch.tensor(prompt),
        output_ids=torch.tensor(output, dtype=torch.int64),
        rollout_logprobs=-torch.tensor(output, dtype=torch.float32),
        finish_reason=finish,
        weight_versions=tuple(VersionSpan(*span) for span in spans),
        cached_tokens=len(prompt) - 1,
        server=server,
        support=None
        if sets is None
        else Support(torch.tensor(sum(sets, []), **INT), torch.tensor([len(ids) for ids in sets], **INT)),
        routed_experts=None if routes is None else torch.tensor(routes, dtype=torch.int16).view(-1, 1, 1),
    )


def test_join_when_weights_changed_then_tokens_logprobs_and_shifted_versions_of_both():
    partial = sample([1, 2], [5, 6, 7], [("v1", 0, 2), ("v2", 2, 3)])
    rest = sample([1, 2, 5, 6, 7], [8, 9], [("v2", 0, 1), ("v3", 1, 2)], finish="stop", server="http://b:1")
    whole = join(partial, rest)
    assert whole.prompt_ids.tolist() == [1, 2] and whole.output_ids.tolist() == [5, 6, 7, 8, 9]
    assert whole.rollout_logprobs.tolist() == [-5, -6, -7, -8, -9]
    assert whole.weight_versions == (
        VersionSpan("v1", 0, 2),
        VersionSpan("v2", 2, 4),
        VersionSpan("v3", 4, 5),
    )
    assert (whole.finish_reason, whole.server) == ("stop", "http://b:1")
    assert (whole.prompt_index, whole.sample_index, whole.cached_tokens, whole.oldest_version) == (
        3,
        1,
        1,
        "v1",
    )
    assert whole.support is None and whole.routed_experts is None


def test_sampled_by_when_versions_change_then_the_tokens_of_that_version_only():
    whole = sample([1], [5, 6, 7, 8], [("v1", 0, 1), ("v2", 1, 3), ("v1", 3, 4)])
    assert whole.sampled_by("v2").tolist() == [False, True, True, False]
    assert whole.sampled_by("v1").tolist() == [True, False, False, True]
    assert whole.sampled_by("v3").tolist() == [False] * 4


def test_join_when_there_are_supports_and_routes_then_each_token_keeps_its_own():
    partial = sample([1, 2], [5, 6], [("v1", 0, 2)], sets=[[5, 4], [6]], routes=[0, 1, 2])
    # The continuation ran the prompt again, by other experts; row 3 is token 6, which the partial never ran.
    rest = sample([1, 2, 5, 6], [7], [("v2", 0, 1)], finish="length", sets=[[7, 8, 9]], routes=[7, 7, 7, 3])
    whole = join(partial, rest)
    assert whole.support.ids.tolist() == [5, 4, 6, 7, 8, 9] and whole.support.lengths.tolist() == [2, 1, 3]
    assert whole.routed_experts.flatten().tolist() == [0, 1, 2, 3]


def top(*rows):
    """Of each token (ids, log-probs)."""
    ids, logprobs = zip(*rows, strict=True)
    return TopLogprobs(torch.tensor(ids, **INT), torch.tensor(logprobs))


def test_join_when_there_are_top_logprobs_then_each_token_keeps_its_own():
    partial = replace(sample([1], [5], [("v1", 0, 1)]), top_logprobs=top(([5, 4], [-0.5, -1.0])))
    nothing = replace(
        sample([1, 5], [], [("v1", 0, 0)]),
        top_logprobs=TopLogprobs(torch.zeros(0, 0, **INT), torch.zeros(0, 0)),
    )
    rest = replace(sample([1, 5, 9], [7], [("v1", 0, 1)]), top_logprobs=top(([2, 7], [-0.25, -2.0])))
    whole = concatenated([partial, nothing, rest], [torch.tensor([], dtype=torch.int64), torch.tensor([9])])
    assert whole.top_logprobs.ids.tolist() == [[5, 4], [0, 0], [2, 7]]
    assert whole.top_logprobs.logprobs.tolist() == [[-0.5, -1.0], [-torch.inf] * 2, [-0.25, -2.0]]
    with pytest.raises(ValueError, match="only one of a partial response .* has top_logprobs"):
        join(partial, sample([1, 5], [6], [("v1", 0, 1)]))


def test_top_logprobs_when_shapes_or_rows_disagree_then_refused():
    with pytest.raises(ValueError, match="ids must be 2-d torch.int32, got 2-d torch.int64"):
        TopLogprobs(torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, 2))
    with pytest.raises(ValueError, match=r"ids \(1, 2\) have logprobs \(1, 3\)"):
        TopLogprobs(torch.zeros(1, 2, **INT), torch.zeros(1, 3))
    with pytest.raises(ValueError, match="1 output_ids have 2 rows of top_logprobs"):
        replace(sample([1], [5], [("v1", 0, 1)]), top_logprobs=top(([5], [-1.0]), ([4], [-1.0])))


@pytest.mark.parametrize(
    "partial, rest, spans",
    [
        (([], [("v1", 0, 0)]), ([5], [("v2", 0, 1)]), [("v2", 0, 1)]),
        (([5], [("v1", 0, 1)]), ([], [("v2", 0, 0)]), [("v1", 0, 1)]),
        (([], [("v1", 0, 0)]), ([], [("v2", 0, 0)]), [("v2", 0, 0)]),
    ],
)
def test_join_when_a_part_has_no_token_then_the_other_part(partial, rest, spans):
    whole = join(sample([1], *partial), sample([1, *partial[0]], *rest))
    assert whole.output_ids.tolist() == partial[0] + rest[0] and whole.finish_reason == "abort"
    assert whole.weight_versions == tuple(VersionSpan(*span) for span in spans)


@pytest.mark.parametrize(
    "tokens, rest, engine",
    [([5], [6], "sglang+vllm"), ([], [6], "sglang"), ([5], [], "vllm"), ([], [], "sglang")],
)
def test_join_when_continued_on_another_engine_then_those_that_sampled_a_token_are_named(
    tokens, rest, engine
):
    partial = replace(sample([1], tokens, [("v1", 0, len(tokens))]), engine="vllm")
    later = replace(sample([1, *tokens], rest, [("v1", 0, len(rest))]), engine="sglang")
    assert join(partial, later).engine == engine


def test_join_when_thrice_then_as_one():
    first = sample([1], [5], [("v1", 0, 1)])
    second = sample([1, 5], [6], [("v2", 0, 1)])
    third = sample([1, 5, 6], [7], [("v2", 0, 1)], finish="stop")
    whole = join(join(first, second), third)
    assert whole.output_ids.tolist() == [5, 6, 7]
    assert whole.weight_versions == (VersionSpan("v1", 0, 1), VersionSpan("v2", 1, 3))


@pytest.mark.parametrize(
    "partial, rest, named",
    [
        ({"finish": "stop"}, {}, "ended with stop has no continuation"),
        ({}, {"prompt": [1, 2, 6]}, "prompt of 3 tokens is not the 3 tokens of the partial"),
        ({}, {"prompt": [1, 2]}, "prompt of 2 tokens is not the 3 tokens of the partial"),
        ({"sets": [[5]]}, {}, "only one of a partial response .* has support"),
        ({}, {"routes": [1, 2, 3]}, "only one of a partial response .* has routed_experts"),
    ],
)
def test_join_when_the_parts_do_not_fit_then_refused(partial, rest, named):
    first = {"prompt": [1, 2], "output": [5], "spans": [("v1", 0, 1)]} | partial
    second = {"prompt": [1, 2, 5], "output": [6], "spans": [("v1", 0, 1)]} | rest
    with pytest.raises(ValueError, match=named):
        join(sample(**first), sample(**second))


def test_trajectory_when_its_routes_are_not_of_all_tokens_but_the_last_then_refused():
    assert sample([1, 2], [5], [("v1", 0, 1)], routes=[0, 1]).routed_experts.shape == (2, 1, 1)
    with pytest.raises(ValueError, match="3 tokens have routed_experts of 3, not 2"):
        sample([1, 2], [5], [("v1", 0, 1)], routes=[0, 1, 2])


def test_join_when_the_first_part_never_ran_then_routes_are_those_of_the_second():
    # 32767 is what int16 holds for a token without routes.
    partial = sample([1, 2, 5], [], [("v1", 0, 0)], routes=[32767, 32767])
    rest = sample([1, 2, 5], [7], [("v1", 0, 1)], finish="length", routes=[3, 4, 6])
    assert join(partial, rest).routed_experts.flatten().tolist() == [3, 4, 6]


@pytest.mark.parametrize("routes", [[32767, 32767], [32767, 1], [1, 32767]])
def test_join_when_a_token_that_was_sampled_has_no_routes_then_those_of_a_later_pass_do_not_fill_them(routes):
    partial = sample([1, 2], [5], [("v1", 0, 1)], routes=routes)
    rest = sample([1, 2, 5], [7], [("v1", 0, 1)], finish="length", routes=[3, 4, 6])
    assert join(partial, rest).routed_experts.flatten().tolist() == [*routes, 6]
