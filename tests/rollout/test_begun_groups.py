"""Groups that are being sampled at a checkpoint: every bit of them comes back, episodes go on behind their
turns, and nothing is asked for twice.
"""

import asyncio
import json
from dataclasses import replace

import pytest
import torch

from megatron_rl_corr.data.rewards import Score
from megatron_rl_corr.engines.trajectory import TopLogprobs
from megatron_rl_corr.events import EVENTS
from megatron_rl_corr.files import sha256_of_json
from megatron_rl_corr.rollout import (
    DONE,
    Environment,
    Prompt,
    PromptDataset,
    SampleFailure,
    SamplingParams,
    Support,
    Trajectory,
    VersionSpan,
    generate_episodes,
)
from megatron_rl_corr.rollout.begun_groups import BegunGroup, EpisodeSoFar, FinishedSample
from megatron_rl_corr.rollout.cursor import Cursor, GroupNumbers
from megatron_rl_corr.rollout.failures import FailedPrompts, Failures
from megatron_rl_corr.rollout.group_sampler import GroupSampler
from megatron_rl_corr.rollout.turns import Turns
from megatron_rl_corr.rollout.waiting_groups import (
    FOLDER,
    SavedEpisode,
    SavedSample,
    WaitingList,
    read_begun,
    size_of,
)
from tests.rollout.test_sample_file import full, response
from tests.rollout.test_waiting_groups import bits, group_of, read_list, write

PROMPT = [1, 2]
TURNS = [[10, 9], [20, 25, 9], [40]]
REPLIES = [[50, 51], [60], [61, 62]]


def answer(prompt_ids, turn):
    """A turn with all that it may have, of another version, server and engine each."""
    ids, known = TURNS[turn], len(prompt_ids)
    lengths = torch.arange(len(ids), dtype=torch.int32) + 1
    return Trajectory(
        prompt_index=0,
        sample_index=1,
        prompt_ids=torch.tensor(prompt_ids),
        output_ids=torch.tensor(ids),
        rollout_logprobs=-1 / torch.tensor(ids, dtype=torch.float32),
        finish_reason="stop",
        weight_versions=(VersionSpan(f"5f2c91ab-{3 + turn // 2}", 0, len(ids)),),
        cached_tokens=turn,
        server=f"http://{turn}",
        engine="vllm" if turn == 1 else "sglang",
        support=Support(torch.arange(int(lengths.sum()), dtype=torch.int32) + turn, lengths),
        top_logprobs=TopLogprobs(
            torch.full((len(ids), 2), turn, dtype=torch.int32), torch.full((len(ids), 2), -0.5 - turn)
        ),
        routed_experts=torch.arange((known + len(ids) - 1) * 2)
        .to(torch.int16)
        .view(-1, 2, 1)[routes_from(turn) :],
        routes_from=routes_from(turn),
    )


def routes_from(turn):
    """All tokens but the last one of the turn before have theirs."""
    return 0 if turn == 0 else len(so_far(turn)) - len(REPLIES[turn - 1]) - 1


def so_far(turn):
    """The prompt of a turn."""
    ids = [*PROMPT]
    for said, reply in zip(TURNS[:turn], REPLIES[:turn], strict=True):
        ids += [*said, *reply]
    return ids


def played(count, turns=None):
    """So many turns, behind others."""
    turns = Turns(PROMPT) if turns is None else turns
    for turn in range(turns.count, count):
        if turn:
            turns.say(torch.tensor(REPLIES[turn - 1]))
        assert turns.ids.tolist() == so_far(turn)
        turns.add(answer(turns.ids.tolist(), turn))
    return turns


@pytest.mark.parametrize("cuts", [(1,), (2,), (3,), (1, 2), (1, 2, 3)])
def test_turns_when_resumed_from_what_was_joined_then_the_same_episode(cuts):
    turns = Turns(PROMPT)
    for cut in cuts:
        turns = played(cut, turns)
        if cut < 3:  # the reply that no turn has followed yet is not joined
            turns.say(torch.tensor(REPLIES[cut - 1]))
        joined = turns.whole("abort")
        turns = Turns.resumed(joined)
        assert turns.count == cut and turns.ids.tolist() == [*PROMPT, *joined.output_ids.tolist()]
        assert turns.server == f"http://{cut - 1}" and turns.routes_known == turns.ids.numel() - 1
        assert bits(turns.whole("abort")) == bits(joined)
    whole = played(3, turns)
    assert whole.said() == [TURNS[0], REPLIES[0], TURNS[1], REPLIES[1], TURNS[2]]
    assert bits(whole.whole("stop")) == bits(played(3).whole("stop"))


def test_turns_when_copied_then_what_follows_is_not_in_the_copy():
    turns = played(1)
    copy = turns.copied()
    before = bits(copy.whole("abort"))
    played(3, turns)
    assert bits(copy.whole("abort")) == before and turns.count == 3 and copy.count == 1


def begun_of(number):
    """All that may be of a group: samples 5 and 9 (two branches) are done and scored, the reward of 6 has
    failed, 7 has none yet, and 1 and 2 are episodes.
    """

    def at(index, **options):
        return replace(full(6, number).trajectory, sample_index=index, **options)

    group = BegunGroup(number)
    group.finish(5, [at(5, branch=0)])
    group.finish(9, [at(9, branch=0), at(9, branch=1, environment_reward=-0.7)], latest=1)
    group.finish(6, [replace(response(3, number), sample_index=6)])
    group.finish(7, [at(7, branch=0)])
    group.scores = {5: Score(0.1, {"right": 0.1, "odd": float("nan")}), 9: Score(-0.0), 6: None}
    group.episodes = {1: EpisodeSoFar(played(2), "stop", [7, 8]), 2: EpisodeSoFar(played(1), "length", None)}
    return group


def of_two(group):
    """The same with its episodes joined, as they are in a file."""
    joined = {
        index: (bits(one.turns.whole("abort")), one.finish_reason, one.reply)
        for index, one in group.episodes.items()
    }
    return bits(group.samples), bits(group.scores), joined, bits(group.whole)


def test_group_when_written_and_read_then_bit_for_bit(tmp_path):
    folder, group = tmp_path / FOLDER, begun_of(4)
    written = write(folder, [group_of(12)], begun=[group])
    listed = read_list(folder)
    assert (written.groups, written.begun, written.begun_beyond) == ((12,), listed.begun, ())
    [saved] = listed.begun
    assert saved.samples == (SavedSample(5), SavedSample(6, failed=True), SavedSample(7), SavedSample(9, 1))
    assert saved.episodes == (SavedEpisode(1, 2, "stop", [7, 8]), SavedEpisode(2, 1, "length", None))
    assert not saved.whole
    found = read_begun(folder, saved)
    # an episode's turns are of their sample
    for index, one in group.episodes.items():
        one.turns = Turns.resumed(replace(one.turns.whole("abort"), sample_index=index))
    assert of_two(found) == of_two(group)
    assert BegunGroup(4, episodes={1: EpisodeSoFar(played(3), "stop")}).oldest_version == 3


def test_whole_group_when_a_filter_was_judging_it_then_it_comes_back(tmp_path):
    folder, whole = tmp_path / FOLDER, group_of(3)
    write(folder, [], begun=[BegunGroup(3, whole=whole)])
    [saved] = read_list(folder).begun
    assert saved.whole and [one.index for one in saved.samples] == [4]
    assert bits(read_begun(folder, saved).whole) == bits(whole)


def test_groups_when_above_the_bound_then_those_that_wait_go_before(tmp_path):
    waits, first, second = group_of(1), begun_of(2), begun_of(3)
    bound = size_of(waits.trajectories) + size_of(first.trajectories) + size_of(second.trajectories) - 1
    written = write(tmp_path / FOLDER, [waits], begun=[first, second], max_bytes=bound)
    assert written.groups == (1,) and [one.file.number for one in written.begun] == [2]
    assert (written.beyond, written.begun_beyond) == ((), (3,))
    written = write(tmp_path / FOLDER, [waits], begun=[first], max_bytes=1)
    assert (written.groups, written.begun, written.beyond, written.begun_beyond) == ((), (), (1,), (2,))


def test_group_when_the_list_says_something_else_then_refused(tmp_path):
    folder = tmp_path / FOLDER
    write(folder, [], begun=[begun_of(4)])
    [saved] = read_list(folder).begun
    with pytest.raises(ValueError, match="other samples than the list"):
        read_begun(folder, replace(saved, samples=saved.samples[1:]))
    turns = (replace(saved.episodes[0], turns=3), saved.episodes[1])
    with pytest.raises(ValueError, match="has 2 turns of sample 1, not 3"):
        read_begun(folder, replace(saved, episodes=turns))


def test_list_when_an_older_version_wrote_it_then_it_has_no_begun_groups(tmp_path):
    folder = tmp_path / FOLDER
    write(folder, [group_of(7)])
    values = json.loads((folder / "replica0.json").read_text())
    del values["begun"], values["sha256"]
    listed = WaitingList.parse(json.dumps(values | {"sha256": sha256_of_json(values)}))
    assert listed.waiting == (7,) and listed.begun == ()


class Script:
    """Answers turn t with TURNS[t], and notes which turns it was asked for."""

    vocab_size, seed = 100, 0

    def __init__(self):
        self.asked, self.gates = [], {}

    def numbered(self, count, given):
        return given or list(range(count))

    async def turn(self, prompt_ids, sampling, draw, *, prefer=None, routes_from=0):
        self.asked.append((draw.turn, sampling.max_new_tokens))
        if draw.turn in self.gates:
            await self.gates[draw.turn].wait()
        assert prompt_ids.tolist() == so_far(draw.turn)
        return replace(answer(prompt_ids.tolist(), draw.turn), sample_index=draw.sample)


class Says(Environment):
    """Says REPLIES, or what is there in their place."""

    replayable = True

    def __init__(self, replies=(*REPLIES[:2], DONE)):
        self.replies, self.seen, self.closed = list(replies), [], False

    def step(self, output_ids, finish_reason):
        self.seen.append((output_ids, finish_reason))
        reply = self.replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return reply

    def reward(self):
        return float(len(self.seen))

    def close(self):
        self.closed = True


def run(client, begun, *environments, max_turns=4):
    """The episode of group 7, with these environments, one after the other."""
    left = list(environments)
    [trajectory] = asyncio.run(
        generate_episodes(
            client,
            [Prompt(7, PROMPT)],
            SamplingParams(20),
            environment=lambda prompt: left.pop(0),
            max_turns=max_turns,
            group_numbers=[7],
            begun={7: begun},
        )
    )
    assert left == [] and all(one.closed for one in environments)
    return trajectory


def saved_at(turn, reply):
    """What was sampled of the group when its episode had so many turns, in another process."""
    if turn == 0:
        return BegunGroup(7)
    joined = replace(played(turn).whole("abort"), sample_index=0)
    return BegunGroup(7, episodes={0: EpisodeSoFar(Turns.resumed(joined), "stop", reply)})


@pytest.fixture
def told(monkeypatch):
    found = []
    monkeypatch.setattr(EVENTS, "tell", lambda kind, why, **facts: found.append((kind, why, facts)))
    return found


@pytest.mark.parametrize(("turn", "reply"), [(1, None), (1, REPLIES[0]), (2, None), (2, REPLIES[1]), (3, [])])
def test_episode_when_resumed_then_later_turns_alone_are_asked_for_and_it_is_the_same(told, turn, reply):
    first, client, environment = Script(), Script(), Says()
    whole = run(first, BegunGroup(7), Says())
    begun = saved_at(turn, reply)
    again = run(client, begun, environment)
    assert first.asked == [(0, 20), (1, 16), (2, 12)]
    assert client.asked == first.asked[turn:]
    assert environment.seen == [(ids, "stop") for ids in TURNS]  # it was given all turns
    assert bits(again) == bits(whole) and again.environment_reward == 3.0
    assert told == [] and begun.episodes == {} and bits(begun.samples) == bits({0: FinishedSample([whole])})


def test_episode_when_its_last_turn_was_cut_then_the_environment_gets_that_and_it_ends():
    joined = replace(played(2).whole("abort"), sample_index=0)
    begun = BegunGroup(7, episodes={0: EpisodeSoFar(Turns.resumed(joined), "length", None)})
    client, environment = Script(), Says([REPLIES[0], DONE])
    whole = run(client, begun, environment)
    assert client.asked == [] and whole.finish_reason == "length"
    assert environment.seen == [(TURNS[0], "stop"), (TURNS[1], "length")]


@pytest.mark.parametrize(
    ("other", "turn", "reply", "text"),
    [
        (Says([[55], DONE]), 2, REPLIES[1], "says something else in turn 0"),
        (Says([DONE]), 2, None, "says something else in turn 0"),
        (Says([REPLIES[0], [99]]), 2, REPLIES[1], "says something else in turn 1"),
        (Says([REPLIES[0], DONE]), 2, REPLIES[1], "DONE now"),
        (Says([[50]]), 1, [], "though it is `replayable`: 1 ids, [50] now"),
        (Says([RuntimeError("gone")]), 1, REPLIES[0], "fails now"),
    ],
)
def test_episode_when_the_environment_says_something_else_then_begun_anew(told, other, turn, reply, text):
    client = Script()
    whole = run(client, saved_at(turn, reply), other, Says())
    assert bits(whole) == bits(run(Script(), BegunGroup(7), Says()))
    assert [asked for asked, _ in client.asked] == [0, 1, 2]
    [(kind, why, facts)] = told
    assert kind == "episode_begun_anew" and text in why and facts == {"group": 7, "sample": 0}


def test_episode_when_an_unseen_turn_fails_in_the_environment_then_the_sample_has_failed(told):
    with pytest.raises(SampleFailure, match="turn 1, played again,"):
        run(Script(), saved_at(2, None), Says([REPLIES[0], RuntimeError("gone")]))
    assert told == []


def test_episode_when_the_environment_is_not_replayable_then_no_turn_is_kept(told):
    class Orders(Says):
        replayable = False

    client, begun, seen = Script(), BegunGroup(7), []

    async def turn(*arguments, **how):
        seen.append(dict(begun.episodes))
        return await Script.turn(client, *arguments, **how)

    client.turn = turn
    run(client, begun, Orders())
    assert seen == [{}] * 3 and not Environment.replayable
    run(Script(), saved_at(1, REPLIES[0]), Orders(), Orders())
    assert [kind for kind, *_ in told] == ["episode_begun_anew"] and "not `replayable`" in told[0][1]


def test_episode_when_copied_while_it_runs_then_the_turns_and_replies_of_now(told):
    async def copies():
        client, begun, found = Script(), BegunGroup(7), []
        client.gates = {turn: asyncio.Event() for turn in range(3)}
        running = asyncio.create_task(
            generate_episodes(
                client,
                [Prompt(7, PROMPT)],
                SamplingParams(20),
                environment=lambda prompt: Says(),
                max_turns=4,
                group_numbers=[7],
                begun={7: begun},
            )
        )
        for turn in range(3):
            while len(client.asked) <= turn:
                await asyncio.sleep(0.001)
            found.append(begun.copied())
            client.gates[turn].set()
        await running
        found.append(begun.copied())
        return found

    none, one, two, done = asyncio.run(copies())
    assert none.is_empty and not one.is_empty and not done.is_empty
    for turn, group in ((1, one), (2, two)):
        episode = group.episodes[0]
        assert (episode.turns.count, episode.finish_reason, episode.reply) == (
            turn,
            "stop",
            REPLIES[turn - 1],
        )
        expected = replace(played(turn).whole("abort"), sample_index=0)
        assert bits(group.trajectories) == bits([expected])
    assert done.episodes == {} and list(done.samples) == [0]


class Server:
    """One token a sample; samples in `held` never come. Notes what it was asked for."""

    vocab_size, seed = 100, 0

    def __init__(self, held=()):
        self.held, self.asked = held, []

    async def generate(self, prompts, sampling, *, samples_per_prompt, group_numbers, on_sample, begun):
        own = begun[group_numbers[0]]

        async def one(index):
            if index not in own.samples:
                self.asked.append(index)
                if index in self.held:
                    await asyncio.Event().wait()
                own.finish(index, [replace(response(2), prompt_index=0, sample_index=index)])
            [sample] = own.samples[index].branches
            await on_sample(sample)
            return sample

        return await asyncio.gather(*[one(index) for index in range(samples_per_prompt)])


class Counts:
    """The reward of a sample is its index; that of sample 1 fails, that of sample 2 does not end if slow."""

    def __init__(self, compares=False, slow=False):
        self.compares, self.slow, self.scored = compares, slow, []

    async def of_sample(self, prompt, sample):
        self.scored.append(sample.sample_index)
        if sample.sample_index == 1:
            raise SampleFailure("reward_error", "no")
        if sample.sample_index == 2 and self.slow:
            await asyncio.Event().wait()
        return Score(float(sample.sample_index), {"index": float(sample.sample_index)})

    async def of_group(self, prompt, samples, scores):
        return [replace(score, reward=score.reward + 10) for score in scores]


def sampler_of(client, rewards, begun=None):
    prompts = PromptDataset([Prompt(index, [1]) for index in range(40)])
    return GroupSampler(
        client,
        prompts,
        GroupNumbers(Cursor(0), 0, 1),
        None,
        group_size=4,
        rewards=rewards,
        failures=Failures(1.0),
        failed_prompts=FailedPrompts(40),
        on_failed=-5.0,
        episodes=None,
        begun=begun,
    )


async def half(sampler, number, task_ends=True):
    """What the sampler keeps of a group that is cut off once nothing goes on."""
    task = asyncio.create_task(sampler.sample(number))
    for _ in range(20):
        await asyncio.sleep(0)
    [begun] = sampler.begun({number})
    assert sampler.begun({number + 1}) == []
    task.cancel()
    await asyncio.wait([task])
    await asyncio.sleep(0)
    assert sampler.begun({number}) == []
    return begun


@pytest.mark.parametrize("compares", [False, True])
def test_group_when_half_is_saved_then_the_rest_alone_is_sampled_and_scored(compares):
    async def both():
        begun = await half(sampler_of(Server(held=(3,)), Counts(compares, slow=True)), 7)
        assert sorted(begun.samples) == [0, 1, 2]
        assert begun.scores == {0: Score(0.0, {"index": 0.0}), 1: None}
        server, rewards = Server(), Counts(compares)
        sampler = sampler_of(server, rewards, {7: begun})
        assert [one.number for one in sampler.begun({7})] == [7] and sampler.begun({8}) == []
        group = await asyncio.create_task(sampler.sample(7))
        assert server.asked == [3] and sorted(rewards.scored) == [2, 3]
        assert all(group.trajectories[index] is begun.samples[index].branches[0] for index in range(3))
        # ended: those that were scored now; in a group that compares all but the failed one
        ended = sampler._failures.ended
        return group, ended

    group, ended = asyncio.run(both())
    more = 10 if compares else 0
    # the failed one keeps what on_failed_reward gives
    assert group.rewards == ([10.0, -5.0, 12.0, 13.0] if more else [0.0, -5.0, 2.0, 3.0])
    assert ended == (3 if compares else 2)


def test_group_when_a_filter_judges_it_then_it_is_kept_whole_and_gone_behind_that():
    async def judged():
        sampler, gate = sampler_of(Server(), Counts()), asyncio.Event()

        async def task():
            group = await sampler.sample(7)
            await gate.wait()
            return group

        running = asyncio.create_task(task())
        for _ in range(20):
            await asyncio.sleep(0)
        [begun] = sampler.begun({7})
        gate.set()
        group = await running
        await asyncio.sleep(0)
        assert sampler.begun({7}) == [] and begun.whole is group
        server = Server()
        again = sampler_of(server, Counts(), {7: begun})
        assert await asyncio.create_task(again.sample(7)) is group and server.asked == []

    asyncio.run(judged())


def test_groups_when_they_begin_too_late_then_forgotten_and_named(told):
    young = BegunGroup(5, episodes={1: EpisodeSoFar(played(1), "stop")})  # of version 3
    sampler = sampler_of(Server(), Counts(), {4: BegunGroup(4, whole=of_version(2)), 5: young})
    sampler.forget_older(2)
    assert [one.number for one in sampler.begun({4, 5})] == [4, 5] and told == []
    sampler.forget_older(3)
    assert [one.number for one in sampler.begun({4, 5})] == [5]
    [(kind, why, facts)] = told
    assert kind == "groups_sampled_again" and facts == {"groups": [4]} and why.startswith("stale")


def of_version(version):
    sample = replace(response(2), weight_versions=(VersionSpan(f"5f2c91ab-{version}", 0, 2),))
    return replace(group_of(4), trajectories=[sample], rewards=[1.0], reward_parts=[])


def test_group_when_it_failed_then_nothing_of_it_is_kept():
    async def failed():
        class Fails(Server):
            async def generate(self, prompts, sampling, *, begun, **how):
                begun[7].finish(0, [response(2)])
                raise SampleFailure("retries", "HTTP 500")

        sampler = sampler_of(Fails(), Counts())
        assert await asyncio.create_task(sampler.sample(7)) is None
        await asyncio.sleep(0)
        assert sampler.begun({7}) == []

    asyncio.run(failed())
