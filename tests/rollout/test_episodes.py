"""Episodes of several turns with a client that answers from a script: what is asked, joined,
bounded and refused.
"""

import asyncio
import json
import sys
import threading

import numpy as np
import pytest
import torch
from aiohttp import web

from megatron_rl_corr.data.worker_pool import UserCalls
from megatron_rl_corr.rollout import (
    DONE,
    Environment,
    Prompt,
    SampleFailure,
    SamplingParams,
    Support,
    Trajectory,
    VersionSpan,
    generate_episodes,
    load_environment,
)
from megatron_rl_corr.rollout.turns import Turns

NAN = float("nan")
PROMPTS = [Prompt(7, [1, 2], {"answer": 3})]


class Script:
    """Answers its requests in order with (output_ids, finish reason), each from the next
    version of the weights.
    """

    vocab_size, seed = 100, 0

    def __init__(self, *answers):
        self.answers, self.asked, self.draws = list(answers), [], []

    def numbered(self, count, given):
        return given or list(range(count))

    async def turn(self, prompt_ids, sampling, draw, **_):
        self.draws.append(draw)
        self.asked.append((prompt_ids.tolist(), sampling.max_new_tokens, sampling.stop_token_ids))
        output_ids, reason = self.answers.pop(0)
        await asyncio.sleep(0)
        return answer(prompt_ids.tolist(), output_ids, reason, version=f"v{len(self.asked)}")


def answer(prompt_ids, output_ids, reason="stop", version="v1", **options):
    """Log-probs are -1 / id."""
    return Trajectory(
        prompt_index=0,
        sample_index=0,
        prompt_ids=torch.tensor(prompt_ids),
        output_ids=torch.tensor(output_ids, dtype=torch.int64),
        rollout_logprobs=-1 / torch.tensor(output_ids, dtype=torch.float32),
        finish_reason=reason,
        weight_versions=(VersionSpan(version, 0, len(output_ids)),),
        cached_tokens=0,
        server="http://a:1",
        **options,
    )


class Says(Environment):
    """Says what it was given, one after the other, and keeps what it saw."""

    def __init__(self, *replies, reward=None):
        self.replies, self.seen, self.closed, self.scored = list(replies), [], 0, reward

    def step(self, output_ids, finish_reason):
        self.seen.append((output_ids, finish_reason))
        return self.replies.pop(0)

    def reward(self):
        return self.scored

    def close(self):
        self.closed += 1


def episode(client, environment, *, max_new_tokens=20, max_turns=5, **options):
    sampling = SamplingParams(max_new_tokens, stop_token_ids=(9,))
    [trajectory] = asyncio.run(
        generate_episodes(
            client, PROMPTS, sampling, environment=lambda prompt: environment, max_turns=max_turns, **options
        )
    )
    assert environment.closed == 1
    return trajectory


def test_episode_when_the_environment_answers_twice_then_one_trajectory_of_three_turns():
    client = Script(([10, 9], "stop"), ([20, 25, 9], "stop"), ([40], "stop"))
    environment = Says([50, 51], np.array([60]), DONE, reward=0.5)
    whole = episode(client, environment)
    # Each request is everything so far; the budget of 20 covers what was said: 20, 20 - 4, 20 - 8.
    assert client.asked == [
        ([1, 2], 20, (9,)),
        ([1, 2, 10, 9, 50, 51], 16, (9,)),
        ([1, 2, 10, 9, 50, 51, 20, 25, 9, 60], 12, (9,)),
    ]
    assert environment.seen == [([10, 9], "stop"), ([20, 25, 9], "stop"), ([40], "stop")]
    assert whole.prompt_ids.tolist() == [1, 2] and whole.output_ids.tolist() == [
        10,
        9,
        50,
        51,
        20,
        25,
        9,
        60,
        40,
    ]
    assert whole.turn_ids.tolist() == [0, 0, -1, -1, 1, 1, 1, -1, 2]
    expected = [-1 / 10, -1 / 9, NAN, NAN, -1 / 20, -1 / 25, -1 / 9, NAN, -1 / 40]
    assert whole.rollout_logprobs.tolist() == pytest.approx(expected, nan_ok=True)
    # What was said belongs to the span before it: the spans partition the response.
    assert whole.weight_versions == (
        VersionSpan("v1", 0, 4),
        VersionSpan("v2", 4, 8),
        VersionSpan("v3", 8, 9),
    )
    assert whole.sampled_by("v2").tolist() == [False] * 4 + [True] * 3 + [False] * 2
    assert whole.finish_reason == "stop" and whole.environment_reward == 0.5


@pytest.mark.parametrize("stop", [["</call>"], "</call>"])
def test_episode_when_a_text_ends_its_turns_then_each_request_has_it_and_a_bare_text_is_refused(stop):
    class Asked(Script):
        async def turn(self, prompt_ids, sampling, draw, **how):
            stops.append(sampling.stop)
            return await super().turn(prompt_ids, sampling, draw, **how)

    stops, environment = [], Says([50], DONE)
    environment.stop = stop
    client, sampling = Asked(([10], "stop"), ([11], "stop")), SamplingParams(20, stop=("x",))
    run = generate_episodes(client, PROMPTS, sampling, environment=lambda prompt: environment, max_turns=5)
    if isinstance(stop, str):  # or each of its letters would end a turn
        with pytest.raises(SampleFailure, match="stop must be a list of texts, got '</call>'"):
            asyncio.run(run)
        assert stops == [] and environment.closed == 1
    else:
        asyncio.run(run)
        assert stops == [("x", "</call>")] * 2


def test_episode_when_every_method_is_async_then_the_same():
    class Waits(Environment):
        stop_token_ids = (33,)
        closed = 0

        async def step(self, output_ids, finish_reason):
            await asyncio.sleep(0.001)
            return [50] if output_ids == [10] else DONE

        async def reward(self):
            await asyncio.sleep(0.001)
            return 2

        async def close(self):
            await asyncio.sleep(0.001)
            self.closed += 1

    made = []

    async def factory(prompt):
        made.append(Waits())
        return made[-1]

    client = Script(([10], "stop"), ([11], "stop"))
    [whole] = asyncio.run(
        generate_episodes(client, PROMPTS, SamplingParams(4), environment=factory, max_turns=3)
    )
    assert whole.turn_ids.tolist() == [0, -1, 1] and whole.environment_reward == 2.0
    assert [asked[2] for asked in client.asked] == [(33,), (33,)] and made[0].closed == 1


@pytest.mark.parametrize(
    "answers, replies, bounds, expected, reason",
    [
        # The last turn that is allowed: the environment sees it, and what it says is dropped.
        ([([10], "stop"), ([11], "stop")], [[50], [51]], {"max_turns": 2}, [10, 50, 11], "length"),
        # It says DONE to the last one: the episode ended by itself.
        ([([10], "stop"), ([11], "stop")], [[50], DONE], {"max_turns": 2}, [10, 50, 11], "stop"),
        # 1 + 3 of 4 tokens: none is left to sample.
        ([([10], "stop")], [[50, 51, 52]], {"max_new_tokens": 4}, [10], "length"),
        # 1 + 2 of 4: one is left.
        (
            [([10], "stop"), ([11], "length")],
            [[50, 51], [52]],
            {"max_new_tokens": 4},
            [10, 50, 51, 11],
            "length",
        ),
        # A turn cut in the middle ends the episode, whatever is said.
        ([([10], "abort")], [[50]], {}, [10], "abort"),
        ([([10, 12], "length")], [DONE], {"max_new_tokens": 2}, [10, 12], "length"),
        # An abort before a turn's first token: a response ends with a sampled token.
        ([([10], "stop"), ([], "abort")], [[50], [51]], {}, [10], "abort"),
        ([([], "abort")], [[50]], {}, [], "abort"),
    ],
)
def test_episode_when_something_ends_it_then_the_last_token_is_sampled_and_the_reason_told(
    answers, replies, bounds, expected, reason
):
    client, environment = Script(*answers), Says(*replies, reward=1.0)
    whole = episode(client, environment, **bounds)
    assert whole.output_ids.tolist() == expected and whole.finish_reason == reason
    assert not whole.output_ids.numel() or whole.turn_ids[-1] >= 0
    assert whole.weight_versions[-1].end == len(expected) and whole.environment_reward == 1.0
    assert client.answers == [] and environment.replies == []  # it was asked about every turn


@pytest.mark.parametrize(
    "reply, named",
    [
        (
            [50, 100],
            "token id 100 at position 1 in turn 0 of prompt 0 sample 0; ids must be in [0, 100), the model's",
        ),
        ([-1], "token id -1 at position 0"),
        (
            None,
            "must return DONE or a non-empty list of token ids, got 'None' in turn 0 of prompt 0 sample 0",
        ),
        ([], "must return DONE or a non-empty list of token ids, got '[]'"),
        (np.array([], dtype=np.int64), "must return DONE or a non-empty list of token ids, got '[]'"),
        ("text", "must return DONE or a non-empty list of token ids, got 'text'"),
        ([1.5], "must return DONE or a non-empty list of token ids, got '[1.5]'"),
        ([[1], [2, 3]], "must return DONE or a non-empty list of token ids"),
    ],
)
def test_step_when_it_returns_no_ids_of_the_vocabulary_then_refused_and_nothing_sent(reply, named):
    client, environment = Script(([10], "stop")), Says(reply)
    with pytest.raises(SampleFailure) as error:
        episode(client, environment)
    assert error.value.cause == "environment"
    assert named in str(error.value) and len(client.asked) == 1 and environment.closed == 1


@pytest.mark.parametrize("value", [NAN, "1", 1e39])
def test_reward_when_it_is_no_finite_number_then_refused_by_name(value):
    with pytest.raises(SampleFailure, match=r"the environment's reward\(\) must return a number"):
        episode(Script(([10], "stop")), Says(DONE, reward=value))


def test_environment_when_it_raises_then_its_own_error_names_the_sample_and_the_others_are_cancelled():
    closed = []

    class Breaks(Environment):
        def __init__(self, prompt):
            self.prompt = prompt

        async def step(self, output_ids, finish_reason):
            if self.prompt.index == 5:
                raise RuntimeError("the sandbox is gone")
            await asyncio.sleep(60)

        def close(self):
            closed.append(self.prompt.index)

    prompts = [Prompt(7, [1]), Prompt(5, [2]), Prompt(6, [3])]
    client = Script(*[([10], "stop")] * 3)
    with pytest.raises(SampleFailure, match="in step\n.*RuntimeError.*sandbox is gone") as error:
        asyncio.run(generate_episodes(client, prompts, SamplingParams(9), environment=Breaks, max_turns=2))
    assert error.value.cause == "environment" and isinstance(error.value.__cause__, RuntimeError)
    assert error.value.__notes__ == ["it was turn 0 of prompt 1 sample 0 (row 5 of the data set)"]
    assert sorted(closed) == [5, 6, 7]


def test_environment_when_it_changes_its_prompt_then_other_samples_and_later_ones_have_the_data_sets():
    class Collects(Environment):
        def __init__(self, prompt):
            self.ids, self.left = prompt.input_ids, prompt.metadata["calls"]

        def step(self, output_ids, finish_reason):
            self.ids += output_ids
            self.left.pop()
            return DONE

    prompt = Prompt(4, [1, 2], {"calls": [0]})
    for _ in range(2):
        client = Script(*[([10, 11], "stop")] * 3)
        trajectories = asyncio.run(
            generate_episodes(
                client, [prompt], SamplingParams(9), environment=Collects, max_turns=2, samples_per_prompt=3
            )
        )
        assert [one.prompt_ids.tolist() for one in trajectories] == [[1, 2]] * 3
    assert prompt == Prompt(4, [1, 2], {"calls": [0]})


class Foreign(BaseException):
    """As libraries raise for a limit of time."""


def foreign(_):
    raise Foreign


@pytest.mark.parametrize(
    ("wrong", "said", "kind"),
    [
        (sys.exit, "it called exit\\(3\\)", "plain"),
        (sys.exit, "it called exit\\(3\\)", "async"),
        (lambda _: next(iter(())), "StopIteration", "plain"),
        (lambda _: next(iter(())), "StopIteration", "async"),
        (foreign, "it raised Foreign", "plain"),
        (foreign, "it raised Foreign", "async"),
        # a plain one has no loop to wait on
        (lambda _: cancelled(), "something that was cancelled", "async"),
    ],
)
@pytest.mark.parametrize("method", ["step", "reward", "close"])
def test_environment_when_a_tool_exits_or_drops_its_call_then_an_error_and_no_endless_wait(
    method, kind, wrong, said
):
    async def answer(name, otherwise):
        given = wrong(3) if method == name else otherwise
        return await given if isinstance(given, asyncio.Future) else given

    class Breaks(Environment):
        def step(self, output_ids, finish_reason):
            return answer("step", DONE)

        def reward(self):
            return answer("reward", 1.0)

        def close(self):
            return answer("close", None)

    class BreaksPlainly(Environment):
        def step(self, output_ids, finish_reason):
            return wrong(3) if method == "step" else DONE

        def reward(self):
            return wrong(3) if method == "reward" else 1.0

        def close(self):
            return wrong(3) if method == "close" else None

    sampling, client = SamplingParams(4), Script(([10], "stop"))
    made = Breaks if kind == "async" else BreaksPlainly
    episodes = generate_episodes(client, PROMPTS, sampling, environment=lambda _: made(), max_turns=2)
    with pytest.raises(SampleFailure, match=said) as error:
        asyncio.run(asyncio.wait_for(episodes, 20))
    assert "prompt 0 sample 0" in "".join(error.value.__notes__)


def test_environment_when_a_plain_method_takes_long_then_the_loop_goes_on_and_its_limit_ends_the_sample():
    """One thread for all, as if the methods were the only ones; one that hangs gets no other
    stuck behind it.
    """
    threads, release = set(), threading.Event()

    class Slow(Environment):
        def __init__(self, prompt):
            self.prompt = prompt
            threads.add(threading.current_thread().name)

        def step(self, output_ids, finish_reason):
            threads.add(threading.current_thread().name)
            assert self.prompt.index != 5 or release.wait(60)
            return DONE

    async def scenario():
        calls = UserCalls(0.8)
        how = {"environment": Slow, "max_turns": 2, "calls": calls}
        with pytest.raises(
            SampleFailure, match="turn 0 of prompt 0 sample 0: it took longer than 0.8 s"
        ) as error:
            await generate_episodes(Script(([10], "stop")), [Prompt(5, [1])], SamplingParams(9), **how)
        assert error.value.cause == "environment_timeout" and not release.is_set()  # the step has not ended
        script = Script(*[([10], "stop")] * 3)
        assert (
            len(await generate_episodes(script, [Prompt(n, [1]) for n in range(3)], SamplingParams(9), **how))
            == 3
        )
        release.set()
        await calls.close()

    asyncio.run(asyncio.wait_for(scenario(), 20))
    assert threads == {"rollout-environment"}


def cancelled():
    future = asyncio.get_running_loop().create_future()
    future.cancel()
    return future


def test_request_when_the_server_refuses_a_later_turn_then_the_error_says_which_turn_of_which_sample(faulty):
    async def second_refused(request):
        body = await request.json()
        if len(body["input_ids"]) == 1:
            answer = json.loads(faulty.one_token(1).text)
            answer["meta_info"]["finish_reason"] = {"type": "stop", "matched": 5}
            return web.json_response(answer)
        return web.Response(status=400, text="no")

    async def scenario(client):
        with pytest.raises(SampleFailure) as error:
            await generate_episodes(
                client,
                [Prompt(3, [1])],
                SamplingParams(9),
                environment=lambda prompt: Says([6], DONE),
                max_turns=2,
            )
        assert error.value.__notes__[-1] == "it was turn 1 of prompt 0 sample 0 (row 3 of the data set)"

    faulty.run(scenario, second_refused)


def test_load_environment_when_there_is_none_then_the_error_names_the_flag(tmp_path):
    (tmp_path / "tools.py").write_text("class Tools:\n    pass\n")
    assert load_environment(f"{tmp_path}/tools.py:Tools").__name__ == "Tools"
    with pytest.raises(ValueError, match=r"^`environment`: .*tools.py has no 'Tool'; it has Tools"):
        load_environment(f"{tmp_path}/tools.py:Tool")


@pytest.mark.parametrize(
    "options, named",
    [
        ({"max_turns": 0}, "max_turns must be at least 1, got 0"),
        ({"samples_per_prompt": 0}, "samples_per_prompt must be at least 1, got 0"),
        ({"prompts": [Prompt(0, [1]), Prompt(1, [100])]}, "prompt 1 has token id 100 at position 0"),
        ({"sampling": SamplingParams(4, ignore_eos=True)}, "ignore_eos leaves no token for a second turn"),
        (
            {"environment": lambda prompt: object()},
            "must be an object of a subclass of megatron_rl_corr.rollout.Envir",
        ),
    ],
)
def test_episodes_when_they_cannot_be_run_then_refused_before_anything_is_sent(options, named):
    client = Script()
    values = {
        "prompts": PROMPTS,
        "sampling": SamplingParams(4),
        "environment": lambda prompt: Says(),
        "max_turns": 2,
    }
    values |= options
    with pytest.raises((ValueError, SampleFailure), match=named.replace("[", r"\[")):
        asyncio.run(generate_episodes(client, values.pop("prompts"), values.pop("sampling"), **values))
    assert client.asked == []


def test_episodes_when_several_of_a_prompt_then_prompt_major_each_with_its_own_environment_and_progress():
    class Once(Environment):
        def __init__(self, prompt):
            self.prompt, self.turns = prompt, 0

        def step(self, output_ids, finish_reason):
            self.turns += 1
            return DONE if self.turns == 2 else [50 + self.prompt.index]

        def reward(self):
            return self.turns

    told = []
    client = Script(*[([10], "stop")] * 12)
    trajectories = asyncio.run(
        generate_episodes(
            client,
            [Prompt(0, [1]), Prompt(1, [2, 2])],
            SamplingParams(9),
            environment=Once,
            max_turns=2,
            samples_per_prompt=3,
            on_progress=lambda done, total, rate: told.append((done, total, rate > 0)),
        )
    )
    assert [(t.prompt_index, t.sample_index) for t in trajectories] == [
        (p, s) for p in range(2) for s in range(3)
    ]
    assert [t.output_ids.tolist() for t in trajectories] == [[10, 50, 10]] * 3 + [[10, 51, 10]] * 3
    assert [t.environment_reward for t in trajectories] == [2.0] * 6
    assert told == [(i + 1, 6, True) for i in range(6)]


def test_sample_when_it_has_ended_then_told_whole_and_what_that_raises_is_raised():
    told = []

    async def on_sample(trajectory):
        await asyncio.sleep(0)
        told.append((trajectory.output_ids.tolist(), trajectory.environment_reward, trajectory.sample_index))
        if len(told) == 2:
            raise OSError("no more")

    episode(Script(([10], "stop"), ([11], "stop")), Says([50], DONE), on_sample=on_sample)
    # All behind the prompt, what the environment said too.
    assert told == [([10, 50, 11], None, 0)]
    with pytest.raises(OSError, match="no more"):
        episode(Script(([10], "stop")), Says(DONE, reward=0.25), on_sample=on_sample)
    assert told[1:] == [([10], 0.25, 0)]


def support(*sets):
    return Support(
        torch.tensor([i for ids in sets for i in ids], dtype=torch.int32),
        torch.tensor([len(ids) for ids in sets], dtype=torch.int32),
    )


def routes(tokens, of):
    """[tokens - 1, 1, 1]: 10 times the pass, and the position."""
    return (torch.arange(tokens - 1) + of * 10).to(torch.int16).view(-1, 1, 1)


def turned(first, reply, later):
    turns = Turns(first.prompt_ids)
    turns.add(first)
    turns.say(torch.tensor(reply))
    turns.add(later)
    return turns.whole(later.finish_reason)


@pytest.mark.parametrize("known", [0, 3])
def test_turns_when_sets_and_routes_are_known_then_those_of_the_pass_that_was_first_to_have_them(known):
    first = answer([1, 2], [3, 4], support=support([3, 5], [4]), routed_experts=routes(4, 1))
    later = answer(
        [1, 2, 3, 4, 50, 51],
        [6],
        "length",
        "v1",
        support=support([7, 6]),
        routed_experts=routes(7, 2)[known:],
        routes_from=known,
    )
    whole = turned(first, [50, 51], later)
    assert whole.support.ids.tolist() == [3, 5, 4, 50, 51, 7, 6]
    assert whole.support.lengths.tolist() == [2, 1, 1, 1, 2]
    # Three rows of the first pass; the last sampled token and what was said went through the
    # second one alone.
    assert whole.routed_experts.flatten().tolist() == [10, 11, 12, 23, 24, 25]
    assert whole.turn_ids.tolist() == [0, 0, -1, -1, 1] and whole.finish_reason == "length"
    assert whole.weight_versions == (VersionSpan("v1", 0, 5),)


def test_turns_when_an_answer_is_to_fewer_tokens_then_refused():
    with pytest.raises(ValueError, match="prompt of 4 tokens is not the 5 tokens before it"):
        turned(answer([1, 2], [3, 4]), [50], answer([1, 2, 3, 4], [6]))


def test_turns_when_the_last_reply_has_no_answer_then_it_is_left_out():
    turns = Turns([1, 2])
    turns.add(answer([1, 2], [3, 4]))
    before = turns.ids
    turns.say(torch.tensor([50] * 9))
    assert before.tolist() == [1, 2, 3, 4] and turns.ids.tolist() == [1, 2, 3, 4, *[50] * 9]
    assert turns.whole("length").output_ids.tolist() == [3, 4]


class Counts(Environment):
    """Says something after each turn but the last of four."""

    def __init__(self, prompt):
        self.turns = 0

    async def step(self, output_ids, finish_reason):
        await asyncio.sleep(0.001 * (self.turns % 3))  # so that episodes overtake each other
        self.turns += 1
        return [8] if self.turns < 4 else DONE


def test_episodes_when_there_are_two_servers_then_the_turns_of_each_stay_at_the_one_it_began_at(faulty):
    asked = {}

    def serving(name):
        async def handle(request):
            body = await request.json()
            asked.setdefault(name, []).append(tuple(body["input_ids"]))
            return faulty.answer(len(body["input_ids"]), [5], {"type": "stop", "matched": 5})

        return handle

    async def scenario(client):
        prompts = [Prompt(0, [1 + i, 2]) for i in range(6)]
        episodes = await generate_episodes(
            client, prompts, SamplingParams(16), environment=Counts, max_turns=5
        )
        assert {episode.server for episode in episodes} == set(client.base_urls)

    faulty.run(scenario, serving("a"), serving("b"))
    # Every prompt of a turn is the one before and two tokens: at one server all four, at the other none.
    begun = {name: {ids[:2] for ids in prompts} for name, prompts in asked.items()}
    assert len(begun["a"]) + len(begun["b"]) == 6 and not begun["a"] & begun["b"]
    assert len(asked["a"]) == 4 * len(begun["a"]) and len(asked["b"]) == 4 * len(begun["b"])


@pytest.mark.parametrize("keyed", [False, True])
def test_requests_when_caches_are_keyed_then_each_says_for_which_weights_it_is(faulty, keyed):
    keys, version = [], ["run-1"]

    async def handle(request):
        body = await request.json()
        keys.append(body.get("extra_key"))
        return faulty.one_token(len(body["input_ids"]), version=version[0])

    async def scenario(client):
        await client.generate([[1]], SamplingParams(1))
        for version[0] in ("run-1", "run-2"):
            await client.expect_version(version[0])
            await client.generate([[1]], SamplingParams(1))

    faulty.run(scenario, handle, keyed_cache=keyed)
    assert keys == ([None, "weights:run-1", "weights:run-2"] if keyed else [None] * 3)
