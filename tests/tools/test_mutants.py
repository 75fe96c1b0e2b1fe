"""`make mutants`: which faults it can plant, which it takes, and that its list of accepted ones is true."""

import ast
from pathlib import Path

import pytest

from tools.mutants import __main__ as main
from tools.mutants.__main__ import Reach, accepted, report
from tools.mutants.faults import Fault, choose, faults_of

ROOT = Path(__file__).resolve().parents[2]


def changes(text: str) -> list[str]:
    return [fault.change for fault in faults_of("a.py", text.encode())]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a < b", ["a < b -> a <= b", "a < b -> a >= b"]),
        ("a * b", ["a * b -> a / b"]),
        ("a and b", ["a and b -> a or b"]),
        ("x = not a", ["not a -> a"]),
        ("x = -2", ["-2 -> 2", "2 -> 3 in -2"]),
        ("x = 0.5", ["0.5 -> 1.0 in x = 0.5"]),
        ("x = True", ["True -> False in x = True"]),
        ("x = min(a, b)", ["min(a, b) -> max(a, b)"]),
        ("x = a.any()", ["a.any() -> a.all()"]),
        ("x = a.detach()", ["a.detach() -> a"]),
        ("x = f(a, k=b)", ["k=b of f -> dropped"]),
        ("x = a.clamp(min=b)", ["min=b of a.clamp -> dropped", "a.clamp(min=b) -> a.clamp(max=b)"]),
        ("x = where(a, b, c)", ["where(a, b, c) -> where(a, c, b)"]),
        ("x = a if b else c", ["a if b else c -> c if b else a"]),
        ("x = [a for a in b if c]", ["if c -> dropped"]),
        ("f(a)", ["f(a) -> dropped"]),
        ("a.b = c", ["a.b = c -> dropped"]),
        ("a += b", ["a += b -> dropped", "a += b -> a -= b"]),
        ("if a:\n    raise b", ["a -> not (a)", "raise b -> dropped"]),
        ("def f():\n    return a", ["return a -> return None"]),
    ],
)
def test_faults_when_found_then_these(text, expected):
    assert changes(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        '"""Text."""',
        "def f(a: List[1]) -> List[2]:\n    '''Text 3.'''",
        "a: List[1]",
        "logger.info('%d', 1)",
        "x = ValueError(1 + 2)",
        "EVENTS.tell('kind', 1)",
        "x = f'{a + 1}'",
        "x = a + 'text'",
        "class A:\n    def __repr__(self):\n        return a + 1",
        "assert a < 1",
    ],
)
def test_faults_when_only_people_read_it_then_none(text):
    assert changes(text) == []


def test_fault_when_planted_then_the_rest_stays():
    # The operand is over two lines, and an umlaut takes two bytes.
    source = 'x = "ä", f(\n    a,\n) < b  # ä\n'.encode()
    fault = faults_of("a.py", source)[0]
    assert fault.planted(source).decode() == 'x = "ä", (f(a) <= b)  # ä\n'


def test_faults_of_the_package_when_planted_then_python():
    path = ROOT / "megatron_rl_corr/reduce/metrics.py"
    source = path.read_bytes()
    found = faults_of("metrics.py", source)
    assert len(found) > 100
    for fault in found:
        assert ast.dump(ast.parse(fault.planted(source))) != ast.dump(ast.parse(source)), fault


def test_fault_when_behind_a_cache_or_at_the_import_then_unwatched():
    text = "x = 1\n@cache\ndef f():\n    return a\ndef g():\n    return b\ny = lambda: -c\n"
    found = {fault.function or fault.line: fault.watched for fault in faults_of("a.py", text.encode())}
    assert found == {1: False, "f": False, "g": True, 7: True}


def made(file: str, function: str, line: int, watched=True) -> Fault:
    return Fault(file, function, "a -> b", line, (line, line), watched, (0, 1), "b")


def test_choice_when_files_differ_in_size_then_even_and_the_same_again():
    # 1 of the small file, then 3 of the large one: f, which has two, and g and h.
    large = [made("large", name, line) for line, name in enumerate("ffffgh", start=1)]
    faults = {"small": [made("small", "f", 1)], "large": large}
    chosen = choose(faults, 4, seed=3)
    assert [fault.file for fault in chosen] == ["large"] * 3 + ["small"]
    assert {fault.function for fault in chosen[:3]} == {"f", "g", "h"}
    assert choose(faults, 4, seed=3) == chosen and len(choose(faults, 99, seed=3)) == 7
    assert len({tuple(choose(faults, 4, seed=seed)) for seed in range(20)}) > 1


def test_batches_when_tests_reach_a_line_then_named_and_quick_ones_first():
    reach = Reach(
        {
            "": [0.0, {"w.py": [9]}],
            "tests/b.py::slow": [90.0, {"w.py": [8]}],
            "tests/b.py::x": [2.0, {"w.py": [7]}],
            "tests/a.py::y": [2.5, {"w.py": [7]}],
            "tests/test_w.py::z": [0.4, {"w.py": [7]}],
        }
    )
    # 0.4 s of the test that has the file's name, then 2 s; with 2.5 s more the first batch would be too long.
    assert reach.batches(made("w.py", "f", 7)) == [
        ({"tests/test_w.py": {"tests/test_w.py::z"}, "tests/b.py": {"tests/b.py::x"}}, 2.4),
        ({"tests/a.py": {"tests/a.py::y"}}, 2.5),
    ]
    # Line 9 runs at the import: all tests of the file. Those of b.py take over a minute, and have no place.
    at_import = reach.batches(made("w.py", "f", 9))
    assert [list(batch) for batch, _ in at_import] == [["tests/test_w.py", "tests/a.py"]]
    assert reach.batches(made("w.py", "f", 99)) == []


def test_finder_when_it_fails_without_a_fault_too_then_left_out(monkeypatch):
    reach = Reach({f"tests/b.py::{name}": [1.0, {"w.py": [7]}] for name in ("x", "y")})
    ended = {"tests/b.py::x": 1, "tests/b.py::y": 0}
    tried = []

    def forked(arguments, plugin, limit):
        [test] = plugin._files["tests/b.py"]
        tried.append(test)
        return ended[test]

    monkeypatch.setattr(main, "forked", forked)
    assert not main.sound("tests/b.py::x", reach) and main.sound("tests/b.py::y", reach)
    assert main.sound("tests/b.py::y", reach) and len(tried) == 2  # it is asked once
    assert reach.tests(made("w.py", "f", 7)) == {"tests/b.py::y"}


def test_report_when_faults_are_left_then_a_table_and_a_list():
    one = {"function": "f", "change": "a -> b", "line": 3, "reason": ""}
    results = [
        one | {"file": "p/core/a.py", "outcome": "killed"},
        one | {"file": "p/core/a.py", "outcome": "survived", "reason": "the same"},
        one | {"file": "p/mcore/b.py", "outcome": "survived"},
    ]
    assert report(results).splitlines() == [
        "| folder | planted | killed | timeout | accepted | survived | unreached |",
        "|---|---:|---:|---:|---:|---:|---:|",
        "| core | 2 | 1 | 0 | 1 | 0 | 0 |",
        "| mcore | 1 | 0 | 0 | 0 | 1 | 0 |",
        "| all | 3 | 1 | 0 | 1 | 1 | 0 |",
        "",
        "1 survived:",
        "",
        "- p/mcore/b.py:3 f: `a -> b`",
    ]


def test_accepted_faults_when_listed_then_they_can_be_planted_and_have_a_reason():
    listed = accepted()
    possible = set()
    for file in {name[0] for name in listed}:
        possible |= {fault.name for fault in faults_of(file, (ROOT / file).read_bytes())}
    assert listed.keys() <= possible
    assert all(listed.values())
