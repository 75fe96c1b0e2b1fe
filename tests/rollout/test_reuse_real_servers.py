"""What real servers need not do twice in an episode: keys and values of its tokens, and to
send their routes.
"""

import base64
import json

import numpy as np
import orjson
import pytest

from megatron_rl_corr.engines.routes import ExpertShape
from megatron_rl_corr.engines.sglang.requests import generate_request
from megatron_rl_corr.engines.sglang.routed_experts import decode
from megatron_rl_corr.engines.types import Request
from megatron_rl_corr.rollout import (
    Environment,
    LoopThread,
    Prompt,
    RolloutClient,
    SamplingParams,
    generate_episodes,
)

SAID, PROMPT_TOKENS, TURNS = [70, 71, 72], 120, 4
SHAPE = ExpertShape(num_layers=4, layers=(0, 1, 2, 3), top_k=2, experts=8)


class Talks(Environment):
    """A turn ends with one of half of the vocabulary's ids."""

    stop_token_ids = tuple(range(40))

    def __init__(self, prompt):
        pass

    def step(self, output_ids, finish_reason):
        return SAID


class Forgetful(RolloutClient):
    """Asks for a turn as if it were the first."""

    async def turn(self, prompt_ids, sampling, draw, **kept):
        return await super().turn(prompt_ids, sampling, draw)


class Scattering(RolloutClient):
    """Sends a turn to another server than the one before; by load alone it may well go back to that one."""

    async def turn(self, prompt_ids, sampling, draw, *, prefer=None, routes_from=0):
        if prefer is not None:
            prefer = next(url for url in self.base_urls if url != prefer)
        return await super().turn(prompt_ids, sampling, draw, prefer=prefer, routes_from=routes_from)


@pytest.fixture
def episodes(tiny_moe_dir):
    """episodes(client class, urls, salt): the episodes and, of all answers, tokens prefilled
    and rows of routes.
    """
    vocab_size = json.loads((tiny_moe_dir / "config.json").read_text())["vocab_size"]

    def made(kind, urls, salt, experts=None):
        # No two prompts have a first id in common that was asked with before.
        ids = np.random.RandomState(salt).permutation(80)[:12]
        prompts = [
            Prompt(
                i, [int(first), *np.random.RandomState([salt, i]).randint(0, 80, PROMPT_TOKENS - 1).tolist()]
            )
            for i, first in enumerate(ids)
        ]
        with LoopThread() as loop:
            # The answers are counted in this process.
            client = kind(urls, vocab_size=vocab_size, timeout_s=120, experts=experts, ingest_process=False)
            rows, send = [], client.fleet.send

            async def counted(url, request, **options):
                status, body = await send(url, request, **options)
                if request.endpoint == "/generate" and experts is not None:
                    encoded = orjson.loads(body)["meta_info"]["routed_experts"]
                    rows.append(len(base64.b64decode(encoded)) // (4 * SHAPE.num_layers * SHAPE.top_k))
                return status, body

            client.fleet.send = counted
            loop.call(client.flush_cache())
            whole = loop.call(
                generate_episodes(client, prompts, SamplingParams(200), environment=Talks, max_turns=TURNS)
            )
            sent = sum(rows)
            checked = (
                [routes_at_once(client, loop, each) for each in whole[:3]] if experts is not None else []
            )
            prefilled = client.counts()["prefilled"]
            loop.call(client.close())
        return whole, prefilled, sent, checked

    return made


def routes_at_once(client, loop, episode):
    """All routes of an episode, in one answer."""
    ids = [*episode.prompt_ids.tolist(), *episode.output_ids.tolist()]
    body = generate_request(ids, SamplingParams(1), seed=0, routed_experts=True).json
    meta = loop.call(client.ask(client.base_urls[0], Request("POST", "/generate", body)))["meta_info"]
    return decode(meta["routed_experts"], tokens=len(ids) + 1, shape=SHAPE)[: len(ids) - 1]


def rows_of(whole):
    """Every token but the last has a row."""
    return sum(len(each.routed_experts) for each in whole)


def least(whole):
    """Tokens that must be computed: the prompts, and of each later turn the token before it
    and what was said.
    """
    later = sum(int(each.turn_ids.max()) for each in whole)
    return len(whole) * PROMPT_TOKENS + later * (1 + len(SAID))


def test_episodes_when_routes_are_asked_for_then_each_row_is_sent_once_and_is_that_of_one_pass(
    episodes, keeping_server
):
    whole, prefilled, rows, checked = episodes(RolloutClient, [keeping_server.url], 1, SHAPE)
    assert rows == rows_of(whole)
    assert [each.routed_experts.tolist() for each in whole[:3]] == [routes.tolist() for routes in checked]
    assert prefilled == least(whole)
    forgetful, _, more, _ = episodes(Forgetful, [keeping_server.url], 2, SHAPE)
    print(f"rows of routes sent, of those there are: 1.00, and {more / rows_of(forgetful):.2f} without start")
    assert more > 2 * rows_of(forgetful)


def test_episodes_when_there_are_two_servers_then_no_token_of_an_earlier_turn_is_computed_again(
    episodes, sglang_server_fp32, keeping_server
):
    urls = [sglang_server_fp32.url, keeping_server.url]
    whole, prefilled, _, _ = episodes(RolloutClient, urls, 3)
    assert {each.server for each in whole} == set(urls) and max(
        int(each.turn_ids.max()) for each in whole
    ) == TURNS - 1
    # A server whose scheduler overlaps has run the last token of a turn too.
    assert prefilled <= least(whole)
    scattered, more, _, _ = episodes(Scattering, urls, 4)
    print(
        f"prompt tokens computed, of the least: {prefilled / least(whole):.2f}, and "
        f"{more / least(scattered):.2f} where a turn goes to another server"
    )
    assert more > 1.5 * least(scattered)
