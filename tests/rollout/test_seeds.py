"""Every request has a seed: the same when it is sent once more, another one for everything
else that is drawn.
"""

import itertools

import pytest

from megatron_rl_corr.rollout import (
    DONE,
    Environment,
    Prompt,
    RolloutClient,
    SamplingParams,
    generate_episodes,
)
from megatron_rl_corr.rollout.seeds import Draw, evaluation_number, sampling_seed


def test_sampling_seed_when_any_number_differs_then_another_int64():
    places = list(itertools.product((1234, -5), (0, 1, 2**40, -1, -2), (0, 7), (0, 3), (0, 1, 32768)))
    seeds = [sampling_seed(*place) for place in places]
    assert len(set(seeds)) == len(places) == 120
    assert all(0 <= seed < 2**63 for seed in seeds) and max(seeds) > 2**62 > min(seeds)
    assert Draw(1234, 9, 2, turn=3).seed(17) == sampling_seed(1234, 9, 2, 3, 17)


def test_sampling_seed_when_the_run_is_repeated_then_the_same_number_on_every_machine():
    assert sampling_seed(1234, 0, 0, 0, 0) == 5415621781476965285


def test_evaluation_number_when_prompts_differ_then_so_do_they_and_none_is_a_groups():
    numbers = [evaluation_number(place) for place in range(100)]
    assert len(set(numbers)) == 100 and max(numbers) < 0


class Kept:
    """Handlers that keep the seed of each request, by its prompt ids."""

    def __init__(self, faulty):
        self.faulty, self.asked = faulty, []

    async def seed_of(self, request):
        body = await request.json()
        self.asked.append((tuple(body["input_ids"]), body["sampling_params"]["sampling_seed"]))
        return body

    async def good(self, request):
        return self.faulty.one_token(len((await self.seed_of(request))["input_ids"]))

    @property
    def seeds(self):
        return [seed for _, seed in self.asked]


def test_generate_when_groups_are_numbered_then_each_sample_has_the_seed_of_its_place(faulty):
    kept = Kept(faulty)

    async def scenario(client):
        await client.generate([[1], [2]], SamplingParams(1), samples_per_prompt=8, group_numbers=[40, 7])
        expected = {((1,), sampling_seed(99, 40, s, 0, 0)) for s in range(8)}
        assert set(kept.asked) == expected | {((2,), sampling_seed(99, 7, s, 0, 0)) for s in range(8)}

    faulty.run(scenario, kept.good, seed=99)


def test_generate_when_no_numbers_are_given_then_the_client_counts_and_the_same_prompt_gets_new_seeds(faulty):
    kept = Kept(faulty)

    async def scenario(client):
        for _ in range(2):
            await client.generate([[1], [1]], SamplingParams(1), samples_per_prompt=4)
        await client.generate([[1]] * 4, SamplingParams(1), samples_per_prompt=4, group_numbers=range(4))
        assert len(set(kept.seeds)) == 32

    faulty.run(scenario, kept.good)


@pytest.mark.parametrize("numbers", [[1], [1, 2, 3], [5, 5]])
def test_generate_when_the_numbers_do_not_tell_the_groups_apart_then_refused(faulty, numbers):
    async def scenario(client):
        with pytest.raises(ValueError, match="group_numbers must be 2 different numbers"):
            await client.generate([[1], [2]], SamplingParams(1), group_numbers=numbers)

    faulty.run(scenario, faulty.good)


@pytest.mark.parametrize("seed", [2**63, -(2**63) - 1])
def test_client_when_its_seed_has_more_than_64_bits_then_refused(seed):
    with pytest.raises(ValueError, match="seed must be an integer of 64 bits"):
        RolloutClient(["http://a:1"], vocab_size=10, seed=seed)


def test_generate_when_a_request_fails_then_it_is_repeated_with_its_seed(faulty):
    kept = Kept(faulty)

    async def broken(request):
        await kept.seed_of(request)
        raise ConnectionResetError

    async def scenario(client):
        await client.generate([[1]], SamplingParams(1), samples_per_prompt=2)
        assert client.counts()["retries"] >= 1
        assert len(kept.seeds) == 2 + client.counts()["retries"] and len(set(kept.seeds)) == 2

    faulty.run(scenario, broken, kept.good)


def test_generate_when_a_sample_is_continued_then_with_the_seed_of_the_tokens_it_has(faulty):
    kept = Kept(faulty)

    async def cut_by_two(request):
        body = await kept.seed_of(request)
        left = body["sampling_params"]["max_new_tokens"]
        tokens = [3, 4][:left]
        answer = faulty.answer(len(body["input_ids"]), tokens, {"type": "abort", "message": "Aborted"})
        return answer if left > 2 else faulty.answer(len(body["input_ids"]), tokens, {"type": "length"})

    async def scenario(client):
        await client.generate([[1]], SamplingParams(6), group_numbers=[3])
        assert kept.seeds == [sampling_seed(0, 3, 0, 0, tokens) for tokens in (0, 2, 4)]

    faulty.run(scenario, cut_by_two)


def test_episodes_when_they_have_turns_then_each_turn_has_a_seed_of_its_own(faulty):
    kept = Kept(faulty)

    class Twice(Environment):
        def __init__(self, prompt):
            self.left = 2

        def step(self, output_ids, finish_reason):
            self.left -= 1
            return [7] if self.left else DONE

    async def stops(request):
        body = await kept.seed_of(request)
        return faulty.answer(len(body["input_ids"]), [5], {"type": "stop", "matched": 5})

    async def scenario(client):
        prompts = [Prompt(0, [1], {}), Prompt(0, [1], {})]
        await generate_episodes(
            client,
            prompts,
            SamplingParams(8),
            environment=Twice,
            max_turns=3,
            samples_per_prompt=2,
            group_numbers=[11, 12],
        )
        expected = [sampling_seed(0, g, s, t, 0) for g in (11, 12) for s in (0, 1) for t in (0, 1)]
        assert sorted(kept.seeds) == sorted(expected) and len(set(expected)) == 8

    faulty.run(scenario, stops)
