"""The clock of tests in virtual time: exact, and it never stands still."""

import asyncio

import pytest

from tests.virtual_time import run


def test_clock_when_a_task_sleeps_then_moved_by_as_much_without_waiting():
    async def slept():
        now = asyncio.get_running_loop().time
        await asyncio.sleep(3600)
        return now()

    assert run(slept()) == pytest.approx(3600, abs=1e-6)


def test_clock_when_a_time_is_nearer_than_a_float_resolves_then_it_comes():
    async def reached():
        now, since, bound = asyncio.get_running_loop().time, 0.18271123232629496, 0.84
        await asyncio.sleep(1.0227112323262948)
        for _ in range(1000):
            if now() - since >= bound:
                return True
            await asyncio.sleep(bound - (now() - since))  # 1e-16, which leaves 1.02 as it is
        return False

    assert run(reached())


def test_loop_when_nothing_will_ever_come_then_told():
    async def waits():
        await asyncio.get_running_loop().create_future()

    with pytest.raises(RuntimeError, match="waits for what never comes"):
        run(waits())
