"""The doctor on real servers whose output layer is otherwise for ids that are hardly ever sampled."""

import json

import pytest

from megatron_rl_corr import cli
from tests.preloaded import PreloadedServer
from tests.tiers import in_matrix, matrix
from tests.unlikely_ids import UNLIKELY, exchanged, padded, shifted, write_changed_head, write_unlikely
from tools.cpu import environment, sglang_arguments

pytestmark = matrix

CHECK = "whole vocabulary"
CASES = {
    # name: (change of the output layer, number type)
    "exchanged": (exchanged(*UNLIKELY), "float32"),
    "clean": (None, "float32"),
    **dict(
        in_matrix(
            ("exchanged_half", (exchanged(*UNLIKELY), "bfloat16")),
            ("clean_half", (None, "bfloat16")),
            ("padded", (padded(96, -3.5), "float32")),
            ("shifted", (shifted(80), "float32")),
        )
    ),
}


EXCHANGED = 3.0
"""Nats that two ids are apart, at the least: a sampled one differs from the model's by so much."""


@pytest.fixture(scope="module")
def model(tiny_moe_dir, tmp_path_factory):
    return write_unlikely(tiny_moe_dir, tmp_path_factory.mktemp("unlikely") / "model")


@pytest.fixture(scope="module", params=CASES)
def served(request, model, tmp_path_factory):
    """(the case's name, the address of its server)."""
    change, dtype = CASES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    with PreloadedServer(
        model if change is None else write_changed_head(model, folder / "changed", change),
        dtype=dtype,
        log_path=folder / "server.log",
        extra_arguments=sglang_arguments(),
        environment=environment("sglang"),
    ) as server:
        yield request.param, server.url


def examined(url, model, capsys):
    """The doctor's rows by name, and its findings."""
    status = cli.main(["doctor", "--url", url, "--model", str(model), "--json"])
    printed = capsys.readouterr()
    told = printed.out + printed.err
    # Of ids that the model lacks one may be sampled: then a question ends there, and says so.
    assert status in (0, 1) or (status == 2 and "it sampled id" in told), told
    (server,) = json.loads(printed.out)["servers"]
    return {row["check"]: row for row in server["rows"]}, [one["name"] for one in server["findings"]]


def test_output_layer_that_is_otherwise_then_its_ids_are_named_and_a_right_one_has_none(
    served, model, capsys
):
    name, url = served
    usual = {"model_difference"} if name.endswith("half") else set()
    # Prompts are new ones each time. An exchanged id is sampled, and seen so, in 1 of 20 examinations.
    for _ in range(3):
        rows, findings = examined(url, model, capsys)
        if any("it sampled id" in row["message"] for row in rows.values()):
            assert name == "padded"
            continue
        row, largest = rows[CHECK], rows["model difference"]["numbers"]["max"]
        if name.startswith("clean"):
            assert row["status"] == "ok" and set(findings) <= usual, row
            assert row["numbers"]["ids"] == row["numbers"]["vocabulary"] == 83
        elif not (name.startswith("exchanged") and largest > EXCHANGED):
            break
    if name.startswith("exchanged"):
        # Sampled tokens agree: nothing else is found.
        assert set(findings) - usual == {"ids_differ"}
        assert largest < (0.5 if usual else 1e-5)
        one, other = UNLIKELY
        assert set(row["numbers"]["off"]) == {str(one), str(other)}
        assert f"id {one} 'h' has the log-probs of {other} " in row["message"]
        assert f"id {other} " in row["message"] and f"has the log-probs of {one} 'h'" in row["message"]
    if name == "shifted":
        assert "ids_differ" in findings and set(row["numbers"]["off"]) == {"80", "81", "82"}
        assert "has the log-probs of 81 " in row["message"]
    if name == "padded" and "it sampled id" not in str(rows):
        # They are less likely than most others, so the lists have but a few of them, or none.
        assert findings == ["ids_differ"] and row["numbers"]["off"] == {}, row
        assert "the model lacks" in row["message"] and "of the mass" in row["message"]
