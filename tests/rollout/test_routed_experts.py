"""A server's routed experts: what its base64 becomes, and by which rule it is refused."""

import asyncio
import base64
import json

import numpy as np
import orjson
import pytest
import torch
from aiohttp import web

from megatron_rl_corr.rollout import RolloutClient, RolloutProtocolError, SamplingParams
from megatron_rl_corr.rollout.requests import generate_request
from megatron_rl_corr.rollout.responses import parse_generate
from megatron_rl_corr.rollout.routed_experts import ExpertShape, decode, has_routes, no_routes, pack

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


@pytest.mark.parametrize(
    "given, rule",
    [
        (encoded(ROWS)[:-3], "rule base64: routed_experts of 61 characters are no base64"),
        ([1, 2], "rule base64: .* got list"),
        (encoded(ROWS)[:-4], "rule int32: routed_experts of 45 bytes are no whole number"),
        (encoded(ROWS[:1]), "rule rows: 6 ids of routed_experts are 1 rows of 3 layers x 2 experts, where 3 tokens, "
         "prompt included, have 2"),
        (encoded(ROWS + ROWS[:1]), "rule rows: 18 ids"),
        (encoded([ROWS[0], [[2, 0], [0, 0], [1, 4]]]), r"rule range: expert 4 of token 1 in layer 2 .*\[0, 4\)"),
        (encoded([[[0, -1], [0, 0], [3, 2]], ROWS[1]]), "rule range: expert -1 of token 0 in layer 0"),
        (encoded([ROWS[0], [[2, 0], [0, 0], [3, 3]]]), r"rule distinct ids: experts \[3, 3\] of token 1 in layer 2"),
        (encoded([[[0, 0], [0, 0], [3, 2]], ROWS[1]]), r"rule distinct ids: experts \[0, 0\] of token 0 in layer 0"),
    ],
)  # fmt: skip
def test_decode_when_a_rule_is_broken_then_error_names_it(given, rule):
    with pytest.raises(ValueError, match=rule):
        decode(given, tokens=3, shape=SHAPE)


@pytest.mark.parametrize(
    "experts, top_k, dtype",
    [(255, 1, torch.uint8), (256, 1, torch.int16), (256, 8, torch.uint8), (257, 8, torch.int16)],
)
def test_dtype_when_as_small_as_may_be_then_every_id_and_a_row_without_routes_can_be_told(experts, top_k, dtype):
    shape = ExpertShape(1, (0,), top_k, experts)
    assert shape.dtype == dtype
    last = torch.arange(experts - top_k, experts).view(1, 1, top_k)
    assert has_routes(last.to(dtype), experts).all() and (last.to(dtype) == last).all()
    assert not has_routes(no_routes(shape, 1), experts).any()


def test_pack_when_samples_are_unlike_long_or_have_none_then_no_routes_behind_their_end():
    packed = pack([decode(encoded(ROWS), tokens=3, shape=SHAPE), None], 4, SHAPE)
    assert packed.shape == (2, 4, 2, 2)
    assert has_routes(packed, 4)[:, :, 0].tolist() == [[True, True, False, False], [False] * 4]


def answer(**meta):
    return {"output_ids": [7], "meta_info": {
        "finish_reason": {"type": "length"}, "prompt_tokens": 2, "completion_tokens": 1, "weight_version": "1",
        "output_token_logprobs": [[-0.5, 7, None]], **meta,
    }}  # fmt: skip


def parse(body, experts=SHAPE):
    return parse_generate(
        orjson.dumps(body), prompt_ids=torch.tensor([1, 2]), prompt_index=0, sample_index=0, server="http://a:1",
        experts=experts,
    )


def test_generate_when_routes_are_asked_for_then_the_trajectory_has_them_and_only_then():
    assert parse(answer(routed_experts=encoded(ROWS))).routed_experts.shape == (2, 2, 2)
    assert parse(answer(routed_experts=encoded(ROWS)), experts=None).routed_experts is None
    assert generate_request([1], SamplingParams(1), routed_experts=True).json["return_routed_experts"] is True
    assert "return_routed_experts" not in generate_request([1], SamplingParams(1)).json


def test_generate_when_aborted_while_it_waited_then_no_token_has_routes():
    again = parse(answer(finish_reason={"type": "abort"})).routed_experts  # to be computed anew
    assert again.shape == (2, 2, 2) and not has_routes(again, 4).any()
    body = answer(finish_reason={"type": "abort"}, completion_tokens=0, output_token_logprobs=[])
    routes = parse(body | {"output_ids": []}).routed_experts
    assert routes.shape == (1, 2, 2) and not has_routes(routes, 4).any()


def test_generate_when_no_routes_come_though_asked_for_then_error_names_the_servers_flag():
    with pytest.raises(RolloutProtocolError, match="start the server with --enable-return-routed-experts"):
        parse(answer())


def test_client_when_a_sample_has_wrong_routes_then_error_names_the_sample_and_the_rule(faulty):
    async def handle(request):
        assert (await request.json())["return_routed_experts"]
        return web.Response(body=json.dumps(answer(routed_experts=encoded(ROWS[:1]))))

    async def scenario():
        async with faulty.serving(handle) as url, RolloutClient([url], vocab_size=10, experts=SHAPE) as client:
            with pytest.raises(RolloutProtocolError, match="rule rows") as error:
                await client.generate([[1, 2]], SamplingParams(1))
            return error.value

    assert asyncio.run(scenario()).__notes__ == ["it was sample 0 of prompt 0 (2 tokens)"]
