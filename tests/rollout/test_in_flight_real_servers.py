"""Weights that change while real servers sample: every token's version is the weights that sampled it.

P prompt tokens, R response tokens. The truth is computed with Hugging Face models of both weights.
"""

import json

import pytest
import torch
from safetensors.torch import load_file

from megatron_rl_corr.rollout import LoopThread, RolloutClient, RolloutProtocolError, SamplingParams
from megatron_rl_corr.weight_sync.servers import WeightServers
from megatron_rl_corr.weight_sync.transports.broadcast import DistributedTransport
from tests.hf_truth import over_changes
from tests.server_load import wait_for_tokens
from tests.tiers import in_matrix, matrix

pytestmark = matrix

PROMPTS, SAMPLES = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7, 9], [3, 2]], 3
LONG = SamplingParams(250, ignore_eos=True)
WEIGHTS = ("first", "second", "third")
"""What the pushes of a case send: all different, as a sample may wait while the second are there."""
NEAR = 2e-4
KEEPS_PREFIXES = {
    "sglang": "--disable-overlap-schedule --disable-radix-cache; start it so",
    "vllm": "start the server with --no-enable-prefix-caching, or use `pause_mode` retract",
}


@pytest.fixture(scope="module")
def urls(victim, keeping_server, weights, engine, tiny_moe_dir):
    """Two servers of the victim's engine that may be paused in place, one without a prefix
    cache and one with.

    Other modules share them: they get the model's weights back, under their name.
    """
    found = [victim.server.url, keeping_server.url]
    yield found
    with LoopThread() as loop:
        client, servers = set_up(loop, found, tiny_moe_dir, "retract", engine=engine)
        push(servers, weights["first"], "default")
        servers.close()
        loop.call(client.close())


@pytest.fixture(scope="module")
def engine(victim):
    return victim.engine


@pytest.fixture(scope="module")
def weights(tiny_moe_dir):
    """The model's, and others that give every token another log-prob, and every position other
    keys and values.
    """
    first = load_file(tiny_moe_dir / "model.safetensors")
    noise = torch.Generator().manual_seed(0)

    def other() -> dict[str, torch.Tensor]:
        return {
            name: w + 0.3 * w.std() * torch.randn(w.shape, generator=noise) if w.dim() > 1 else w
            for name, w in first.items()
        }

    return {"first": first, "second": other(), "third": other()}


@pytest.fixture(scope="module")
def models(tiny_moe_dir, weights):
    from transformers import AutoModelForCausalLM

    loaded = {
        name: AutoModelForCausalLM.from_pretrained(tiny_moe_dir, dtype=torch.float32).eval()
        for name in weights
    }
    for name, model in loaded.items():
        model.load_state_dict(_stacked(weights[name], model.state_dict()))
    return loaded


def _stacked(tensors, wanted):
    """A checkpoint's tensors as the model holds them: newer transformers stack the experts."""
    found = dict(tensors)
    for name in wanted.keys() - tensors.keys():
        layer, kind = name.split(".experts.")
        each = [
            [
                tensors[f"{layer}.experts.{e}.{part}_proj.weight"]
                for part in kind.removesuffix("_proj").split("_")
            ]
            for e in range(wanted[name].shape[0])
        ]
        found[name] = torch.stack([torch.cat(parts) for parts in each])
    return {name: found[name] for name in wanted}


@pytest.fixture
def keeping(keeping_server):
    """(engine, address) of a server that keeps cached prefixes; tests/matrix has another."""
    return "sglang", keeping_server.url


PROMPT_TOKENS = {"sglang": (60, 1), "vllm": (300, 44)}
"""Of a prompt, and those computed where it is cached: SGLang the last, vLLM what is behind blocks
of 128 (on a CPU).
"""


def push(servers, tensors, version):
    """What push_weights does on the only rank of a job."""
    servers.use(servers.find())
    servers.start(version)
    servers.begin()
    servers.send(list(tensors.items()), version)
    servers.transport.deliver(version)
    servers.end(version)
    servers.expect(version)
    servers.resume()


@pytest.fixture
def loop():
    with LoopThread() as thread:
        yield thread


def set_up(loop, urls, tiny_moe_dir, mode, *, engine, keyed=True):
    vocab_size = json.loads((tiny_moe_dir / "config.json").read_text())["vocab_size"]
    client = RolloutClient(urls, vocab_size=vocab_size, timeout_s=120, keyed_cache=keyed, engine=engine)
    transport = DistributedTransport(client.control, loop, backend="gloo")
    return client, WeightServers(client, loop, transport, pause_mode=mode)


@pytest.mark.parametrize(
    ("mode", "count"),
    [
        ("retract", 2),
        ("in_place", 2),
        ("abort", 1),
        *in_matrix(("retract", 1), ("in_place", 1), ("abort", 2)),
    ],
)
def test_weights_when_changed_while_sampling_then_every_token_carries_the_version_that_sampled_it(
    mode, count, urls, engine, weights, models, loop, tiny_moe_dir, wait_until_sampling
):
    client, servers = set_up(loop, urls[:count], tiny_moe_dir, mode, engine=engine)
    # Versions of this case alone: prefixes that are cached under a name outlive the case, and no run
    # uses a name twice.
    versions = {f"{mode}-{count}-{push}": name for push, name in enumerate(WEIGHTS)}
    first, *later = versions
    try:
        push(servers, weights[versions[first]], first)
        sampling = loop.submit(client.generate(PROMPTS, LONG, samples_per_prompt=SAMPLES))
        for url in urls[:count]:
            wait_until_sampling(url)
        for version in later:
            wait_for_tokens(urls[:count])  # some of these weights
            assert not sampling.done()
            push(servers, weights[versions[version]], version)
        trajectories = sampling.result(120)
    finally:
        servers.close()
        loop.call(client.close())
    assert {t.server for t in trajectories} == set(urls[:count])
    expected = [(prompt, 250) for prompt in range(len(PROMPTS)) for _ in range(SAMPLES)]
    assert [(t.prompt_index, t.output_ids.numel()) for t in trajectories] == expected
    moved = shifted = compared = changed = 0
    for t in trajectories:
        starts = [(span.start, versions[span.version]) for span in t.weight_versions]
        seen = [span.version for span in t.weight_versions]
        assert seen and seen == sorted(set(seen)) and set(seen) <= set(versions)
        expected, settled = over_changes(models, t, starts, in_place=mode == "in_place")
        torch.testing.assert_close(t.rollout_logprobs[settled], expected[settled], atol=NEAR, rtol=0)
        compared += settled.sum().item()
        changed += len(starts) > 1
        # the same, had the weights changed a token earlier or later
        for shift in (-1, 1) if len(starts) > 1 else ():
            other = [starts[0], (starts[1][0] + shift, starts[1][1]), *starts[2:]]
            wrong, settled = over_changes(models, t, other, in_place=mode == "in_place")
            # Behind a token whose experts nearly tied no truth is known: a change there is seen by nothing.
            if settled[min(starts[1][0], other[1][0])]:
                shifted += 1
                moved += ((t.rollout_logprobs - wrong).abs() > NEAR)[settled].any().item()
    assert compared >= 0.8 * sum(t.output_ids.numel() for t in trajectories)
    assert changed >= 0.5 * len(trajectories)  # one server may be done before the other has begun
    assert moved >= 0.9 * shifted and shifted >= changed  # by chance one token may be as likely under both


@pytest.mark.parametrize("keyed", [True, False])
def test_in_place_when_prompts_of_before_come_again_then_their_keys_are_not_met_where_caches_are_keyed(
    keyed, keeping, weights, models, loop, tiny_moe_dir, wait_until_sampling
):
    engine, url = keeping
    client, servers = set_up(loop, [url], tiny_moe_dir, "in_place", engine=engine)
    length, behind = PROMPT_TOKENS[engine]
    # No other test's prompt begins with its first id, so nothing of it is cached.
    prompt, short = [75 - 7 * i % 71 for i in range(length)], SamplingParams(8, ignore_eos=True)
    plain, (other, _) = client, set_up(loop, [url], tiny_moe_dir, "in_place", engine=engine)
    if not keyed:
        plain, _ = set_up(loop, [url], tiny_moe_dir, "in_place", engine=engine, keyed=False)

    def ask():
        before = plain.counts()["prefilled"]
        made = [loop.call(plain.generate([prompt], short))[0] for _ in range(4)]
        return made, plain.counts()["prefilled"] - before

    try:
        push(servers, weights["first"], "1")
        _, prefilled = ask()
        assert prefilled == length + 3 * behind
        # So that the server would refuse to drop its cache. By another client: this one counts
        # whenever it ends.
        running = loop.submit(other.generate([[3, 1]], LONG))
        wait_until_sampling(url)
        push(servers, weights["second"], "2")
        assert not running.done()
        made, prefilled = ask()
        running.result(60)
    finally:
        servers.close()
        for each in {client, plain, other}:
            loop.call(each.close())
    far = []
    for t in made:
        assert [span.version for span in t.weight_versions] == ["2"]
        expected, settled = over_changes(models, t, [(0, "second")], in_place=False)
        far.append((t.rollout_logprobs - expected)[settled].abs().max().item())
    assert (prefilled, max(far) < NEAR) == ((length + 3 * behind, True) if keyed else (4 * behind, False))


def test_in_place_when_a_server_keeps_prefixes_then_refused_before_it_is_paused(
    loop, tiny_moe_dir, engine_server
):
    engine, server = engine_server
    client, servers = set_up(loop, [server.url], tiny_moe_dir, "in_place", engine=engine, keyed=False)
    try:
        servers.use(servers.find())
        servers.start("1")
        with pytest.raises(RolloutProtocolError, match=KEEPS_PREFIXES[engine]):
            servers.begin()
        (sample,) = loop.call(client.generate([[1, 2]], SamplingParams(2, ignore_eos=True)), timeout=60)
        assert sample.output_ids.numel() == 2
    finally:
        servers.close()
        loop.call(client.close())
