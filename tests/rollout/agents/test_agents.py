"""Episodes of harnesses in real processes, through a real gateway, on servers whose answers are given."""

import asyncio
import json
import os
import resource
import signal
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import torch

from megatron_rl_corr.data.prompt import Prompt
from megatron_rl_corr.data.prompts import PromptDataset
from megatron_rl_corr.data.rewards import Rewards
from megatron_rl_corr.engines.errors import RolloutOutage, RolloutServerError, SampleFailure
from megatron_rl_corr.engines.local_faults import OTHERS
from megatron_rl_corr.engines.trajectory import SamplingParams
from megatron_rl_corr.rollout.agents.agents import Agents, task_of
from megatron_rl_corr.rollout.agents.harnesses import Harnesses
from megatron_rl_corr.rollout.agents.starter import HarnessKind
from megatron_rl_corr.rollout.begun_groups import BegunGroup
from megatron_rl_corr.rollout.cursor import Cursor, GroupNumbers
from megatron_rl_corr.rollout.failures import FailedPrompts, Failures
from megatron_rl_corr.rollout.gateway.episode import EpisodeRules
from megatron_rl_corr.rollout.gateway.server import Gateway
from megatron_rl_corr.rollout.group_sampler import GroupSampler
from tests.rollout.agents.test_harnesses import FILE, is_alive, notes, wait_until
from tests.rollout.gateway import agents_model

SAMPLING = SamplingParams(64)


class Script(agents_model.Servers):
    """Says `word` and the end of the turn, or raises."""

    base_urls = ()

    def __init__(self, word="fine", failure=None):
        super().__init__(draws=self._said)
        self._word, self._failure = word, failure

    def _said(self, prompt_ids, sampling, draw):
        return self._failure or (f"{self._word}<|end|>", "stop")

    def numbered(self, count, given):
        return given or list(range(count))


@asynccontextmanager
async def agents(*, timeout_s=60.0, max_turns=50):
    gateway = Gateway(SAMPLING)
    made = Agents(
        Harnesses(HarnessKind(f"{FILE}:run", None, timeout_s, 1.0, "`agent`")),
        gateway,
        agents_model.templates(),
        EpisodeRules(SAMPLING, 4096, max_turns),
        "episode",
    )
    await made.start()
    try:
        yield made
    finally:
        await made.close()


def prompt(**row):
    return Prompt(7, [1, 2], row, "text", label="4")


def generate(*rows, client=None, samples=1, group_numbers=None, begun=None, **how):
    """(trajectories or the failure, the samples that were told of, counts, the client)."""
    client, told = client or Script(), []

    async def tell(trajectory):
        told.append(trajectory)

    async def made():
        async with agents(**how) as own:
            prompts = [prompt(**row) for row in rows]
            try:
                found = await own.generate(
                    client,
                    prompts,
                    SAMPLING,
                    samples_per_prompt=samples,
                    on_sample=tell,
                    group_numbers=group_numbers,
                    begun=begun,
                )
            except (SampleFailure, RolloutOutage) as failure:
                found = failure
            return found, told, own.counts, client

    return asyncio.run(made())


def test_episode_of_two_turns_when_ended_then_one_trajectory_with_its_reward():
    [whole], told, counts, client = generate({"do": "turns", "question": "why"})
    assert [one["ids"] for one in client.log] == [agents_model.ids_of("fine<|end|>")] * 2
    sampled = whole.output_ids[whole.sampled].tolist()
    assert sampled == [one for asked in client.log for one in asked["ids"]]
    assert client.log[1]["prompt"][: len(client.log[0]["prompt"])] == client.log[0]["prompt"]
    assert (whole.environment_reward, whole.environment_parts) == (0.5, {"agent": 0.5, "agent/steps": 2.0})
    assert (whole.prompt_index, whole.sample_index, whole.branch) == (0, 0, 0)
    assert told == [whole]
    assert (counts.episodes, counts.requests, counts.turns, counts.branches) == (1, 2, 2, 1)
    assert counts.forks["first"] == 1 and counts.seconds > 0


def test_episodes_when_several_then_prompt_major_and_each_once():
    rows = [{"do": "turns", "question": word, "turns": 1} for word in ("one", "two")]
    found, told, counts, client = generate(*rows, samples=3)
    places = [(one.prompt_index, one.sample_index) for one in found]
    assert places == [(prompt, sample) for prompt in (0, 1) for sample in range(3)]
    assert len(told) == counts.episodes == 6
    assert sorted(one["draw"].sample for one in client.log) == [0, 0, 1, 1, 2, 2]


def test_episodes_when_some_are_a_checkpoints_then_the_others_alone_are_run():
    begun, rest, row = BegunGroup(7), BegunGroup(7), {"do": "scored", "rewards": {"SECOND": 1.0}}
    branches, _, counts, client = generate(row, samples=2, group_numbers=[7], begun={7: begun})
    assert counts.episodes == 2 and sorted(begun.samples) == [0, 1]
    assert [len(begun.samples[index].branches) for index in (0, 1)] == [2, 2]
    rest.finish(1, begun.samples[1].branches, begun.samples[1].latest)
    again, told, counts, client = generate(row, samples=2, group_numbers=[7], begun={7: rest})
    assert counts.episodes == 1 and {one["draw"].sample for one in client.log} == {0}
    assert [(one.sample_index, one.branch) for one in again] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert again[2:] == begun.samples[1].branches and all(
        torch.equal(one.output_ids, other.output_ids) for one, other in zip(again, branches, strict=True)
    )
    assert sorted(one.sample_index for one in told) == [0, 1] and branches[3] in told


@pytest.mark.parametrize(
    ("rewards", "found"),
    [
        ({}, [0.5, 0.5]),
        ({"SECOND": 1.0}, [0.5, 1.0]),
        ({"FIRST": -1, "SECOND": 0.25}, [-1.0, 0.25]),
        ({"FIRST": 2, "chatcmpl-1": 2.0, "msg_3": 0}, [2.0, 0.0]),
    ],
)
def test_episode_when_answers_have_rewards_then_their_branches_have_them(rewards, found):
    branches, _, _, _ = generate({"do": "scored", "rewards": rewards})
    assert [one.environment_reward for one in branches] == found
    assert {tuple(one.environment_parts.items()) for one in branches} == {
        (("agent", 0.5), ("agent/steps", 2.0))
    }


def test_episode_when_branches_share_an_answer_then_its_reward_is_the_first_ones():
    branches, _, _, _ = generate({"do": "scored", "rewards": {"FIRST": 1.0, "SECOND": 2.0}, "behind": 2})
    assert [(one.began, one.environment_reward) for one in branches] == [
        ("first", 1.0),
        ("earlier", 0.5),
        ("edited", 2.0),
        ("earlier", 0.5),
    ]


def test_episode_when_a_request_has_several_choices_then_each_has_its_own_reward():
    rewards = {"FIRST": 1.0, "FIRST:2": -1.0, "SECOND:0": 2.0, "SECOND:1": 3.0}
    branches, _, _, _ = generate({"do": "choices", "rewards": rewards})
    assert [one.environment_reward for one in branches] == [1.0, 0.5, -1.0, 2.0, 3.0, 0.5]


@pytest.mark.parametrize("name", ["FIRST:3", "chatcmpl-1", "chatcmpl-1:0", "FIRST:", "FIRST:-1"])
def test_episode_when_a_reward_names_no_choice_then_it_fails_with_the_names_that_are(name):
    failure, _, _, _ = generate({"do": "choices", "rewards": {name: 1.0}})
    name = name.replace("FIRST", "chatcmpl-0")
    assert f"has {name!r}, which is the id of no answer" in str(failure)
    assert "chatcmpl-0, chatcmpl-0:1, chatcmpl-0:2, chatcmpl-3, chatcmpl-3:1, chatcmpl-3:2" in str(failure)


@pytest.mark.parametrize(
    ("rewards", "says"),
    [
        ({"chatcmpl-9": 1.0}, "has 'chatcmpl-9', which is the id of no answer"),
        ({"3": 1.0}, "has '3', which is the id of no answer"),
        (
            {"FIRST": 1.0, "chatcmpl-1": 0.0},
            "one branch two rewards, 1 by 'chatcmpl-0' and 0 by 'chatcmpl-1'",
        ),
        ({"FIRST": "1"}, '"rewards" of chatcmpl-0 must return a number'),
    ],
)
def test_episode_when_rewards_name_no_branch_or_one_twice_then_it_fails(rewards, says):
    failure, told, _, _ = generate({"do": "scored", "rewards": rewards})
    assert isinstance(failure, SampleFailure) and failure.cause == "agent" and not told
    assert says in str(failure)


def test_episode_when_history_is_left_then_branches_and_the_latest_is_told():
    found, told, counts, client = generate({"do": "forks"}, {"do": "turns", "question": "x"})
    assert [(one.prompt_index, one.branch) for one in found] == [(0, 0), (0, 1), (1, 0)]
    of_forks = [one for one in told if one.prompt_index == 0]
    assert [one.branch for one in of_forks] == [1]
    assert found[0].environment_reward is None and found[0].environment_parts is None
    assert counts.forks["edited"] == 1 and counts.branches == 3
    assert counts.overridden.total() == 2  # a temperature of its own, twice


@pytest.mark.parametrize(
    ("row", "cause", "says"),
    [
        ({"do": "number"}, "agent", "without an answer"),
        ({"do": "crash"}, "agent", "SIGSEGV"),
        ({"do": "asks_for_ever", "notes": os.devnull}, "agent_timeout", "longer than 2 s"),
    ],
)
def test_episode_when_its_harness_fails_then_its_sample_does(row, cause, says):
    failure, told, counts, _ = generate(row, timeout_s=2.0)
    assert failure.cause == cause and says in str(failure) and told == []
    assert "row 7 of the data set" in failure.__notes__[0] and counts.episodes == 1


def test_evaluation_when_sampled_in_another_way_then_requests_are_compared_with_its_own():
    """The harness asks for a temperature of 0.3, twice."""

    async def asked():
        async with agents() as own:
            await own.generate(Script(), [prompt(do="forks")], replace(SAMPLING, temperature=0.3))
            return own.counts.overridden.total()

    assert asyncio.run(asked()) == 0


def test_requests_when_too_many_then_refused_and_counted(tmp_path):
    path = tmp_path / "notes"
    failure, _, counts, client = generate(
        {"do": "asks_for_ever", "notes": str(path)}, max_turns=3, timeout_s=2.0
    )
    assert failure.cause == "agent_timeout" and len(client.log) == 3
    told = notes(path)
    assert told["status"] == 400 and "agent-max-turns" in told["body"]
    assert counts.refused == counts.requests - 3 > 0


def test_servers_when_they_fail_then_the_episode_does_with_their_cause():
    outage = RolloutOutage([(RolloutServerError("http://a:1", "/generate", 500, "gone"), None)])
    row = {"do": "asks_for_ever", "notes": os.devnull}
    failure, _, counts, _ = generate(row, client=Script(failure=outage), timeout_s=60.0)
    assert failure is outage
    # At once, though its harness would ask again and again for a minute.
    assert 1 <= counts.requests < 30
    failure, _, _, _ = generate(row, client=Script(failure=SampleFailure("retries", "asked often")))
    assert failure.cause == "retries"


def test_gateway_when_it_fails_at_an_answer_then_it_costs_that_sample_alone():
    failure, told, counts, _ = generate(
        {"do": "turns", "question": "why"}, client=Script(failure=RecursionError("too deep"))
    )
    assert isinstance(failure, SampleFailure) and failure.cause == "agent" and "too deep" in str(failure)
    assert told == [] and counts.episodes == 1


def test_key_when_its_episode_has_ended_then_401(tmp_path):
    """Harnesses of a cancelled group ask on until they are ended."""
    path = tmp_path / "notes"

    async def cancelled():
        async with agents() as own:
            rows = [prompt(do="asks_for_ever", notes=str(path)), prompt(do="stubborn", notes=str(path))]
            call = asyncio.create_task(own.generate(Script(), rows, SAMPLING))
            await asyncio.to_thread(wait_until, lambda: path.is_file() and "began" in notes(path))
            assert len(own._gateway._episodes) == 2
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert own._gateway._episodes == {}
            pid = notes(path)["began"]
            await asyncio.to_thread(wait_until, lambda: not is_alive(pid))

    asyncio.run(cancelled())


class Slow(Script):
    """A server that samples until it is told to end, which takes it a while."""

    def __init__(self):
        super().__init__()
        self.sampling = self.begun = 0

    async def turn(self, *args, **how):
        self.sampling, self.begun = self.sampling + 1, self.begun + 1
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.3)
            self.sampling -= 1


@pytest.mark.parametrize("fails", [False, True])
def test_group_when_cancelled_or_failed_then_its_servers_sample_no_more_of_it_when_it_is_over(fails):
    """With no lag none samples while weights change."""

    async def scenario():
        # Long enough for both to ask on a busy machine.
        async with agents(timeout_s=6.0 if fails else 60.0) as own:
            client = Slow()
            rows = [prompt(do="asks_for_ever", notes=os.devnull)] * 2
            call = asyncio.create_task(own.generate(client, rows, SAMPLING))
            while client.begun < 2:
                await asyncio.sleep(0.01)
            if not fails:
                call.cancel()
            with pytest.raises((asyncio.CancelledError, SampleFailure)):
                await call
            assert client.sampling == 0

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_starter_when_killed_in_a_group_then_its_samples_fail(tmp_path):
    path = tmp_path / "notes"

    async def killed():
        async with agents() as own:
            call = asyncio.create_task(
                own.generate(Script(), [prompt(do="stubborn", notes=str(path))], SAMPLING)
            )
            await asyncio.to_thread(wait_until, path.is_file)
            os.kill(own._harnesses.pid, signal.SIGKILL)
            with pytest.raises(SampleFailure) as raised:
                await call
            assert raised.value.cause == "agent"
            found = await own.generate(Script(), [prompt(do="turns", question="x")], SAMPLING)
            assert len(found) == 1

    asyncio.run(killed())


def test_groups_when_failures_are_planted_then_exactly_these_are_counted(tmp_path):
    """Of 24 rows every third one fails in its own way."""
    kinds = ("crash", "raises", "exit", "stubborn")
    rows = [
        {"do": kinds[row // 3 % 4]} if row % 3 == 2 else {"do": "turns", "question": str(row), "turns": 1}
        for row in range(24)
    ]
    prompts = PromptDataset(
        [Prompt(at, [1], row | {"notes": str(tmp_path / "notes")}, "t") for at, row in enumerate(rows)]
    )
    failures, warned = Failures(1.0, warn=lambda text: warned.append(text)), []

    async def sampled():
        async with agents(timeout_s=3.0) as own:
            rewards = Rewards(None, limit_s=10.0)
            sampler = GroupSampler(
                Script(),
                prompts,
                GroupNumbers(Cursor(0), 0, 1),
                SAMPLING,
                group_size=1,
                rewards=rewards,
                failures=failures,
                failed_prompts=FailedPrompts(24),
                on_failed=None,
                episodes=own,
            )
            return await asyncio.gather(*(sampler.sample(number) for number in range(24)))

    groups = asyncio.run(sampled())
    found = {cause: count for cause, count in failures.by_cause.items() if count}
    assert found == {"agent": 6, "agent_timeout": 2} and failures.ended == 24
    assert sum(group is None for group in groups) == 8 and len(warned) == 2
    good = [group for group in groups if group is not None]
    assert {group.rewards[0] for group in good} == {0.5}
    assert good[0].reward_parts == [{"agent": 0.5, "agent/steps": 1.0}]


@pytest.mark.parametrize(
    ("given", "task"),
    [
        (
            Prompt(3, [1], {"messages": [{"role": "user", "content": "2+2?"}]}, "text", label="4"),
            {"index": 3, "label": "4", "messages": [{"role": "user", "content": "2+2?"}]},
        ),
        (Prompt(3, [1, 2], {"index": "own"}), {"index": "own", "label": None, "input_ids": [1, 2]}),
    ],
)
def test_task_when_made_of_a_row_then_it_is_the_row_and_its_place(given, task):
    assert task_of(given) == task and json.loads(json.dumps(task)) == task


def test_port_when_taken_then_the_start_names_the_flag():
    async def taken():
        async with Gateway(SAMPLING) as first:
            port = int(first.root_url.rpartition(":")[2])
            kind = HarnessKind(f"{FILE}:run", None, 1.0, 1.0, "`agent`")
            own = Agents(
                Harnesses(kind), Gateway(SAMPLING, port=port), agents_model.templates(), None, "episode"
            )
            with pytest.raises(ValueError, match="`gateway_port`"):
                await own.start()
            assert own._harnesses.pid is None

    asyncio.run(taken())


@pytest.mark.parametrize("groups", [1, 10])
def test_files_when_too_few_may_be_open_then_the_limit_is_raised_first(groups):
    """Groups are asked for one by one, and are under way together."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = len(os.listdir("/proc/self/fd")) + OTHERS + 40
    row = prompt(do="turns", question="x", turns=1)

    async def asked():
        async with agents() as own:
            calls = (
                own.generate(Script(), [row], SAMPLING, samples_per_prompt=40 // groups)
                for _ in range(groups)
            )
            return await asyncio.gather(*calls)

    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (low, hard))
        found = asyncio.run(asked())
        assert sum(map(len, found)) == 40 and resource.getrlimit(resource.RLIMIT_NOFILE)[0] > low
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
