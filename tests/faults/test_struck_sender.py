"""The sender of a pipeline stage dies or hangs within a bucket, and torchrun brings the run back."""

import time
from pathlib import Path

import pytest

from tests.faults.drills import drill, long
from tests.faults.test_supervisor import check_whole, kinds, run

SCRIPT = Path(__file__).with_name("sender_struck_pretrain.py")


@long
@drill(
    "the sender of the second pipeline stage is killed, or stopped, in the middle of a bucket, under "
    "torchrun --max-restarts",
    promised="it comes back by itself: at once, or after --distributed-timeout-minutes (1 here); every "
    "group is trained once",
)
@pytest.mark.parametrize("blow", ["SIGKILL", "SIGSTOP"])
def test_run_when_a_sender_dies_or_hangs_within_a_bucket_then_torchrun_brings_it_back(
    trained_server, tiny_moe_dir, tmp_path, seen, blow
):
    done = run(
        tmp_path,
        tiny_moe_dir,
        trained_server.url,
        f"1:4:{blow}",
        "--pipeline-model-parallel-size",
        2,
        "--distributed-timeout-minutes",
        1,
        script=SCRIPT,
        STRUCK=str(tmp_path / "struck"),
    )
    assert done.returncode == 0, done.stderr[-4000:]
    struck = float((tmp_path / "struck").read_text())
    check_whole(tmp_path)
    told = kinds(tmp_path)
    assert told.count("run_restarted") == 1 and told[-1] == "run_ended"
    seen(f"the run had ended {time.time() - struck:.0f} s after the blow")
