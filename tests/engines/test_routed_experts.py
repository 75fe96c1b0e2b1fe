"""A server's routed experts: what its base64 becomes, and by which rule it is refused."""

import asyncio
import base64
import json
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import orjson
import pytest
import torch
from aiohttp import web

from megatron_rl_corr.engines.routes import (
    BLOCK,
    ExpertShape,
    cut_routes,
    has_routes,
    no_routes,
    write_routes,
)
from megatron_rl_corr.engines.sample_request import SampleRequest
from megatron_rl_corr.engines.sglang.requests import generate_request
from megatron_rl_corr.engines.sglang.responses import parse_generate
from megatron_rl_corr.engines.sglang.routed_experts import decode
from megatron_rl_corr.reduce.context import zigzag_positions, zigzag_runs
from megatron_rl_corr.rollout import (
    Environment,
    Prompt,
    RolloutClient,
    RolloutProtocolError,
    SampleFailure,
    SamplingParams,
    generate_episodes,
)

# 3 layers, of which the second is dense: 2 of 4 experts in the others.
SHAPE = ExpertShape(num_layers=3, layers=(0, 2), top_k=2, experts=4)
# 3 tokens, so 2 rows; the dense layer's ids mean nothing.
ROWS = [[[0, 1], [0, 0], [3, 2]], [[2, 0], [9, 9], [1, 3]]]


def encoded(rows):
    return base64.b64encode(np.array(rows, dtype=np.int32).tobytes()).decode()


def test_decode_when_well_formed_then_the_layers_with_experts_in_a_byte_an_id():
    routes = decode(encoded(ROWS), tokens=3, shape=SHAPE)
    assert routes.dtype == torch.uint8 and SHAPE.bytes_per_token == 4
    assert routes.tolist() == [[[0, 1], [3, 2]], [[2, 0], [1, 3]]]


def test_decode_when_a_token_is_zero_everywhere_then_it_has_no_routes():
    routes = decode(encoded([ROWS[0], [[0, 0]] * 3]), tokens=3, shape=SHAPE)
    assert has_routes(routes, 4).tolist() == [[True, True], [False, False]]
    alone = ExpertShape(1, (0,), 1, 4)  # of one expert a token, 0 is a route like any other
    assert has_routes(decode(encoded([[[0]], [[3]]]), tokens=3, shape=alone), 4).all()


def test_decode_when_the_first_tokens_were_not_asked_for_then_the_rows_behind_them_and_no_others():
    assert decode(encoded(ROWS[1:]), tokens=3, shape=SHAPE, first=1).tolist() == [[[2, 0], [1, 3]]]
    assert decode("", tokens=3, shape=SHAPE, first=2).shape == (0, 2, 2)
    with pytest.raises(
        ValueError, match="12 ids .* are 2 rows .* 3 tokens, prompt included, have 1 from token 1 on"
    ):
        decode(encoded(ROWS), tokens=3, shape=SHAPE, first=1)
    with pytest.raises(ValueError, match="expert 4 of token 1 in layer 2"):
        decode(encoded([[[2, 0], [0, 0], [1, 4]]]), tokens=3, shape=SHAPE, first=1)


@pytest.mark.parametrize(
    "given, rule",
    [
        (encoded(ROWS)[:-3], "rule base64: routed_experts of 61 characters are no base64"),
        ([1, 2], "rule base64: .* got list"),
        (encoded(ROWS)[:-4], "rule int32: routed_experts of 45 bytes are no whole number"),
        (
            encoded(ROWS[:1]),
            "rule rows: 6 ids of routed_experts are 1 rows of 3 layers x 2 experts, where 3 tokens, "
            "prompt included, have 2",
        ),
        (encoded(ROWS + ROWS[:1]), "rule rows: 18 ids"),
        (
            encoded([ROWS[0], [[2, 0], [0, 0], [1, 4]]]),
            r"rule range: expert 4 of token 1 in layer 2 .*\[0, 4\)",
        ),
        (encoded([[[0, -1], [0, 0], [3, 2]], ROWS[1]]), "rule range: expert -1 of token 0 in layer 0"),
        (
            encoded([ROWS[0], [[2, 0], [0, 0], [3, 3]]]),
            r"rule distinct ids: experts \[3, 3\] of token 1 in layer 2",
        ),
        (
            encoded([[[0, 0], [0, 0], [3, 2]], ROWS[1]]),
            r"rule distinct ids: experts \[0, 0\] of token 0 in layer 0",
        ),
    ],
)
def test_decode_when_a_rule_is_broken_then_error_names_it(given, rule):
    with pytest.raises(ValueError, match=rule):
        decode(given, tokens=3, shape=SHAPE)


def test_decode_when_ids_repeat_behind_a_block_then_the_first_such_token_is_named():
    shape = ExpertShape(1, (0,), 3, 300)
    rows = np.arange(3) + np.arange(BLOCK + 9)[:, None, None] % 297
    assert decode(encoded(rows), tokens=BLOCK + 10, shape=shape).tolist() == rows.tolist()
    rows[[BLOCK + 2, BLOCK + 7]] = [5, 7, 5]
    with pytest.raises(ValueError, match=rf"experts \[5, 7, 5\] of token {BLOCK + 2} in layer 0"):
        decode(encoded(rows), tokens=BLOCK + 10, shape=shape)


def test_decode_when_no_layer_has_experts_then_rows_of_none():
    assert decode(encoded(ROWS), tokens=3, shape=ExpertShape(3, (), 2, 4)).shape == (2, 0, 2)


@pytest.mark.parametrize(
    "experts, top_k, dtype",
    [(255, 1, torch.uint8), (256, 1, torch.int16), (256, 8, torch.uint8), (257, 8, torch.int16)],
)
def test_dtype_when_as_small_as_may_be_then_every_id_and_a_row_without_routes_can_be_told(
    experts, top_k, dtype
):
    shape = ExpertShape(1, (0,), top_k, experts)
    assert shape.dtype == dtype
    last = torch.arange(experts - top_k, experts).view(1, 1, top_k)
    assert has_routes(last.to(dtype), experts).all() and (last.to(dtype) == last).all()
    assert not has_routes(no_routes(shape, 1), experts).any()


def test_routes_when_cut_out_of_an_answer_then_the_rest_is_its_json_and_they_are_what_it_had():
    body = orjson.dumps({"a": 'text with "routed_experts":"no"', "meta": {"routed_experts": "QUI/", "b": 1}})
    rest, found = cut_routes(body)
    assert bytes(found) == b"QUI/"
    assert orjson.loads(rest) == orjson.loads(body) | {"meta": {"routed_experts": True, "b": 1}}


@pytest.mark.parametrize(
    "body",
    [
        b'{"meta":{"routed_experts":null}}',
        b'{"routed_experts":"AA","meta":{"routed_experts":"BB"}}',  # which of them is not known
        b'{"meta":{"routed_experts":"AA\\/A"}}',  # a slash as some write it
        b'{"meta":{"routed_experts":"AA',
        json.dumps({"meta": {"routed_experts": "AA"}}).encode(),  # with a blank
    ],
)
def test_routes_when_an_answer_is_written_otherwise_then_nothing_is_cut(body):
    assert cut_routes(body) == (body, None)


def written(samples, boundaries, runs, layers):
    into = torch.zeros(sum(end - begin for begin, end in runs), len(layers), 2, dtype=torch.uint8)
    write_routes(samples, boundaries, runs, layers, into)
    return into


def test_write_routes_when_samples_are_unlike_long_or_have_none_then_no_routes_behind_their_end():
    samples = [decode(encoded(ROWS), tokens=3, shape=SHAPE), None]
    into = written(samples, [0, 4, 6], [(0, 4), (4, 6)], (0, 1))
    assert has_routes(into, 4)[:, 0].tolist() == [True, True, False, False, False, False]
    assert torch.equal(into[:2], samples[0])


@pytest.mark.parametrize("layers", [(0, 1), (1, 2), (0, 2), (2,)])
def test_write_routes_when_runs_are_of_two_chunks_then_the_same_rows_as_of_the_whole(layers):
    samples = [torch.arange(7 * 6, dtype=torch.uint8).view(7, 3, 2), torch.full((3, 3, 2), 9).byte()]
    samples[1][..., 1] = 8
    boundaries = [0, 8, 12]
    whole = written(samples, boundaries, [(0, 8), (8, 12)], layers)
    assert torch.equal(whole[:7], samples[0][:, layers]) and torch.equal(whole[8:11], samples[1][:, layers])
    assert not has_routes(whole[[7, 11]], 255).any()
    for rank in (0, 1):
        own = written(samples, boundaries, zigzag_runs(rank, 2, boundaries), layers)
        assert torch.equal(own, whole[zigzag_positions(rank, 2, boundaries)])


def answer(**meta):
    return {
        "output_ids": [7],
        "meta_info": {
            "finish_reason": {"type": "length"},
            "prompt_tokens": 2,
            "completion_tokens": 1,
            "weight_version": "1",
            "output_token_logprobs": [[-0.5, 7, None]],
            "num_retractions": 0,
            **meta,
        },
    }


def parse(body, experts=SHAPE, **known):
    asked = SampleRequest(
        torch.tensor([1, 2]),
        SamplingParams(9),
        "r1",
        seed=0,
        prompt_index=0,
        sample_index=0,
        vocab_size=None,
        experts=experts,
        **known,
    )
    return parse_generate(body if isinstance(body, bytes) else orjson.dumps(body), asked, server="http://a:1")


def test_parse_when_routes_are_elsewhere_or_only_true_then_refused():
    made = answer(routed_experts=encoded(ROWS))
    assert parse(made).routed_experts.tolist() == [[[0, 1], [3, 2]], [[2, 0], [1, 3]]]
    assert torch.equal(parse(json.dumps(made).encode()).routed_experts, parse(made).routed_experts)
    with pytest.raises(RolloutProtocolError, match="rule presence"):
        parse(answer() | {"other": {"routed_experts": encoded(ROWS)}})
    with pytest.raises(RolloutProtocolError, match="rule base64: .* got bool"):
        parse(answer(routed_experts=True))


def test_generate_when_routes_are_asked_for_then_the_trajectory_has_them_and_only_then():
    assert parse(answer(routed_experts=encoded(ROWS))).routed_experts.shape == (2, 2, 2)
    assert parse(answer(routed_experts=encoded(ROWS)), experts=None).routed_experts is None
    assert (
        generate_request([1], SamplingParams(1), seed=0, routed_experts=True).json["return_routed_experts"]
        is True
    )
    plain = generate_request([1], SamplingParams(1), seed=0).json
    assert not {"return_routed_experts", "routed_experts_start_len"} & plain.keys()


def test_generate_when_aborted_while_it_waited_then_no_token_has_routes():
    again = parse(answer(finish_reason={"type": "abort"})).routed_experts  # to be computed anew
    assert again.shape == (2, 2, 2) and not has_routes(again, 4).any()
    body = answer(finish_reason={"type": "abort"}, completion_tokens=0, output_token_logprobs=[])
    routes = parse(body | {"output_ids": []}).routed_experts
    assert routes.shape == (1, 2, 2) and not has_routes(routes, 4).any()


def test_generate_when_no_routes_come_though_asked_for_then_error_names_the_servers_flag():
    with pytest.raises(RolloutProtocolError, match="start the server with --enable-return-routed-experts"):
        parse(answer())


def retracted(times, *bounds):
    """An answer of 6 tokens, so 7 rows, retracted so often; the weights changed at these tokens."""
    starts = [0, *bounds]
    spans = [{"version": str(n), "start": a, "end": b} for n, (a, b) in enumerate(pairwise([*starts, 6]))]
    body = answer(
        completion_tokens=6,
        output_token_logprobs=[[-0.5, 7, None]] * 6,
        weight_versions=spans,
        num_retractions=times,
        routed_experts=encoded(ROWS[:1] * 7),
    )
    return body | {"output_ids": [7] * 6}


@pytest.mark.parametrize(
    ("answer", "pushes_retract", "first"),
    [
        (retracted(0), True, 0),
        (retracted(0), False, 0),
        (retracted(1), True, 7),
        (retracted(1), False, 7),
        (retracted(9), False, 7),  # nobody knows where
        # The weights changed in a pause that did not retract.
        (retracted(0, 2), False, 0),
        (retracted(0, 2), True, 0),
        (retracted(1, 2), False, 7),
        (retracted(2, 2, 4), False, 7),
        # 2 tokens of the prompt and 2 of the response had been sampled, of which the last one
        # had not been run.
        (retracted(1, 2), True, 3),
        (retracted(1, 5), True, 6),
        (retracted(1, 1), True, 2),
        (retracted(2, 2, 4), True, 5),  # the last push has computed all of them anew
        # one more, one less
        (retracted(2, 2), True, 7),
        (retracted(3, 2, 4), True, 7),
        (retracted(1, 2, 4), True, 7),
        (retracted(1, 0), True, 7),
        (retracted(1, 6), True, 7),  # no token on one side: these are no switches
    ],
)
def test_generate_when_a_server_has_retracted_then_no_routes_before_the_last_place_that_is_known(
    answer, pushes_retract, first
):
    routes = parse(answer, pushes_retract=pushes_retract).routed_experts
    assert has_routes(routes, 4).tolist() == [[False] * 2] * first + [[True] * 2] * (7 - first)
    assert routes[first:].tolist() == [[[0, 1], [3, 2]]] * (7 - first)


def test_generate_when_the_first_routes_are_known_then_a_retraction_leaves_them_as_they_are():
    body = retracted(1, 2)
    body["meta_info"]["routed_experts"] = encoded(ROWS[:1] * 6)
    for told, first in ((True, 3), (False, 7)):
        part = parse(body, routes_from=1, pushes_retract=told)
        assert part.routes_from == 1
        assert has_routes(part.routed_experts, 4).all(dim=1).tolist() == [False] * (first - 1) + [True] * (
            7 - first
        )
    # an earlier request has those of all that was computed anew
    body["meta_info"]["routed_experts"] = encoded(ROWS[:1] * 3)
    routes = parse(body, routes_from=4, pushes_retract=True).routed_experts
    assert has_routes(routes, 4).all(dim=1).tolist() == [True] * 3


def test_generate_when_one_expert_a_token_is_retracted_then_its_tokens_have_none():
    alone = ExpertShape(1, (0,), 1, 4)
    body = answer(routed_experts=encoded([[[3]], [[0]]]), num_retractions=1)
    assert parse(body, experts=alone).routed_experts.flatten().tolist() == [255, 255]


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (None, "rule retractions: it sent no num_retractions .* SGLang 0.5.19 or newer"),
        (-1, "num_retractions must be"),
        (True, "num_retractions must be an integer"),
        ("1", "num_retractions must be"),
        ((1 << 20) + 1, "num_retractions must be"),
    ],
)
def test_generate_when_it_is_unknown_how_often_it_was_retracted_then_refused_where_routes_are_asked_for(
    told, said
):
    body = answer(routed_experts=encoded(ROWS), num_retractions=told)
    with pytest.raises(RolloutProtocolError, match=said):
        parse(body)
    if told is None:
        del body["meta_info"]["num_retractions"]
        with pytest.raises(RolloutProtocolError, match=said):
            parse(body)
    assert parse(body, experts=None).routed_experts is None


def test_client_when_a_sample_has_wrong_routes_then_error_names_the_sample_and_the_rule(faulty):
    async def handle(request):
        if request.path == "/generate":
            assert (await request.json())["return_routed_experts"]
        return web.Response(body=json.dumps(answer(routed_experts=encoded(ROWS[:1]))))

    async def scenario():
        options = {"vocab_size": 10, "experts": SHAPE, "max_retries": 0}
        async with faulty.serving(handle) as url, RolloutClient([url], **options) as client:
            with pytest.raises(SampleFailure, match="rule rows") as error:
                await client.generate([[1, 2]], SamplingParams(1))
            return error.value

    assert asyncio.run(scenario()).__notes__ == [
        "it was asked 1 times",
        "it was sample 0 of prompt 0 (2 tokens)",
    ]


class Routing:
    """A server of SHAPE that answers with the tokens it is given in turn, and routes (t, t + 1) for token t.

    An answer is (tokens, finish reason, whether it has routes, how often it was retracted: 0 where that is
    left out). As SGLang does, it leaves out the first rows it is told to; it counts the rows it sends.
    """

    def __init__(self, *answers):
        self.answers, self.starts, self.rows = list(answers), [], 0

    async def handle(self, request):
        body = await request.json()
        tokens, reason, routed, *retractions = self.answers.pop(0)
        start = body["routed_experts_start_len"]
        rows = [[[t % 4, (t + 1) % 4]] * 3 for t in range(start, len(body["input_ids"]) + len(tokens) - 1)]
        meta = {
            "finish_reason": {"type": reason, **({"message": "Aborted"} if reason == "abort" else {})},
            "weight_version": "1",
            "output_token_logprobs": [[-1.0, token, None] for token in tokens],
        }
        if routed:
            meta |= {"routed_experts": encoded(rows), "num_retractions": sum(retractions)}
            self.rows += len(rows)
        self.starts.append(start)
        return web.Response(body=json.dumps({"output_ids": tokens, "meta_info": meta}))


def routes_of(tokens):
    return [[[t % 4, (t + 1) % 4]] * 2 for t in range(tokens - 1)]


def test_client_when_a_sample_is_continued_then_only_routes_it_lacks_are_asked_for(faulty):
    # Cut after 2 tokens; cut again before it runs, without routes; then the rest.
    server = Routing(([3, 4], "abort", True), ([], "abort", False), ([5, 6], "length", True))

    async def scenario(client):
        (whole,) = await client.generate([[1, 2, 3]], SamplingParams(4))
        assert server.starts == [0, 4, 4]
        assert whole.routed_experts.tolist() == routes_of(7) and server.rows == 6

    faulty.run(scenario, server.handle, experts=SHAPE)


NONE = [[255, 255]] * 2
"""A row of a token without routes."""


def test_client_when_a_sample_was_cut_before_its_first_token_then_routes_are_asked_for_from_the_first(faulty):
    server = Routing(([], "abort", False), ([], "abort", True), ([5, 6], "length", True))

    async def scenario(client):
        (whole,) = await client.generate([[1, 2, 3]], SamplingParams(2))
        assert server.starts == [0, 0, 0] and whole.routed_experts.tolist() == routes_of(5)

    faulty.run(scenario, server.handle, experts=SHAPE)


@pytest.mark.parametrize("answered", [([3, 4], "abort", False), ([3, 4], "abort", True, 1)])
def test_client_when_a_sample_was_retracted_and_cut_then_only_later_tokens_have_routes(answered, faulty):
    # Retracted, and cut while it waits (SGLang sends no routes then) or later; once more before it
    # runs; then the rest.
    server = Routing(answered, ([], "abort", False), ([5, 6], "length", True))

    async def scenario(client):
        (whole,) = await client.generate([[1, 2, 3]], SamplingParams(4))
        # 3 tokens of the prompt and the first sampled one were run before; the second one, in the
        # last request only.
        assert server.starts == [0, 4, 4]
        assert whole.routed_experts.tolist() == [NONE] * 4 + routes_of(7)[4:]

    faulty.run(scenario, server.handle, experts=SHAPE)


def test_client_when_a_continuation_is_retracted_then_only_its_own_tokens_have_no_routes(faulty):
    server = Routing(([3, 4], "abort", True), ([5, 6], "abort", True, 2), ([7], "length", True))

    async def scenario(client):
        (whole,) = await client.generate([[1, 2, 3]], SamplingParams(5))
        assert server.starts == [0, 4, 6]
        assert whole.routed_experts.tolist() == routes_of(5) + [NONE] * 2 + routes_of(8)[6:]

    faulty.run(scenario, server.handle, experts=SHAPE)


class Answers(Environment):
    """Says one token after each turn."""

    def __init__(self, prompt):
        self.said = 0

    def step(self, output_ids, finish_reason):
        self.said += 1
        return [9] * self.said


def test_episode_when_it_has_turns_then_each_brings_the_routes_of_new_tokens_alone(faulty):
    # 3 + 2 tokens, 1 said, 1, 2 said, 3: 12 tokens, 11 rows, each sent once.
    server = Routing(([3, 4], "stop", True), ([5], "stop", True), ([6, 7, 8], "stop", True))

    async def scenario(client):
        (whole,) = await generate_episodes(
            client, [Prompt(0, [1, 2, 3])], SamplingParams(16), environment=Answers, max_turns=3
        )
        assert server.starts == [0, 4, 6] and server.rows == 11
        assert whole.routed_experts.tolist() == routes_of(12)
        assert whole.turn_ids.tolist() == [0, 0, -1, 1, -1, -1, 2, 2, 2]

    faulty.run(scenario, server.handle, experts=SHAPE)


def test_episode_when_a_turn_is_retracted_then_only_that_turn_has_no_routes(faulty):
    # As above; the second turn is retracted, and the third is cut before its first token.
    server = Routing(
        ([3, 4], "stop", True), ([5], "stop", True, 1), ([], "abort", False), ([6, 7, 8], "stop", True)
    )

    async def scenario(client):
        (whole,) = await generate_episodes(
            client, [Prompt(0, [1, 2, 3])], SamplingParams(16), environment=Answers, max_turns=3
        )
        assert server.starts == [0, 4, 6, 6]
        # Without: the last token of the first turn, and what was said behind it, in whose pass the
        # turn was sampled.
        assert whole.routed_experts.tolist() == routes_of(12)[:4] + [NONE] * 2 + routes_of(12)[6:]

    faulty.run(scenario, server.handle, experts=SHAPE)


def test_client_when_a_server_sends_more_rows_than_it_was_asked_for_then_refused(faulty):
    server = Routing(([3, 4], "abort", True), ([5, 6], "length", True))

    async def deaf(request):
        body = await request.json()
        all_rows = body | {"routed_experts_start_len": 0}
        return await server.handle(SimpleNamespace(json=lambda: asyncio.sleep(0, all_rows)))

    async def scenario(client):
        with pytest.raises(SampleFailure, match="7 tokens, prompt included, have 2 from token 4 on"):
            await client.generate([[1, 2, 3]], SamplingParams(4))

    faulty.run(scenario, deaf, experts=SHAPE, max_retries=0)
