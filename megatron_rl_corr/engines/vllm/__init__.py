"""vLLM's protocol: every word of it is in this folder, and the rest of the package uses `ENGINE`.

`worker` runs inside vLLM's own processes; so `ENGINE`, with all that the client needs, is made when
it is asked for.
"""

from __future__ import annotations


def __getattr__(name: str):
    if name == "ENGINE":
        from megatron_rl_corr.engines.vllm.engine import VLLM

        globals()["ENGINE"] = VLLM()
        return globals()["ENGINE"]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
