"""Rollout engines behind one seam: what is sent to a server, and what its answers mean.

`base` has the seam, `trajectory` and `routes` the data that every engine returns, `errors` what can go
wrong. A folder beside them holds one engine, which config/run.py lists in ENGINES; it has every word of
that server's protocol.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_rl_corr.engines.base import Engine


def load_engine(name: str) -> Engine:
    """The engine of this name.

    Args:
        name: one of the names in config/run.py ENGINES, for instance "sglang".

    Raises:
        ValueError: no engine has this name.
    """
    # here: vLLM's workers import this package for our extension alone
    from megatron_rl_corr.config.run import ENGINES

    if name not in ENGINES:
        raise ValueError(f"engine must be one of {', '.join(ENGINES)}, got {name!r}")
    return importlib.import_module(ENGINES[name]).ENGINE
