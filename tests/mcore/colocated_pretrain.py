"""pretrain_any.py, whose rank 0 prints in which order memory changes hands: what servers are
asked, what it has.

With KILL_AT=N:WHAT all ranks are killed at the N-th line that says WHAT.
"""

import os
import runpy
from pathlib import Path

from megatron_rl_corr.engines.control import ServerControl
from megatron_rl_corr.features.evaluation.evaluation import Evaluation
from megatron_rl_corr.mcore.batch.collector import BatchCollector
from megatron_rl_corr.mcore.colocation import TrainerMemory
from megatron_rl_corr.weight_sync.colocated import ColocatedServers
from tests.faults import killing

ASKED = (
    "/pause_generation",
    "/flush_cache",
    "/release_memory_occupation",
    "/resume_memory_occupation",
    "/begin_weight_update",
    "/update_weights_from_tensor",
    "/end_weight_update",
    "/continue_generation",
)
COUNT, _, WHAT = os.environ.get("KILL_AT", "0:").partition(":")
said = 0


def say(what):
    global said
    if os.environ["RANK"] == "0":
        print(f"[memory] {what}", flush=True)
        said += what == WHAT
        if what == WHAT and said == int(COUNT):
            killing.kill_all()


def around(owner, name, after):
    original = getattr(owner, name)

    def wrapped(self, *arguments, **named):
        result = original(self, *arguments, **named)
        after(self, *arguments)
        return result

    setattr(owner, name, wrapped)


def gradients(memory):
    """Whether this rank's gradients have memory."""
    buffers = [buffer for chunk in memory.model for buffer in chunk.buffers + chunk.expert_parallel_buffers]
    return "some" if sum(buffer.grad_data.untyped_storage().nbytes() for buffer in buffers) else "no"


ask = ServerControl.ask


async def told_ask(self, url, request, **options):
    if request is not None and request.endpoint in ASKED:
        tags = (request.json or {}).get("tags")
        say(request.endpoint[1:] + (f" {','.join(tags)}" if tags else ""))
    return await ask(self, url, request, **options)


ServerControl.ask = told_ask
around(TrainerMemory, "free", lambda memory: say(f"trainer frees, {gradients(memory)} gradients"))
around(TrainerMemory, "take_back", lambda memory: say(f"trainer takes back, {gradients(memory)} gradients"))
ColocatedServers.free_cached = staticmethod(lambda: say("trainer frees cached blocks"))
around(BatchCollector, "collect", lambda self, number: say("collected"))
around(Evaluation, "start", lambda self, step: say("evaluates"))
script = Path(__file__).resolve().parents[1] / "matrix/pretrain_any.py"
runpy.run_path(str(script), run_name="__main__")
