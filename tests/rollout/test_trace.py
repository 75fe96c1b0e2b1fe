"""Traces: their JSON is the format that viewers open, their slices nest and add up, their numbers
are those noted.
"""

import asyncio
import json
import math
from collections import defaultdict

import pytest

from megatron_rl_corr.engines.sglang.responses import server_times
from megatron_rl_corr.rollout.trace import CURRENT, EpisodeTrace, GroupTrace, RequestTrace, traced_episode
from megatron_rl_corr.rollout.trace_file import SAMPLES, TRAINER, write_trace


def read_trace(path):
    """(slices by track, names of the tracks, metadata) of a file, after a check of every event
    and of the nesting.
    """
    content = json.loads(path.read_bytes())
    assert set(content) == {"traceEvents", "displayTimeUnit", "otherData"}
    slices, names = defaultdict(list), {}
    for event in content["traceEvents"]:
        assert event["ph"] in ("X", "M") and isinstance(event["name"], str) and event["name"]
        assert type(event["pid"]) is int and type(event["tid"]) is int
        track = event["pid"], event["tid"]
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name") and isinstance(event["args"]["name"], str)
            names[event["name"], *track] = event["args"]["name"]
            continue
        assert type(event["ts"]) is int and type(event["dur"]) is int and event["dur"] >= 0
        slices[track].append(event)
    for track, own in slices.items():
        assert ("thread_name", *track) in names and ("process_name", track[0], 0) in names
        open_ends = []
        for event in sorted(own, key=lambda event: (event["ts"], -event["dur"])):
            while open_ends and open_ends[-1] <= event["ts"]:
                open_ends.pop()
            end = event["ts"] + event["dur"]
            assert not open_ends or end <= open_ends[-1], f"{event} is not within the slice around it"
            open_ends.append(end)
    return slices, names, content["otherData"]


def test_file_when_written_then_slices_in_microseconds_that_add_up_to_their_sample(tmp_path):
    # Begun at 10 s; queued until 10.5, prefill until 10.75, decode until 12, reward until 12.25, taken at 13.
    told = {"first_token_s": 0.25, "total_s": 1.5}
    good = RequestTrace(0, 10.0, 10.5, 12.0, "http://a", 7, None, told)
    failed = RequestTrace(1, 10.0, 10.5, 11.0, "http://a", 0, "RolloutServerError")
    again = RequestTrace(1, 11.0, 11.0, 12.0, "http://b", 5)
    group = GroupTrace(812, 10.0, [good, failed, again], [(0, 12.0, 12.25), (None, 12.25, 12.5)])
    phases = {
        5: [("collect", 9.0, 13.0), ("train", 13.0, 14.0)],
        6: [("train", 14.0, 15.5), ("push", 15.5, 16.0)],
    }
    path = write_trace(
        tmp_path / "t.json", [group], phases, taken=13.0, base=9.0, facts={"base_unix_s": 1.5, "replica": 0}
    )
    slices, names, facts = read_trace(path)
    assert facts == {"base_unix_s": 1.5, "replica": 0, "samples_left_out": 0}
    first = {event["name"]: (event["ts"], event["dur"]) for event in slices[SAMPLES, 0]}
    assert first == {
        "sample": (1_000_000, 3_000_000),
        "queued": (1_000_000, 500_000),
        "prefill": (1_500_000, 250_000),
        "decode": (1_750_000, 1_250_000),
        "reward": (3_250_000, 250_000),
        "wait": (3_500_000, 500_000),
    }
    second = [(event["name"], event["dur"]) for event in slices[SAMPLES, 1] if event["dur"]]
    assert second == [
        ("sample", 3_000_000),
        ("queued", 500_000),
        ("failed request", 500_000),
        ("generate", 1_000_000),
        ("reward", 250_000),
        ("wait", 500_000),
    ]
    assert [
        event["args"]["failure"] for event in slices[SAMPLES, 1] if event["name"] == "failed request"
    ] == ["RolloutServerError"]
    trainer = [(event["name"], event["ts"], event["dur"]) for event in slices[TRAINER, 0]]
    assert trainer[0] == ("step 5", 0, 5_000_000) and ("push", 6_500_000, 500_000) in trainer
    assert names["thread_name", SAMPLES, 1] == "group 812 sample 1"


def test_file_when_an_episode_then_its_turns_and_between_them_the_harness(tmp_path):
    # Begun at 1; answer 0, then 1 and 2 at once, 3 right behind; the harness has 1 to 2, 4 to 5, 8.5 to 9.
    failed = RequestTrace(0, 2.0, 2.0, 3.0, "http://a", 0, "RolloutServerError")
    again = RequestTrace(0, 3.0, 3.5, 4.0, "http://b", 5)
    both = [
        RequestTrace(0, 5.0, 5.0, 8.0, "http://a", 3, turn=1),
        RequestTrace(0, 6.0, 6.0, 7.0, "http://b", 4, turn=2),
        RequestTrace(0, 8.0, 8.0, 8.5, "http://b", 4, turn=3),
    ]
    never_sent = RequestTrace(0, 8.7, turn=4)
    group = GroupTrace(7, 0.0, [failed, again, *both, never_sent], [(0, 9.0, 9.5)])
    group.episodes.append(EpisodeTrace(0, "harness", 1.0, 9.0))
    path = write_trace(tmp_path / "t.json", [group], {}, taken=10.0, base=0.0, facts={})
    slices, names, _ = read_trace(path)

    def told(track):
        return [(one["name"], one["ts"] / 1e6, one["dur"] / 1e6) for one in slices[SAMPLES, track]]

    assert [one for one in told(0) if one[0] not in ("sample", "queued", "generate", "failed request")] == [
        ("episode", 1, 8),
        ("harness", 1, 1),
        ("harness", 4, 1),
        ("harness", 8.5, 0.5),
        ("answer 0", 2, 2),
        ("answer 1", 5, 3),
        ("answer 3", 8, 0.5),
        ("reward", 9, 0.5),
        ("wait", 9.5, 0.5),
    ]
    assert ("failed request", 2, 1) in told(0) and ("queued", 3, 0.5) in told(0)
    assert told(1) == [("answer 2", 6, 1), ("queued", 6, 0), ("generate", 6, 1)]
    assert names["thread_name", SAMPLES, 1] == "group 7 sample 0 (2)"


def test_episode_when_traced_then_its_group_has_it_also_where_it_fails():
    group = GroupTrace(3)
    token = CURRENT.set(group)
    try:
        with pytest.raises(ValueError), traced_episode(2, "environment"):
            raise ValueError
    finally:
        CURRENT.reset(token)
    with traced_episode(2, "environment"):  # of no group
        pass
    (found,) = group.episodes
    assert (found.sample, found.code) == (2, "environment") and found.begun <= found.ended


def test_file_when_a_batch_is_large_then_bounded_and_what_is_left_out_is_counted(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_rl_corr.rollout.trace_file.MOST_SAMPLES", 3)
    group = GroupTrace(1, 0.0, [RequestTrace(sample, 0.0, 0.0, 1.0) for sample in range(5)])
    path = write_trace(tmp_path / "t.json", [group], {}, taken=1.0, base=0.0, facts={})
    slices, _, facts = read_trace(path)
    assert len(slices) == 3 and facts == {"samples_left_out": 2}


def test_file_when_an_update_was_left_out_then_the_other_steps_are_in_it(tmp_path):
    steps = {1: [("collect", 0.0, 1.0), ("train", 1.0, 2.0)], 2: [], 3: [("push", 2.0, 3.0)]}
    path = write_trace(tmp_path / "t.json", [], steps, taken=None, base=0.0, facts={})
    slices, _, _ = read_trace(path)
    assert [event["name"] for event in slices[TRAINER, 0]] == ["step 1", "collect", "train", "step 3", "push"]


def test_nesting_when_slices_overlap_then_the_check_says_so(tmp_path):
    group = GroupTrace(1, 0.0, [RequestTrace(0, 0.0, 0.5, 2.0), RequestTrace(0, 1.0, 1.0, 3.0)])
    path = write_trace(tmp_path / "t.json", [group], {}, taken=4.0, base=0.0, facts={})
    with pytest.raises(AssertionError, match="is not within the slice around it"):
        read_trace(path)


def test_context_when_a_group_is_sampled_then_its_own_requests_note_in_it_and_others_in_none():
    async def request(sample):
        await asyncio.sleep(0)
        group = CURRENT.get()
        return None if group is None else group.request(sample)

    async def group(number):
        CURRENT.set(GroupTrace(number))
        await asyncio.gather(request(0), request(1))
        return CURRENT.get()

    async def run():
        one, two = await asyncio.gather(asyncio.create_task(group(1)), asyncio.create_task(group(2)))
        return one, two, await request(0)

    one, two, outside = asyncio.run(run())
    assert [len(one.requests), len(two.requests)] == [2, 2] and one is not two and outside is None


@pytest.mark.parametrize(
    "meta, found",
    [
        (
            {"e2e_latency": 1.5, "queue_time": 0.125, "first_token_latency": 0.5},
            {"queue_s": 0.125, "first_token_s": 0.5, "total_s": 1.5},
        ),
        ({"e2e_latency": 1.5}, {"total_s": 1.5}),
        ({"first_token_latency": None}, {}),
    ],
)
def test_server_times_when_metrics_are_off_then_only_the_whole(meta, found):
    assert server_times(json.dumps({"meta_info": meta}).encode()) == found


@pytest.mark.parametrize(
    "seconds", ["NaN", "Infinity", "-Infinity", "-5", "-1e300", "1000001", "1e308", str(10**400), "true"]
)
def test_server_times_when_one_is_no_time_then_left_out(seconds):
    body = f'{{"meta_info": {{"e2e_latency": 0, "first_token_latency": {seconds}}}}}'.encode()
    assert server_times(body) == {"total_s": 0.0}


@pytest.mark.parametrize(
    "seconds, decode",
    [(-5.0, (1_000_000, 2_000_000)), (7.0, (3_000_000, 0)), (math.nan, (1_000_000, 2_000_000))],
)
def test_file_when_a_first_token_is_not_within_its_request_then_the_slices_are(tmp_path, seconds, decode):
    # sent at 1 s, answered at 3 s
    request = RequestTrace(0, 1.0, 1.0, 3.0, server_times={"first_token_s": seconds})
    path = write_trace(
        tmp_path / "t.json", [GroupTrace(1, 1.0, [request])], {}, taken=3.0, base=0.0, facts={}
    )
    slices, _, _ = read_trace(path)
    assert [(one["ts"], one["dur"]) for one in slices[SAMPLES, 0] if one["name"] == "decode"] == [decode]
