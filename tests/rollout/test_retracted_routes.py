"""Routes of responses that a real SGLang server has retracted: those that sampled their tokens, or none.

P prompt tokens, R response tokens, T of both, M layers, k experts a token. The truth is of
Hugging Face models.
"""

import json
import shutil
import time
from dataclasses import dataclass, replace
from itertools import pairwise

import orjson
import pytest
import torch
from safetensors.torch import load_file

from megatron_rl_corr.engines.routes import ExpertShape, has_routes
from megatron_rl_corr.engines.sglang.routed_experts import decode
from megatron_rl_corr.engines.trajectory import Trajectory
from megatron_rl_corr.mcore.batch.collect_metrics import count_samples
from megatron_rl_corr.rollout import LoopThread, RolloutClient, SamplingParams
from megatron_rl_corr.rollout.queue import Group, Taken
from megatron_rl_corr.weight_sync.servers import WeightServers
from megatron_rl_corr.weight_sync.transports.broadcast import DistributedTransport
from tests import server_load
from tests.hf_truth import scored
from tests.preloaded import PreloadedServer
from tests.rollout.test_in_flight_real_servers import _stacked, push
from tests.tiers import in_matrix, long, matrix
from tools.cpu import environment, sglang_arguments

pytestmark = matrix

SHAPE = ExpertShape(num_layers=4, layers=(0, 1, 2, 3), top_k=2, experts=8)
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7, 9], [3, 2], [12, 13, 14], [40, 41, 42, 43]]
LONG, SHORT = SamplingParams(400), SamplingParams(200)
TIGHT = ["--max-total-tokens", "1500", "--schedule-conservativeness", "0.01"]
"""Memory for 1500 tokens: six responses of 400 begin one after the other, and have no room
to end together.
"""


@pytest.fixture(scope="module")
def endless_dir(tiny_moe_dir, tmp_path_factory):
    """The model without an end of sequence. With `ignore_eos` SGLang reserves the memory of
    whole responses.
    """
    folder = tmp_path_factory.mktemp("endless")
    for path in tiny_moe_dir.iterdir():
        shutil.copy(path, folder)
    for name in ("config.json", "generation_config.json"):
        if (folder / name).exists():
            values = json.loads((folder / name).read_text())
            (folder / name).write_text(json.dumps(values | {"eos_token_id": 1000}))
    return folder


@pytest.fixture(scope="module")
def server(endless_dir, tmp_path_factory):
    """A server with too little memory, which may be paused in place."""
    arguments = [
        "--disable-overlap-schedule",
        "--enable-return-routed-experts",
        "--random-seed",
        "3",
        "--skip-tokenizer-init",
        *TIGHT,
    ]
    with PreloadedServer(
        endless_dir,
        dtype="float32",
        log_path=tmp_path_factory.mktemp("tight") / "server.log",
        extra_arguments=[*sglang_arguments(), *arguments],
        environment=environment("sglang"),
    ) as running:
        yield running


@pytest.fixture(scope="module")
def weights(tiny_moe_dir):
    """The model's, and others whose routers choose otherwise."""
    first, noise = load_file(tiny_moe_dir / "model.safetensors"), torch.Generator().manual_seed(0)

    def other():
        return {
            name: w + 0.3 * w.std() * torch.randn(w.shape, generator=noise) if w.dim() > 1 else w
            for name, w in first.items()
        }

    return [first, other(), other()]


@pytest.fixture(scope="module")
def models(tiny_moe_dir, weights):
    from transformers import AutoModelForCausalLM

    found = [AutoModelForCausalLM.from_pretrained(tiny_moe_dir, dtype=torch.float32).eval() for _ in weights]
    for model, tensors in zip(found, weights, strict=True):
        model.load_state_dict(_stacked(tensors, model.state_dict()))
    return found


@dataclass
class Answered:
    """A response, and what the server said of it."""

    sample: Trajectory
    retractions: int
    sent: torch.Tensor
    """[T - 1, M, k]: the routes in the answer."""


@pytest.fixture
def sampled(server, weights):
    """sampled(sampling, pushes, mode, pushes_retract): PROMPTS, begun one after the other,
    while weights change.
    """
    made = []

    def run(sampling, *, pushes=0, mode="retract", pushes_retract=False):
        with LoopThread() as loop:
            client = RolloutClient(
                [server.url],
                vocab_size=83,
                timeout_s=120,
                experts=SHAPE,
                keyed_cache=mode == "in_place",
                pushes_retract=pushes_retract,
                ingest_process=False,  # answers are read below
            )
            transport = DistributedTransport(client.control, loop, backend="gloo")
            servers, answers, send = (
                WeightServers(client, loop, transport, pause_mode=mode),
                {},
                client.fleet.send,
            )

            async def noted(url, request, **options):
                status, body = await send(url, request, **options)
                if request.endpoint == "/generate":
                    answer = orjson.loads(body)
                    answers[tuple(answer["output_ids"])] = answer["meta_info"]
                return status, body

            client.fleet.send = noted
            try:
                push(servers, weights[0], "0")
                running = []
                for number, prompt in enumerate(PROMPTS, 1):
                    running.append(loop.submit(client.generate([prompt], sampling)))
                    wait_for_running(server.url, number)
                for version in range(1, pushes + 1):
                    server_load.wait_for_tokens([server.url])
                    assert not any(one.done() for one in running)
                    push(servers, weights[version], str(version))
                for one in running:
                    [sample] = one.result(120)
                    meta = answers[tuple(sample.output_ids.tolist())]
                    tokens = sample.prompt_ids.numel() + sample.output_ids.numel()
                    sent = decode(meta["routed_experts"], tokens=tokens, shape=SHAPE)
                    made.append(Answered(sample, meta["num_retractions"], sent))
            finally:
                servers.close()
                loop.call(client.close())
        return made

    return run


def wait_for_running(url, count):
    deadline = time.monotonic() + 30
    while server_load._load(url)["num_running_reqs"] < count:
        assert time.monotonic() < deadline, f"{url} does not run {count} requests"
        time.sleep(0.01)


def true_routes(models, sample, *, in_place=False):
    """([T - 1, M, k] of the passes that sampled the tokens, [T - 1] settled), where versions are
    numbers of models.

    in_place: keys and values are kept over a change; else they are computed anew there.
    """
    ids = torch.cat([sample.prompt_ids, sample.output_ids])
    # The pass that samples token t has token t - 1 as its last input.
    starts = [sample.prompt_ids.numel() - 1 + span.start for span in sample.weight_versions[1:]]
    routes, settled, cache = [], [], None
    for (begin, end), span in zip(pairwise([0, *starts, len(ids) - 1]), sample.weight_versions, strict=True):
        model, options = models[int(span.version)], {}
        if in_place:
            options, first = {"past_key_values": cache, "use_cache": True}, begin
        else:
            first = 0
        _, sure, out = scored(model, ids[first:end], **options)
        chosen = torch.stack([router.topk(SHAPE.top_k).indices for router in out.router_logits], dim=1)
        routes.append(chosen[begin - first :])
        settled.append(sure[begin - first :])
        cache = out.past_key_values if in_place else None
    settled = torch.cat(settled).cummin(0).values if in_place else torch.cat(settled)
    return torch.cat(routes).sort(dim=2).values, settled


def assert_wrong_and_of_the_last_weights(one, rows, models):
    """Why those rows must be dropped: the server computed them anew, and some experts did not
    sample their tokens.
    """
    last = replace(one.sample, weight_versions=[replace(one.sample.weight_versions[-1], start=0)])
    (truth, settled), (anew, sure) = true_routes(models, one.sample), true_routes(models, last)
    assert agreeing(one.sent, anew)[:rows][sure[:rows]].all()
    assert (~agreeing(one.sent, truth) & settled)[:rows].any()


def agreeing(routes, truth):
    """[T - 1] bool: the experts are the same in every layer."""
    return (routes.long().sort(dim=2).values == truth).all(dim=2).all(dim=1)


def assert_true_or_none(one, known, models, **how):
    """The first rows have no routes, those from `known` on are true; how many of these were compared."""
    routes, (truth, settled) = one.sample.routed_experts, true_routes(models, one.sample, **how)
    assert not has_routes(routes[:known], SHAPE.experts).any()
    assert has_routes(routes[known:], SHAPE.experts).all()
    assert agreeing(routes, truth)[known:][settled[known:]].all()
    assert torch.equal(routes[known:], one.sent[known:])
    return int(settled[known:].sum())


def counted(made):
    """What `router_replay/tokens_without_routes` and `sampled_without_routes` are made of."""
    samples = [one.sample for one in made]
    taken = Taken([Group(0, samples, [0.0] * len(samples))], ready=0, running=0, dropped=0)
    found = count_samples(taken, 0, SHAPE.experts)
    return found["unrouted"], found["unrouted_sampled"]


def test_routes_when_a_server_short_of_memory_retracts_then_none_and_those_it_did_not_retract_are_true(
    sampled, models
):
    made = sampled(LONG)
    retracted = [one for one in made if one.retractions]
    assert 0 < len(retracted) < len(made)
    for one in made:
        compared = assert_true_or_none(one, len(one.sent) if one.retractions else 0, models)
        # A text that repeats itself where two experts are nearly tied has few rows that are settled.
        assert compared > 20 or one.retractions
    # A response's rows are those of its prompt but the last token, and one for each sampled token.
    assert counted(made) == (sum(len(one.sent) for one in retracted), 400 * len(retracted))


@long
def test_routes_when_keys_are_kept_over_a_push_and_lost_for_memory_later_then_none_as_the_servers_are_wrong(
    sampled, models
):
    made = sampled(LONG, pushes=1, mode="in_place")
    retracted = [one for one in made if one.retractions]
    assert retracted and all(len(one.sample.weight_versions) == 2 for one in made)
    for one in made:
        assert_true_or_none(one, len(one.sent) if one.retractions else 0, models, in_place=True)
    wrong = []
    for one in retracted:
        truth, settled = true_routes(models, one.sample, in_place=True)
        before = one.sample.prompt_ids.numel() - 1 + one.sample.weight_versions[1].start
        wrong.append((~agreeing(one.sent, truth) & settled)[:before])
    assert torch.cat(wrong).any()  # or SGLang keeps them by now, and they need not be dropped


@pytest.mark.parametrize("told", [True, *in_matrix(False)])
def test_routes_when_pushes_retract_then_true_from_the_last_of_them_on_where_the_client_knows_that(
    sampled, models, told
):
    made = sampled(SHORT, pushes=2, pushes_retract=told)
    sampled_without = 0
    for one in made:
        spans = one.sample.weight_versions
        assert [span.version for span in spans] == ["0", "1", "2"] and one.retractions == 2
        # The last token before the push had not been run, so its row is of the pass behind it.
        anew = one.sample.prompt_ids.numel() + spans[2].start - 1
        assert_true_or_none(one, anew if told else len(one.sent), models)
        assert_wrong_and_of_the_last_weights(one, anew, models)
        sampled_without += spans[2].start if told else 200
    assert counted(made)[1] == sampled_without


@long
def test_routes_when_a_push_and_want_of_memory_retract_then_none_of_what_was_retracted_twice(sampled, models):
    made = sampled(LONG, pushes=1, pushes_retract=True)
    assert {one.retractions for one in made} == {1, 2}
    for one in made:
        known = one.sample.prompt_ids.numel() + one.sample.weight_versions[1].start - 1
        assert_true_or_none(one, known if one.retractions == 1 else len(one.sent), models)
