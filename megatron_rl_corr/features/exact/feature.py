"""Compares the log-prob of every sampled token with the server's, before the update.

The comparison is of the first pass under the weights that sampled: the pass for old log-probs where there is
one, else the training pass. Its sums and extrema travel with the step's other metrics.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl_corr.config.run import RunConfig
from megatron_rl_corr.engines.concurrency import raise_first
from megatron_rl_corr.engines.errors import RolloutError, may_be_gone
from megatron_rl_corr.features.exact.certificate import Certificate
from megatron_rl_corr.features.exact.comparison import (
    FIRST,
    exact_metrics,
    place_of_key,
    token_keys,
    ulps_apart,
)
from megatron_rl_corr.features.exact.message import message
from megatron_rl_corr.mcore.feature import CorrectedBatch, EndedStep, Feature, RunParts
from megatron_rl_corr.reduce.collectives import collective
from megatron_rl_corr.reduce.failure import StartupError, broadcast_made
from megatron_rl_corr.reduce.metrics import Metric

MODES = ("batch_invariant_mode", "deterministic_mode", "attention_backend", "flash_attention_version")
SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
"""Megatron's arguments that a certificate names."""


if TYPE_CHECKING:
    from megatron_rl_corr.mcore.batch.microbatch import Microbatch
    from megatron_rl_corr.rollout.client import RolloutClient
    from megatron_rl_corr.weight_sync.servers import WeightServers


async def _infos(client: RolloutClient, urls: Sequence[str]) -> dict[str, dict[str, Any]]:
    """What each of these servers that answers says of itself. Raises RolloutError where one refuses to."""
    asked = [client.control([url]).server_info() for url in urls]
    answers = await asyncio.gather(*asked, return_exceptions=True)
    gone = [isinstance(answer, RolloutError) and may_be_gone(answer) for answer in answers]
    left = [(url, answer) for url, answer, is_gone in zip(urls, answers, gone, strict=True) if not is_gone]
    raise_first([answer for _, answer in left])
    return {url: info for url, [info] in left}


class InexactRun(StartupError):
    """Training and servers do not compute alike, so the run ends before the update."""


class ExactFeature(Feature):
    """--rollout-expect-exact: with 0 each log-prob must be the very number that the server gave."""

    def __init__(self, options: RunConfig):
        super().__init__(options)
        self._dtype, self._servers = torch.float32, None
        self._first = math.inf
        self._batch: CorrectedBatch | None = None
        self._certificate: Certificate | None = None

    @classmethod
    def is_asked_for(cls, options: RunConfig) -> bool:
        return options.expect_exact is not None

    def open(self, run: RunParts) -> None:
        self._run, self._layout = run, run.settings.layout

    @collective
    def start(self, run: RunParts) -> None:
        if run.source is None:
            self._begin_certificate()

    @collective
    def after_push(self, push: Any, version: str) -> dict[str, float]:
        """Learn what the servers are: one may have been started again since, as another release."""
        self._learn(push.servers)
        return {}

    @collective
    def after_join(self, servers: WeightServers, version: str) -> None:
        """Learn what the servers are that join."""
        self._learn(servers)

    @collective
    def _learn(self, servers: WeightServers) -> None:
        found = broadcast_made(lambda: self._ask_servers(servers))
        if not found:  # all have left, or are silent: they are asked after the next push
            return
        if self._servers is None:
            self._servers = found
            self._dtype = getattr(torch, found[0]["number_type"])
            self._begin_certificate()
            return
        # in place, as the certificate's part has this list
        self._servers += [one for one in found if one not in self._servers]

    def _ask_servers(self, servers: WeightServers) -> list[dict[str, Any]]:
        """Release and modes of each that answers; on rank 0.

        Raises:
            StartupError: they give log-probs of another number type than the run's, or of several.
            RolloutError: one refuses to tell.
        """
        client, found = servers.client, []
        for url, info in servers.loop.call(_infos(client, servers.urls)).items():
            engine = client.engine_of(url)
            found.append(
                {
                    "url": url,
                    "engine": engine.name,
                    "release": engine.version_support(info).version,
                    "dtype": engine.dtype(info),
                    "number_type": engine.logprob_type(info),
                    "batch_invariant": engine.batch_invariance_problem(info) is None,
                }
            )
        of_all = [*(self._servers or []), *found]
        if len(kinds := {one["number_type"]: one["url"] for one in of_all}) > 1:
            told = ", ".join(f"{kind} at {url}" for kind, url in kinds.items())
            raise StartupError(
                f"--rollout-expect-exact: servers give log-probs of several number types ({told}); start all "
                "of them alike"
            )
        return found

    def _begin_certificate(self) -> None:
        if not self._layout.is_job_reporter:
            return
        from megatron_rl_corr.mcore import versions  # which imports Megatron

        args, layout = self._run.settings.args, self._layout
        given = vars(args)
        modes = {name: given[name] for name in MODES if name in given}
        modes["attention_backend"] = args.attention_backend.name
        modes |= {name: given[name] for name in SIZES} | {"data_parallel_size": layout.dp_size}
        modes |= {
            "params_dtype": str(args.params_dtype).removeprefix("torch."),
            "rollout_batch_invariant": self.options.batch_invariant,
        }
        self._certificate = Certificate.begun(
            Path(self.options.log_dir),
            self.options.expect_exact,
            args.iteration,
            number_type=str(self._dtype).removeprefix("torch."),
            releases={
                "megatron-core": versions.megatron_version,
                "transformer_engine": versions.transformer_engine(),
                "torch": torch.__version__,
            },
            modes=modes,
            servers=self._servers or "none: saved samples",
        )

    def after_scoring(self, scored: CorrectedBatch) -> dict[str, Metric]:
        """The comparison, where there was a pass for old log-probs; its share of the metrics."""
        batch, self._batch, self._seen = scored.batch, scored, []
        if scored.inputs is None:
            return {}
        self._keys = token_keys(self._layout.dp_rank, batch.seq_ids, batch.positions, batch.loss_mask)
        self._rollout = torch.cat([batch.rollout_logprobs, batch.rollout_logprobs.new_zeros(1)])
        if not scored.has_old_logprobs:
            return {}
        logprobs = scored.inputs.old_logprobs
        return self._compared(torch.arange(len(logprobs), device=logprobs.device), logprobs)

    def in_training_pass(self, micro: Microbatch, logprobs: Tensor) -> dict[str, Metric]:
        return self._compared(micro.places.t().reshape(-1), logprobs)

    def _compared(self, places: Tensor, logprobs: Tensor) -> dict[str, Metric]:
        self._seen.append((places, logprobs))
        return exact_metrics(
            logprobs,
            self._rollout[places],
            self._keys[places],
            allowed=self.options.expect_exact,
            dtype=self._dtype,
        )

    def stops_update(self, numbers: dict[str, float]) -> bool:
        self._first = numbers.pop(FIRST, math.inf)
        return numbers.get("exact/tokens_apart", 0.0) > 0

    @collective
    def why_stopped(self, numbers: Mapping[str, float]) -> Exception | None:
        """The first token that is apart, with all that is known of it; on the job's last rank."""
        token = self._with_origin(self._told(self._own_token()))
        if token is None or not self._layout.is_job_reporter:
            return None
        step = self._batch.iteration + 1
        self._certificate.refute(step, token)
        return InexactRun(message(self.options, step, token, numbers))

    def _own_token(self) -> dict[str, Any] | None:
        """The first token that is apart, on ranks that have it."""
        if math.isinf(self._first) or math.isnan(self._first):
            return None
        key = int(self._first)
        for places, logprobs in self._seen:
            at = (self._keys[places] == key).nonzero()
            if len(at):
                at = int(at[0, 0])
                place = int(places[at])
                p, q = logprobs[at : at + 1], self._rollout[place : place + 1]
                replica, sample, position = place_of_key(key)
                return {
                    "replica": replica,
                    "sample": sample,
                    "position": position + 1,  # of the label, which the position before predicts
                    "token_id": int(self._batch.batch.labels[place]),
                    "log_p_train": float(p),
                    "log_q_server": float(q),
                    "ulps": float(ulps_apart(p, q, self._dtype)),
                    "number_type": str(self._dtype).removeprefix("torch."),
                }
        return None

    @collective
    def _with_origin(self, token: dict[str, Any] | None) -> dict[str, Any] | None:
        """The token with its server, weights and prompt, which the replica's data leader knows."""
        origin = None
        if token is not None and self._layout.is_data_leader and self._layout.dp_rank == token["replica"]:
            sample = self._batch.forward.samples[token["sample"]]
            at = token["position"] - len(sample.prompt_ids)
            spans = [one for one in sample.weight_versions if one.start <= at < one.end]
            origin = {
                "server": sample.server,
                "weight_version": spans[0].version if spans else "not known",
                "token": at,
                "prompt": sample.prompt_index,
                "sample_of_prompt": sample.sample_index,
            }
        origin = self._told(origin)
        return token if token is None else token | (origin or {})

    @collective
    def _told[Thing](self, thing: Thing | None) -> Thing | None:
        """What the first rank that has one tells all."""
        things: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(things, thing)
        return next((one for one in things if one is not None), None)

    def end_step(self, ended: EndedStep) -> None:
        """Count a batch that held, on the job's last rank."""
        numbers = self._run.reports.numbers
        if self._certificate is not None and "exact/tokens" in numbers:
            self._certificate.add(ended.number, self._batch.number, numbers)


FEATURE = ExactFeature
