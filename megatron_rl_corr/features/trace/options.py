"""The flag of the trace."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl_corr.config.fields import Options, WrittenFolder, option


@dataclass(frozen=True, kw_only=True)
class TraceConfig(Options):
    """Trace: when samples were made and steps took place."""

    writes = (WrittenFolder("trace", by="leaders", step_files=r"step_(\d+)_replica(\d+)\.json"),)

    trace: str | None = option(None, metavar="DIR")
    """Write when each sample was queued, sampled and scored and how long it waited, and the parts of each
    step, as Chrome traces, which ui.perfetto.dev opens: a file a batch, named by its first step, and
    replica. Prefill and decode are separate where servers run with --enable-metrics.
    """


OPTIONS = TraceConfig
