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
    "exchanged_half": (exchanged(*UNLIKELY), "bfloat16"),
    "clean": (None, "float32"),
    "clean_half": (None, "bfloat16"),
    **dict(in_matrix(("padded", (padded(96, -3.5), "float32")), ("shifted", (shifted(80), "float32")))),
}


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
    assert status in (0, 1), printed.err
    (server,) = json.loads(printed.out)["servers"]
    return {row["check"]: row for row in server["rows"]}, [one["name"] for one in server["findings"]]


def test_output_layer_that_is_otherwise_then_its_ids_are_named_and_a_right_one_has_none(
    served, model, capsys
):
    name, url = served
    for _ in range(3 if name.startswith("clean") else 1):  # prompts are new ones each time
        rows, findings = examined(url, model, capsys)
        row = rows[CHECK]
        usual = {"model_difference"} if name.endswith("half") else set()
        if name.startswith("clean"):
            assert row["status"] == "ok" and set(findings) <= usual, row
            assert row["numbers"]["ids"] == row["numbers"]["vocabulary"] == 83
    if name.startswith("exchanged"):
        # Sampled tokens agree: nothing else is found.
        assert set(findings) - usual == {"ids_differ"}
        assert rows["model difference"]["numbers"]["max"] < (0.5 if usual else 1e-5)
        one, other = UNLIKELY
        assert set(row["numbers"]["off"]) == {str(one), str(other)}
        assert f"id {one} 'h' has the log-probs of {other} " in row["message"]
        assert f"id {other} " in row["message"] and f"has the log-probs of {one} 'h'" in row["message"]
    if name == "shifted":
        assert "ids_differ" in findings and set(row["numbers"]["off"]) == {"80", "81", "82"}
        assert "has the log-probs of 81 " in row["message"]
    if name == "padded":
        # They are less likely than most others, so the lists have but a few of them, or none.
        assert findings == ["ids_differ"] and row["numbers"]["off"] == {}, row
        assert "the model lacks" in row["message"] and "of the mass" in row["message"]
