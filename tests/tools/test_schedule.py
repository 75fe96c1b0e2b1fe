"""The order of the tests, and what the workers share out."""

import re
from pathlib import Path

from tests import schedule

OF_SERVERS = [name for files in schedule.SERVERS.values() for name in files]
TESTS = Path(schedule.__file__).parent
FIXTURES = ("sglang_server_fp32", "keeping_server", "victim")


def test_units_when_files_are_named_then_they_exist():
    files = [name for name in (*schedule.LONGEST_FIRST, *OF_SERVERS) if name not in schedule.SERVERS]
    assert [name for name in files if not (TESTS / name).exists()] == []


def test_servers_when_a_file_uses_the_sessions_servers_then_it_is_in_one_unit_of_theirs():
    using = {path.relative_to(TESTS).as_posix() for path in TESTS.rglob("test_*.py")
             if re.search(rf"^def [^:]*\b({'|'.join(FIXTURES)})\b", path.read_text(), re.MULTILINE)}  # fmt: skip
    assert sorted(using) == sorted(OF_SERVERS)


def test_unit_then_a_file_but_each_test_of_the_quickstart_and_all_files_of_the_servers():
    assert schedule.unit_of("tests/core/test_turns.py::test_a[1::2]") == "core/test_turns.py"
    assert schedule.unit_of("tests/examples/test_quickstart.py::test_a") == "tests/examples/test_quickstart.py::test_a"
    for unit, files in schedule.SERVERS.items():
        assert {schedule.unit_of(f"tests/{name}::test_a") for name in files} == {unit}


def test_place_when_long_then_before_the_others_and_quick_ones_last():
    long, quick = "tests/mcore/test_gradients.py::test_a", "tests/config/test_presets.py::test_a"
    servers, mcore = "tests/rollout/test_client_real_server.py::test_a", "tests/mcore/test_hooks.py::test_a"
    assert sorted([quick, mcore, long, servers], key=schedule.place_of) == [servers, long, mcore, quick]
