"""A run is killed while groups are half sampled and episodes have made turns: it goes on, on another number
of replicas too, and what the checkpoint has is not asked for again.

The server is a real SGLang server behind a door that knows requests by their seeds, and does not answer some.
"""

import asyncio
import json
import shutil
import signal
from collections import Counter

import pytest

from megatron_rl_corr.rollout.seeds import sampling_seed
from megatron_rl_corr.rollout.waiting_groups import FOLDER
from tests.conftest import ROOT
from tests.faults.begun_environment import TURNS
from tests.faults.door import Door
from tests.faults.drills import drill, long
from tests.faults.notes import events_of, notes_of
from tests.matrix.patched import unchanged
from tests.mcore.launched import launch, write_data

SCRIPT, ENVIRONMENT = ROOT / "tests/faults/begun_pretrain.py", ROOT / "tests/faults/begun_environment.py"
SEED, SAVED, STEPS, GROUP, GROUPS = 1234, 2, 4, 4, 8
HELD = {"first": 20, "turns": {"1": 1, "2": 2, "3": 0}, "unseen": False}
"""From the group 20 on: sample 1 has made one turn, sample 2 two, sample 3 none."""
RUN = ["--seed", SEED, "--global-batch-size", GROUP * GROUPS, "--save-interval", SAVED]
RUN += ["--train-iters", STEPS, "--rollout-max-lag", 3, "--moe-grouped-gemm", "--moe-permute-fusion"]
RUN += ["--router-replay", "R3"]
# so slow that the routers of a random model choose as they did when a turn was sampled, some versions before
RUN += ["--lr", 1e-5]


class HoldingDoor(Door):
    """Keeps which turns were asked for, as (group, sample, turn), and never answers those that are held."""

    def __init__(self, target):
        self.asked, self.held = [], {}
        places = [
            (group, sample, turn)
            for group in range(STEPS * GROUPS)
            for sample in range(GROUP)
            for turn in range(TURNS)
        ]
        self._places = {sampling_seed(SEED, *place, 0): place for place in places}
        super().__init__(target)

    async def _answer(self, request):
        if request.path == "/generate":
            seed = json.loads(await request.read())["sampling_params"].get("sampling_seed")
            if seed in self._places:
                group, sample, turn = self._places[seed]
                self.asked.append((group, sample, turn))
                held = self.held and group >= self.held["first"]
                if held and self.held["turns"].get(str(sample)) == turn:
                    await asyncio.Event().wait()
        return await super()._answer(request)


def run(folder, name, door, model, environment, *flags, processes, held=None, cuts=None, **variables):
    """The ended run of so many replicas, which writes into the folder `name`."""
    out = folder / name
    out.mkdir(exist_ok=True)
    rows = [[5 + row % 13, 20 + row // 13 % 13, 40 + row // 169] for row in range(300)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    door.asked.clear()
    door.held = held or {}
    own = []
    if environment is not None:
        own = ["--rollout-environment", f"{ENVIRONMENT}:{environment}", "--rollout-max-turns", TURNS]
    return launch(
        folder,
        name,
        model,
        door.url,
        SCRIPT,
        *[*RUN, *own, "--rollout-events", out / "events.jsonl", *flags],
        processes=processes,
        tokens=24,
        rewarded=environment is None,
        NOTES=str(out / "notes.jsonl"),
        HELD=json.dumps(held) if held else "",
        CUTS=json.dumps(cuts) if cuts else "",
        **variables,
    )


@pytest.fixture(scope="module")
def door(keeping_server, tiny_moe_dir):
    with unchanged(keeping_server, tiny_moe_dir):
        door = HoldingDoor(keeping_server.url)
        yield door
        door.close()


@pytest.fixture(scope="module")
def killed(door, tiny_moe_dir, tmp_path_factory):
    """killed(environment, processes): the folder of such a run that was killed behind its first save."""
    made = {}

    def run_killed(environment, processes):
        if (environment, processes) not in made:
            folder = tmp_path_factory.mktemp("begun")
            write_data(folder)
            held = HELD if environment is not None else HELD | {"turns": {"2": 0, "3": 0}}
            held = held | {"unseen": environment == "Orders"}
            ended = run(folder, "killed", door, tiny_moe_dir, environment, processes=processes, held=held)
            assert ended.returncode == -signal.SIGKILL, ended.stderr[-9000:]
            made[environment, processes] = folder
        return made[environment, processes]

    return run_killed


def load(folder, name, door, model, environment, *flags, processes, damage=lambda folder: None, **variables):
    """The killed run goes on in a folder of its own, on so many replicas."""
    out = folder / name
    shutil.copytree(folder / "killed/checkpoints", out / "checkpoints")
    damage(out / f"checkpoints/iter_{SAVED:07d}/{FOLDER}")
    cuts = {
        one["number"]: {index: tokens for index, (tokens, *_) in one["episodes"].items()}
        for one in notes_of(folder / "killed", "begun")
    }
    flags = ["--load", out / "checkpoints", *flags]
    how = {"processes": processes, "cuts": cuts, **variables}
    ended = run(folder, name, door, model, environment, *flags, **how)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return out, ended


def assert_each_trained_once(folder, out):
    trained = [one["number"] for one in notes_of(folder / "killed", "taken") if one["step"] < SAVED]
    trained += [one["number"] for one in notes_of(out, "taken")]
    assert sorted(trained) == list(range(STEPS * GROUPS))


def assert_goes_on(folder, out, door, *, without=(), anew=()):
    """All that was saved is trained as it was and was not asked for, but for groups that are left out, and
    for episodes (group, sample) that were begun anew; all else was asked for once.
    """
    begun = {one["number"]: one for one in notes_of(folder / "killed", "begun")}
    waits = {one["number"] for one in notes_of(folder / "killed", "waits")}
    taken = {one["number"]: one for one in notes_of(out, "taken")}
    saved, expected = set(), set()
    for number, one in taken.items():
        own = begun.get(number, {"samples": {}, "episodes": {}}) if number not in without else {}
        for index, made in one["turns"].items():
            first = 0
            if number in waits or index in own.get("samples", {}):
                first = made
            elif index in own.get("episodes", {}) and (number, int(index)) not in anew:
                first = own["episodes"][index][1]
            place = number, int(index)
            expected |= {(*place, turn) for turn in range(first, made)}
            saved |= {(*place, turn) for turn in range(first)}
        for index, sha in own.get("samples", {}).items():
            assert one["samples"][index] == sha, (number, index)
        for index, (_, _, sha) in own.get("episodes", {}).items():
            if (number, int(index)) not in anew:
                assert one["begins"][index] == sha, (number, index)
    asked = Counter(door.asked)
    assert not saved & asked.keys()
    # an episode may ask for one turn more, which is cut before its first token
    assert expected <= asked.keys() and set(asked.values()) == {1}
    assert_each_trained_once(folder, out)
    return len(saved)


@drill(
    "SIGKILL of all ranks with groups half sampled and episodes under way, then --load on as many replicas "
    "or half of them",
    promised="finished samples and turns are trained as they were, not sampled again",
)
@pytest.mark.parametrize(
    ("before", "after", "environment"),
    [
        (2, 2, "Adds"),
        pytest.param(4, 2, "Adds", marks=long),
        pytest.param(2, 1, "Adds", marks=long),
        pytest.param(4, 2, None, marks=long),
    ],
)
def test_samples_and_turns_when_killed_and_loaded_then_kept_bit_for_bit(
    killed, door, tiny_moe_dir, seen, before, after, environment
):
    folder = killed(environment, before)
    begun = notes_of(folder / "killed", "begun")
    numbers = sorted(one["number"] for one in begun)
    assert numbers == list(range(HELD["first"], STEPS * GROUPS))
    assert all(one["samples"] for one in begun)
    if environment is not None:
        made = Counter(turns for one in begun for _, turns, _ in one["episodes"].values())
        assert set(made) == {1, 2} and min(made.values()) >= 3
    [*saved] = events_of(folder / "killed", "samples_saved")
    assert sorted(n for one in saved for n in one["groups"]) == numbers
    out, _ = load(folder, f"on{after}", door, tiny_moe_dir, environment, processes=after)
    kept = assert_goes_on(folder, out, door)
    restored = events_of(out, "samples_restored")
    assert sorted(n for one in restored for n in one["groups"]) == numbers
    for name, values in (
        ("samples", sum(len(one["samples"]) for one in begun)),
        ("turns", sum(turns for one in begun for _, turns, _ in one["episodes"].values())),
    ):
        assert sum(one[name] for one in restored) == sum(one[name] for one in saved) == values
    assert events_of(out, "groups_sampled_again") == events_of(out, "episode_begun_anew") == []
    seen(f"{len(numbers)} groups of {before} replicas on {after}: {kept} turns were not sampled again")


@long
@drill(
    "an environment whose answers depend on more than its row, under way at a SIGKILL",
    promised="noticed, and its episodes alone are begun anew",
)
def test_episodes_when_the_environment_says_something_else_then_begun_anew(killed, door, tiny_moe_dir, seen):
    folder = killed("Adds", 2)
    out, _ = load(folder, "hidden", door, tiny_moe_dir, "Adds", processes=2, OUTSIDE="1")
    begun = notes_of(folder / "killed", "begun")
    episodes = {(one["number"], int(index)) for one in begun for index in one["episodes"]}
    events = events_of(out, "episode_begun_anew")
    assert sorted((one["group"], one["sample"]) for one in events) == sorted(episodes)
    assert all("says something else in turn 0" in one["reason"] for one in events)
    assert_goes_on(folder, out, door, anew=episodes)
    seen(f"{len(episodes)} episodes were begun anew; finished samples were not")


@long
@drill(
    "a bit flipped in the file of a group that was being sampled",
    promised="named, and this group alone is begun anew",
)
def test_samples_when_a_file_is_damaged_then_named_and_the_group_is_begun_anew(
    killed, door, tiny_moe_dir, seen
):
    folder = killed("Adds", 2)
    number = notes_of(folder / "killed", "begun")[3]["number"]

    def damage(saved):
        path = saved / f"group_{number:06d}.parquet"
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)

    out, ended = load(folder, "damaged", door, tiny_moe_dir, "Adds", processes=2, damage=damage)
    [event] = events_of(out, "groups_sampled_again")
    assert event["groups"] == [number] and f"group_{number:06d}.parquet is damaged" in event["reason"]
    assert f"group_{number:06d}.parquet is damaged" in ended.stderr
    assert_goes_on(folder, out, door, without={number})
    seen("its samples were asked for again, the others' were not")


@long
def test_episodes_when_the_environment_is_not_replayable_then_only_finished_samples_are_kept(
    killed, door, tiny_moe_dir
):
    folder = killed("Orders", 2)
    begun = notes_of(folder / "killed", "begun")
    assert begun and all(one["samples"] and not one["episodes"] for one in begun)
    out, _ = load(folder, "orders", door, tiny_moe_dir, "Orders", processes=2)
    assert_goes_on(folder, out, door)
    assert events_of(out, "episode_begun_anew") == []
