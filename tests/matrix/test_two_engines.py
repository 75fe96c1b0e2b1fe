"""Whole runs with an SGLang and a vLLM server: every sample's engine, server, version and
log-probs are right.
"""

import json
import time
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.matrix.engine_pair import SCRIPT, check_samples, pair, run, steps_of
from tests.server_load import OPENER
from tests.tiers import long

pytestmark = long
STEPS = 6
JSON = {"content-type": "application/json"}
AHEAD = ["--rollout-max-lag", 1]


@pytest.fixture(scope="module")
def servers(tiny_moe_dir, tmp_path_factory):
    with pair(tiny_moe_dir, tmp_path_factory.mktemp("pair")) as servers:
        yield servers


@pytest.mark.parametrize("flags", [[], AHEAD], ids=["in step", "ahead"])
def test_run_when_servers_run_two_engines_then_every_sample_is_right(servers, tiny_moe_dir, tmp_path, flags):
    done = run(tmp_path, servers, tiny_moe_dir, *flags, steps=STEPS)
    assert done.returncode == 0, done.stderr[-6000:]
    rows = check_samples(tmp_path, servers, tiny_moe_dir, STEPS, lag=1 if flags else 0)
    counts = Counter(row["engine"] for row in rows)
    assert set(counts) == set(servers) and min(counts.values()) > len(rows) / 5, counts


def abort_all(servers):
    """End what runs at both servers, as another program may: each answers with its tokens so far."""
    for name, path, body in (
        ("sglang", "/abort_request", {"abort_all": True}),
        ("vllm", "/abort_requests", {}),
    ):
        request = urllib.request.Request(f"{servers[name].url}{path}", json.dumps(body).encode(), JSON)
        OPENER.open(request, timeout=60).close()


@pytest.mark.parametrize("transport", ["distributed", "tensor", "disk"])
def test_run_when_responses_are_aborted_then_each_goes_on_at_the_other_engine_and_is_right(
    servers, tiny_moe_dir, tmp_path, transport
):
    # Without the probe, which would be aborted too.
    flags = [*AHEAD, "--rollout-weight-transport", transport, "--rollout-probe-push", "off"]
    if transport == "disk":
        flags += ["--rollout-weight-dir", tmp_path / "weights"]
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(run, tmp_path, servers, tiny_moe_dir, *flags, steps=STEPS, tokens=24)
        while not running.done():
            if steps_of(tmp_path):  # the checks at the start need whole responses
                abort_all(servers)
            time.sleep(0.3)
        done = running.result()
    assert done.returncode == 0, done.stderr[-6000:]
    rows = check_samples(tmp_path, servers, tiny_moe_dir, STEPS, lag=1)
    counts = Counter(row["engine"] for row in rows)
    assert counts["sglang+vllm"] > 0 and min(counts[name] for name in servers) > 0, counts


@pytest.mark.parametrize("transport", ["distributed", "tensor"])
def test_servers_when_the_trainer_was_killed_in_a_push_then_named_at_the_next_start_and_sent_all(
    servers, tiny_moe_dir, tmp_path, transport
):
    flags = ["--rollout-weight-transport", transport, "--rollout-bucket-mib", 0.02]
    killed, again = tmp_path / "killed", tmp_path / "again"
    for folder in (killed, again):
        folder.mkdir()
    script = SCRIPT.with_name("killed_pretrain.py")
    done = run(killed, servers, tiny_moe_dir, *flags, steps=4, script=script, KILL_AT="bucket:5")
    assert done.returncode != 0 and len(steps_of(killed)) < 2, done.stderr[-3000:]
    done = run(again, servers, tiny_moe_dir, *flags, steps=2)
    assert done.returncode == 0, done.stderr[-6000:]
    for name, server in servers.items():
        title = {"sglang": "SGLang", "vllm": "vLLM"}[name]
        [line] = [
            line for line in done.stdout.splitlines() if f"{title} server {server.url} has weights" in line
        ]
        assert "'unfinished " in line and "-1': a trainer was killed while it sent them" in line
    check_samples(again, servers, tiny_moe_dir, 2)
