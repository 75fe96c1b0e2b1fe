"""An exception on one rank ends all ranks within seconds, with that rank's message;
servers go on sampling.
"""

import json
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.faults.drills import drill
from tests.matrix.patched import unchanged
from tests.preloaded import PreloadedPopen
from tests.tiers import IN_MATRIX, matrix
from tools.cpu import environment
from tools.process_group import group_members

pytestmark = matrix

WORKER = Path(__file__).with_name("failing_ranks_worker.py")
ROOT = WORKER.parents[2]
WITHIN_S = 10.0
CASES = {
    "loss": "RuntimeError: the loss is broken",
    "report": (
        "OSError: --rollout-log-dir DIR: [Errno 28] No space left on device: 'metrics.jsonl', so step 1 is "
        "not written there; make room, or name another folder, and go on from the last checkpoint with "
        "--load"
    ),
    "push": "KeyError: 'no such parameter'",
}
if IN_MATRIX:
    CASES |= {
        "collection": "KeyError: 'no such counter'",
        "slices": "MemoryError: no room for a slice",
        "forward": "ValueError: the stage is broken",
    }


@pytest.fixture(scope="module")
def results(sglang_server_fp32, tiny_moe_dir, tmp_path_factory):
    """Case -> of each rank: exit status, seconds, output. Rank 1 fails. No process is left."""
    folder = tmp_path_factory.mktemp("failing_ranks")
    variables = environment("megatron") | {"PYTHONPATH": f"{ROOT}:{environment('megatron')['PYTHONPATH']}"}
    with unchanged(sglang_server_fp32, tiny_moe_dir), (folder / "stdout").open("w+") as out:
        worker = PreloadedPopen(
            [sys.executable, "-W", "ignore", WORKER, tiny_moe_dir, sglang_server_fp32.url, folder, *CASES],
            env=variables,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            worker.wait(400)
            assert group_members(worker.pid) == []
        finally:
            worker.kill()
            worker.wait()
    said = (folder / "stdout").read_text()
    lines = [line for line in said.splitlines() if line.startswith("RESULT ")]
    assert lines, said[-3000:]
    return json.loads(re.sub(r"(--rollout-log-dir) [^ :]+", r"\1 DIR", lines[0].removeprefix("RESULT ")))


@drill(
    "an exception on one rank: in collection, forward, loss, report, push",
    promised="all ranks end within seconds, one message says why",
)
@pytest.mark.parametrize("case", CASES)
def test_exception_when_on_one_rank_then_all_end_within_seconds_and_name_it(case, results):
    other, failing = results[case]
    assert (other["status"], failing["status"]) == (1, 1), (
        other["printed"][-2000:] + failing["printed"][-2000:]
    )
    assert other["seconds"] < WITHIN_S and failing["seconds"] < WITHIN_S
    assert f"rank 1 failed: {CASES[case]}" in failing["printed"] and "Traceback" in failing["printed"]
    told = [line for line in other["printed"].splitlines() if line.startswith("megatron_rl_corr: ")]
    assert told == [f"megatron_rl_corr: rank 1 failed: {CASES[case]}; this is rank 0"]
    assert "Traceback" not in other["printed"], "one rank tells what happened"


@drill("the same under torchrun", promised="it ends as soon, every rank names the first")
def test_exception_when_under_torchrun_then_it_ends_as_soon_and_every_rank_names_the_first(results):
    found = results["torchrun"]
    assert found["status"] == 1 and found["seconds"] < WITHIN_S + 5, found["printed"][-3000:]
    failed = f"rank 1 failed: {CASES['report']}"
    assert found["printed"].count(f"megatron_rl_corr: {failed}") == 2
    assert f"{failed}; this is rank 0" in found["printed"]


@drill("an exception in a push", promised="the server samples again")
def test_server_when_a_rank_fails_in_a_push_then_it_samples(results, sglang_server_fp32):
    """Paused it would answer 503 after 20 s; and its update session is closed."""
    assert results["push"][1]["status"] == 1
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    body = json.dumps({"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 1}}).encode()
    for path, data in (("generate", body), ("begin_weight_update", b"{}"), ("end_weight_update", b"{}")):
        request = urllib.request.Request(
            f"{sglang_server_fp32.url}/{path}", data, {"Content-Type": "application/json"}
        )
        with opener.open(request, timeout=20) as answer:
            assert answer.status == 200
