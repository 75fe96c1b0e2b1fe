"""Splits the log-ratio of a few samples' tokens into named terms, one forward pass for each, every N batches.

T' tokens of the samples on this context-parallel rank.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl_corr.config.run import RunConfig
from megatron_rl_corr.core.ledger_verdict import NOISE, UNEXPLAINED, UNUSED, verdict_line
from megatron_rl_corr.engines.errors import RolloutError
from megatron_rl_corr.features.ledger.causes import Cause, CauseSearch, Divided, Rest
from megatron_rl_corr.features.ledger.chain import split_log_ratio
from megatron_rl_corr.features.ledger.distances import ListedTokens, distance_metrics
from megatron_rl_corr.features.ledger.draw import draw_order, drawn_count
from megatron_rl_corr.features.ledger.layouts import MODULES, MovedParts, layouts_of, silenced
from megatron_rl_corr.features.ledger.metrics import (
    cause_metrics,
    ledger_metrics,
    own_metrics,
    surplus_metrics,
    temperature_metrics,
)
from megatron_rl_corr.features.ledger.parts import (
    ABOUT_ALL,
    Node,
    experts_of_model,
    layers_of_model,
    name_of_experts,
    name_of_layers,
)
from megatron_rl_corr.features.ledger.places import (
    COLUMNS,
    RestByPlace,
    engine_table,
    named_places,
    routed_table,
    server_places,
    server_table,
)
from megatron_rl_corr.features.ledger.prefill import PrefillScores, ServerPrefill
from megatron_rl_corr.features.ledger.share import SharePacks, share_packs, third_of, unit_of
from megatron_rl_corr.features.ledger.suspects import (
    LEAST_FIT_OF_PART,
    OWN_ROUTES,
    SWITCHED,
    Suspect,
    rounding_otherwise,
    suspects_of,
    without_experts,
)
from megatron_rl_corr.features.ledger.weights import (
    KeptWeights,
    OldParts,
    Round,
    RoundedParts,
    rounded_in_place,
    rounding_of,
)
from megatron_rl_corr.mcore import compat
from megatron_rl_corr.mcore.feature import CorrectedBatch, EndedStep, Feature, RunParts
from megatron_rl_corr.mcore.forward import LogprobSettings, compute_log_probs
from megatron_rl_corr.mcore.number_types import trained_type
from megatron_rl_corr.mcore.serving import WeightPush
from megatron_rl_corr.models.hybrid import layers_per_block
from megatron_rl_corr.moe.routes import Routes
from megatron_rl_corr.reduce.collectives import collective
from megatron_rl_corr.reduce.failure import StartupError, broadcast_made, communication_device
from megatron_rl_corr.reduce.metrics import Metric

HALF = {"bfloat16": torch.bfloat16, "float16": torch.float16}
ROUNDED = {"fp8_weights": "fp8_blockwise", "int4_weights": "int4_group"}
"""Suspect -> how its weights are rounded, as --rollout-push-rounding has it."""
EXPLAINED = 0.9
"""Share of the rest's square from which on causes leave nothing that a part without effect would explain."""
MOST_OF_REST = 0.5
"""Share of the square of routing and rest that the rest has alone, for experts to be tried."""


@dataclass(frozen=True)
class _Measured:
    """A batch that is measured, and the samples of it."""

    scored: CorrectedBatch
    packs: SharePacks

    @property
    def number(self) -> int:
        return self.scored.number


@dataclass(frozen=True)
class _Lags:
    """Versions since each token was sampled."""

    of_tokens: Tensor | None
    """[T'] int64, on the last stage."""
    kept: list[int]
    """Lags of tokens whose weights are known, 0 first."""
    most: int
    """The one of these that most tokens have."""


@dataclass(frozen=True)
class _Passes:
    """What the trainer's passes found, on the last stage."""

    trained: Tensor
    """[T'] log-probs of the policy that trains."""
    entropy: Tensor
    """[T'] of its distributions."""
    listed: Tensor | None
    """[T', K] log-probs of the ids that the servers list; None: they are not asked to."""
    behind: dict[str, Tensor]
    """Step of the chain -> [T'] log-probs behind it."""
    known: dict[str, Tensor]
    """Step -> [T'] bool: the tokens whose policy behind it is known, where that is not all."""


class LedgerFeature(Feature):
    """--rollout-ledger-interval: with 10 it measures batches 0, 10, 20 and so on."""

    def __init__(self, options: RunConfig):
        super().__init__(options)
        self._kept: KeptWeights | None = None
        self._round: Round | None = None
        self._types: tuple[str, ...] | None = None
        """What servers compute in; None: not asked yet."""
        self._told_memory = False
        self.absent: dict[str, str] = {}
        """Term that no pass of this run takes -> why."""

    @classmethod
    def is_asked_for(cls, options: RunConfig) -> bool:
        return options.ledger_interval is not None

    @classmethod
    def check_arguments(cls, args: argparse.Namespace) -> None:
        for name in ("fp8", "fp4"):
            if args.rollout_ledger_interval is not None and vars(args).get(name):
                raise ValueError(
                    f"--{name}-format {vars(args)[name]} with --rollout-ledger-interval: scales and "
                    "quantised weights are kept between passes, and would be those of other weights; train "
                    "in 16 bits, or leave the ledger out"
                )

    def open(self, run: RunParts) -> None:
        self._run, self._layout, options = run, run.settings.layout, self.options
        self._trained = trained_type(run.settings.args)
        self._head = self._float32_head()
        chunks = compat.unwrapped(run.model)
        config = chunks[0].config
        self._suspects = suspects_of(run.settings.args, config, HALF.get(self._trained, torch.float32))
        if self._suspects and options.router_replay == "R3":
            self._suspects.append(OWN_ROUTES)
        self._layers = layers_of_model(config.num_layers // max(map(layers_per_block, chunks)))
        self._experts = experts_of_model(config.num_moe_experts or 0)
        self._layouts = {}
        if self._suspects and options.ledger_layouts == "on":
            self._layouts = layouts_of(run.settings.args, config)
        versions = options.max_lag + bool(self._suspects)  # and the one before the oldest, as a suspect
        if versions:
            self._kept = KeptWeights(run.exporter.parameters, versions)
        self._prefill = None
        plain = options.temperature == 1 and not run.collector.sampling.truncated
        if not plain:
            self.absent["decode"] = "servers score at temperature 1 over the whole vocabulary"
        elif options.colocate:
            self.absent["decode"] = "--rollout-colocate: servers have no memory while the trainer computes"
        else:
            self._prefill = self._server_prefill()
        if run.settings.args.num_experts and options.router_replay in ("off", "R2"):
            self.absent["routing"] = "servers are asked for their experts with --router-replay compare"

    def _server_prefill(self) -> ServerPrefill:
        top, vocab_size = self.options.ledger_top or 0, self._run.settings.vocab_size
        if top > vocab_size:
            raise ValueError(
                f"--rollout-ledger-top {top} asks for more ids than the vocabulary has; use at most "
                f"{vocab_size}"
            )
        return ServerPrefill(self._run.source, self._layout, vocab_size, top)

    def _float32_head(self) -> LogprobSettings | None:
        """Settings of a pass with a float32 output layer; None where it is so, or can't be."""
        run, settings = self._run, self._run.logprob_settings
        if self._trained not in HALF or settings.fp32_lm_head:
            return None
        reasons = {
            "this model has no hook behind its last layer": not compat.has_output_processor(
                compat.unwrapped(run.model)
            ),
            "truncated sampling takes Megatron's logits": run.collector.sampling.truncated,
            "--mtp-num-layers takes Megatron's logits": bool(run.settings.args.mtp_num_layers),
        }
        reason = next((reason for reason, holds in reasons.items() if holds), None)
        if reason is not None:
            self.absent["head"] = reason
            return None
        return replace(settings, from_hidden=True, before_copies=False, fp32_lm_head=True)

    @collective
    def after_push(self, push: WeightPush, version: str) -> dict[str, float]:
        """Learn once what servers compute in, which says what a push rounds."""
        if self._types is not None:
            return {}
        self._types = broadcast_made(self._ask_types)
        options, shard = self.options, self._layout.shard
        rounds, dtype = options.push_rounding, None
        halves = [HALF[one] for one in self._types if one in HALF]
        if self._trained in ("float32", "tf32") and halves:
            if len(halves) == len(self._types) == 1:
                dtype = halves[0]
            else:
                self.absent["rounding"] = "servers compute in several number types: " + ", ".join(self._types)
        if push.servers.quantization is not None:
            self.absent["rounding"] = "the servers have FP8 weights"
        elif shard.expert_tp_size > 1 and (rounds != "none" or dtype is not None):
            self.absent["rounding"] = "--expert-tensor-parallel-size cuts experts, which a pass would gather"
        if "rounding" not in self.absent:
            self._round = rounding_of(rounds, dtype)
        if dist.get_rank() == 0:
            for name, reason in self.absent.items():
                print(
                    f"[rollout] ledger: no pass takes {name}, which stays in the rest: {reason}", flush=True
                )
        return {}

    def _ask_types(self) -> tuple[str, ...]:
        """The number types of all servers that tell; on rank 0.

        Raises:
            StartupError: one lists fewer ids than are asked for.
        """
        client, loop = self._run.source.client, self._run.source.loop
        try:
            infos = loop.call(client.server_info())
        except RolloutError:
            return ()
        engines = [client.engine_of(url) for url in client.base_urls]
        pairs = list(zip(engines, infos, strict=True))
        for url, (engine, info) in zip(client.base_urls, pairs, strict=True):
            if (self.options.ledger_top or 0) > (most := engine.most_likeliest(info)):
                raise StartupError(
                    f"--rollout-ledger-top {self.options.ledger_top}: {url} was started to list at most "
                    f"{most} ids; ask for fewer, or start it with a larger bound"
                )
        return tuple(sorted({"fp8" if one.is_quantized(info) else one.dtype(info) for one, info in pairs}))

    @property
    def _chosen_by_outcome(self) -> bool:
        """Tokens of the batch are not what a policy draws: truncated, or left out by what came of them."""
        options = self.options
        chosen = options.group_filter is not None or options.oversampling > 1
        return chosen or options.truncated_samples != "train" or self._run.collector.sampling.truncated

    @property
    def _noise(self) -> float:
        """mean |D| that rounding explains, of the coarsest number type of both sides."""
        return max(NOISE[one] for one in (self._trained, *(self._types or ())) if one in NOISE)

    @collective
    def after_scoring(self, scored: CorrectedBatch) -> dict[str, Metric]:
        """The ledger of a batch that is measured, this rank's share, on the last stage; {} of others.

        Every rank calls it. Training does not notice: passes are forward only, and weights are put back byte
        for byte.
        """
        found = {} if scored.number % self.options.ledger_interval else self._measure(scored)
        if self._kept is not None and self._needs(scored.number):
            with scored.forward.gathered():
                self._kept.take(scored.number)
            if dist.get_rank() == 0 and not self._told_memory:
                self._told_memory = True
                print(
                    f"[rollout] ledger: {self._kept.nbytes / 2**20:.0f} MiB of the host's memory on each "
                    f"rank for the weights of a version; at most {self._kept.most} are kept",
                    flush=True,
                )
        return found

    def _needs(self, number: int) -> bool:
        """True if a batch that is measured may have samples of this version when it is an earlier one."""
        interval = self.options.ledger_interval
        return interval - number % interval <= self._kept.most

    @collective
    def _measure(self, scored: CorrectedBatch) -> dict[str, Metric]:
        began, forward, layout = time.perf_counter(), scored.forward, self._layout
        batch, shape = forward.batch, self._run.shape
        samples = self._drawn(scored)
        asked, trajectories = None, [forward.samples[one] for one in samples if forward.samples]
        if self._prefill is not None:
            asked = self._prefill.begin(trajectories, scored.number)  # servers compute meanwhile
        measured = _Measured(scored, share_packs(batch, samples, shape, layout))
        part = measured.packs.batch
        servers = server_places(trajectories, len(samples), self.options.urls, layout)
        held, ranks = None, layout.expert_groups.size
        if ranks > 1:
            held = scored.routes.shares_of_ranks(measured.packs.places[:-1], ranks)
        with forward.gathered(), compat.attention_logits_kept(forward.model):
            lags = self._lags(measured)
            behind = self._passes_behind(measured, lags)
            prefill = None if self._prefill is None else self._prefill.finish(asked, trajectories, part)
            passes = self._with_trained(measured, lags, behind, prefill)
            scored_by_server = None if prefill is None else prefill.logprobs
            terms, valid, rest, routed = {}, None, None, None
            if passes is not None:
                terms = split_log_ratio(
                    passes.trained, passes.behind, scored_by_server, part.rollout_logprobs
                )
                valid = part.loss_mask & part.rollout_logprobs.isfinite() & passes.trained.isfinite()
                e = sum(terms[name] for name in UNEXPLAINED if name in terms)
                rest = Rest(torch.where(valid, e, 0.0), valid, passes.trained + passes.entropy)
                routed = replace(rest, e=torch.where(valid, terms["rest"], 0.0))
            by_place = None
            if rest is not None:
                by_place = RestByPlace(rest, part, servers, self._noise, layout.groups)
            by_server, blamed = self._by_server(by_place)
            causes = self._causes(measured, rest, routed, lags, servers, blamed)
        listed = self._listed(passes, prefill, valid)
        if passes is None:
            return {}
        trained, known = passes.trained, passes.known
        found = own_metrics(time.perf_counter() - began, self._noise, trained)
        found |= cause_metrics(causes, len(blamed), rest) | by_server | self._by_others(by_place, held)
        if not self._chosen_by_outcome:
            found |= surplus_metrics(trained + passes.entropy, valid)
        if prefill is not None:
            is_scored = prefill.logprobs.isfinite()
            known = known | {"decode": is_scored}
            found |= temperature_metrics(terms["decode"], trained + passes.entropy, valid & is_scored)
        return ledger_metrics(terms, valid, third_of(part), known) | found | listed

    @collective
    def _drawn(self, scored: CorrectedBatch) -> list[int]:
        """Places of the samples that are measured: as many on every replica, as rows of padding must be."""
        lengths, unit = scored.forward.batch.lengths, unit_of(scored.forward.model, self._run.shape)
        order = draw_order(
            len(lengths), seed=self._run.settings.args.seed, batch=scored.number, replica=self._layout.dp_rank
        )
        count = drawn_count(self.options.ledger_share, lengths[order], unit)
        most = torch.tensor([count], device=communication_device())
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self._layout.dp_cp_group)
        return sorted(order[: int(most)].tolist())

    @collective
    def _by_server(self, by_place: RestByPlace | None) -> tuple[dict[str, Metric], list[int]]:
        """(sums of the rest by server; those that are named, alike on all ranks): one all-reduce.

        by_place: None on ranks of other stages.
        """
        count = len(self.options.urls)
        if count < 2:
            return {}, []
        rows = torch.zeros(count, COLUMNS, dtype=torch.float64, device=communication_device())
        if by_place is not None:
            rows = by_place.of_samples(by_place.servers, count)
        whole = rows.clone()
        dist.all_reduce(whole)
        return server_table(rows), named_places((whole / self._layout.shard.tp_size).tolist())

    @collective
    def _by_others(self, by_place: RestByPlace, held: Tensor | None) -> dict[str, Metric]:
        """Sums of the rest by engine and by expert-parallel rank, where there are several."""
        found, part = {}, by_place.part
        if part.engine_ids is not None:
            found = engine_table(by_place.of_samples(part.engine_ids, len(part.engines)), part.engines)
        if held is not None:
            found |= routed_table(by_place.of_experts(held))
        return found

    @collective
    def _passes_behind(self, measured: _Measured, lags: _Lags) -> list[dict[str, Tensor | None]]:
        """The passes behind the policy that trains, which need no answer of the servers.

        Returns:
            For each lag that is kept: step of the chain -> [T'] log-probs, on the last stage.
        """
        found = []
        for lag in lags.kept:
            with self._weights_of(measured.number, lag):
                found.append(self._passes_of_weights(measured, is_now=lag == 0))
        return found

    @collective
    def _with_trained(
        self,
        measured: _Measured,
        lags: _Lags,
        behind: Sequence[dict[str, Tensor | None]],
        prefill: PrefillScores | None,
    ) -> _Passes | None:
        """The passes with that of the policy that trains, on the last stage; None on others."""
        ids = prefill.top_ids if self.options.ledger_top else None
        policy = self._policy(measured, ids=ids)
        if policy is None:
            return None
        (trained, entropy, *listed), passes = policy, {}
        of_tokens, versions = lags.of_tokens, lags.kept
        for lag, found in zip(versions, behind, strict=True):
            found.setdefault("staleness", trained)
            # With the weights of now also what is of others that are not known any more.
            here = of_tokens == lag if lag else ~torch.isin(of_tokens, of_tokens.new_tensor(versions[1:]))
            for name, value in found.items():
                passes[name] = torch.where(here, value, passes.get(name, value))
        of_ids = listed[0] if listed else None
        if not self.options.max_lag:
            passes.pop("staleness")
            return _Passes(trained, entropy, of_ids, passes, {})
        known = {"staleness": torch.isin(of_tokens, of_tokens.new_tensor(versions))}
        return _Passes(trained, entropy, of_ids, passes, known)

    def _weights_of(self, number: int, lag: int) -> AbstractContextManager:
        """Context in which the model has the weights of so many versions before a batch."""
        return self._kept.in_place(number - lag) if lag else nullcontext()

    @collective
    def _listed(
        self, passes: _Passes | None, prefill: PrefillScores | None, valid: Tensor | None
    ) -> dict[str, Metric]:
        """How far the distributions are apart by the servers' lists; {} where none are asked for."""
        if not self.options.ledger_top:
            return {}
        tokens = None
        if passes is not None:
            tokens = ListedTokens(
                prefill.top_ids, prefill.top, passes.listed, passes.trained - prefill.logprobs, valid
            )
        return distance_metrics(tokens, self._run.settings.vocab_size, self._noise)

    @collective
    def _passes_of_weights(self, measured: _Measured, *, is_now: bool) -> dict[str, Tensor]:
        """Log-probs behind each step under the weights that the model has, by the step's name.

        is_now: they are the live ones, so that nothing is stale.
        """
        found = {} if is_now else {"staleness": self._log_probs(measured)}
        settings, routed = self._run.logprob_settings, self.options.router_replay in ("compare", "R3")
        if self.options.router_replay == "compare":
            found["routing"] = self._log_probs(measured, routed=True)
        if self._head is not None:
            settings = self._head
            found["head"] = self._log_probs(measured, settings, routed=routed)
        if self._round is not None:
            with self._rounded():
                found["rounding"] = self._log_probs(measured, settings, routed=routed)
        return found

    @collective
    def _causes(
        self,
        measured: _Measured,
        rest: Rest | None,
        routed: Rest | None,
        lags: _Lags,
        servers: Tensor,
        blamed: Sequence[int],
    ) -> tuple[Cause, ...]:
        """What the rest looks like, alike on all ranks, of the tokens of the version that most have.

        Args:
            rest: with the routing's term; None on ranks of other stages.
            routed: without it.
            servers: [S'] of each sample.
            blamed: the servers that are named, whose samples alone are looked at then.
        """

        def log_probs(suspects: Sequence[Suspect], rounds_otherwise: bool) -> Tensor | None:
            with ExitStack() as changes:
                for changed in [one.changed for one in suspects] + [rounding_otherwise] * rounds_otherwise:
                    changes.enter_context(changed(measured.scored.forward.model))
                return self._log_probs(measured, self._head, routed=False if OWN_ROUTES in suspects else None)

        moved = self._moved_layers()
        divided = [*moved.values(), *self._old_weights(measured.number - lags.most - 1)]
        divided += self._rounded_layers()
        search = CauseSearch(self._suspects, log_probs, self._noise, self._layout.shard.tp_size, divided)
        whole = here = rest
        if rest is not None:
            looked_at = lags.of_tokens == lags.most
            whole = here = rest.only(looked_at)
            if blamed:
                of_samples = torch.isin(servers, servers.new_tensor(blamed))
                looked_at = looked_at & of_samples[measured.packs.batch.seq_ids]
            here, routed = rest.only(looked_at), routed.only(looked_at)
        if not self._suspects or not search.needs_causes(here):
            return ()
        share = search.square_of(here) / search.square_of(whole)
        # Other experts that are chosen look like others in their places: routes are known, and are not it.
        knows_routes = self._experts and self.options.router_replay in ("compare", "R3")
        if knows_routes and search.square_of(routed) >= MOST_OF_REST * search.square_of(here):
            search = replace(search, divided=[*divided, self._other_experts()])
        with self._weights_of(measured.number, lags.most), self._rounded():
            causes = tuple(replace(one, share=share * one.share) for one in search.causes(here))
            if not moved or sum(one.share for one in causes) >= EXPLAINED * share:
                return causes
            idle = [
                Cause(name.replace("without", UNUSED), 0.0, 0.0)
                for name, one in moved.items()
                if name.startswith("without/") and search.changes_nothing(one, here)
            ]
            if causes or idle:
                return (*causes, *idle)
            places = replace(search, suspects=self._other_modules()).likeliest(here)
            return tuple(replace(one, share=share * one.share) for one in places)

    def _old_weights(self, before: int) -> list[Divided]:
        """Parts of the model with the weights of this version, if they are kept."""
        layers = self._layers
        if self._kept is None or before not in self._kept:
            return []
        rounded = None if self._round is None else self._rounded_parts(self._round)
        old = OldParts(self._kept, before, rounded)
        return [Divided(layers, old.changed, _named_layers("weights", layers, "previous"))]

    def _moved_layers(self) -> dict[str, Divided]:
        """Layers with their weights in other places, or without some, by the name of the cause."""
        layers = tuple(one for one in self._layers if one.isdigit())
        return {
            name: Divided(
                layers,
                MovedParts(self._run.exporter.parameters, self._layout, wrong).changed,
                _named_layers(name, layers, "all"),
                sizes=SWITCHED,
            )
            for name, wrong in self._layouts.items()
        }

    def _other_modules(self) -> list[Suspect]:
        """Each layer without its queries, attention or MLP: what is wrong there is no known layout."""
        layers = [one for one in self._layers if one.isdigit()]
        return [
            Suspect(
                f"places/{kind}/layer_{layer}",
                partial(silenced, kind, layer),
                SWITCHED,
                len(MODULES) * len(layers),
                LEAST_FIT_OF_PART,
            )
            for kind in MODULES
            for layer in layers
        ]

    def _rounded_layers(self) -> list[Divided]:
        """Parts of the model with weights as quantised servers have them, where a push does not round them
        so.
        """
        if "rounding" in self.absent or self._layout.shard.expert_tp_size > 1:
            return []
        kinds = {name: kind for name, kind in ROUNDED.items() if kind != self.options.push_rounding}
        return [
            Divided(
                self._layers,
                self._rounded_parts(rounding_of(kind, None)).changed,
                _named_layers(name, self._layers, "all"),
            )
            for name, kind in kinds.items()
        ]

    def _rounded_parts(self, round_weight: Round) -> RoundedParts:
        return RoundedParts(self._run.exporter.parameters, self._layout, round_weight)

    def _other_experts(self) -> Divided:
        """The model without some of its experts."""
        experts, ranks = self._experts, self._layout.expert_groups.size

        def name(some: Node) -> str | None:
            return name_of_experts(some, experts, ranks)

        return Divided(experts, without_experts, name, ABOUT_ALL, LEAST_FIT_OF_PART)

    @collective
    def _rounded(self) -> AbstractContextManager:
        """Context in which the model has the weights as servers have them."""
        if self._round is None:
            return nullcontext()
        return rounded_in_place(self._run.exporter.parameters, self._layout, self._round)

    @collective
    def _lags(self, measured: _Measured) -> _Lags:
        """Versions since each token was sampled. Ranks agree on them: one all-reduce, with a lag."""
        part, most = measured.packs.batch, self.options.max_lag
        if not most:
            return _Lags(torch.zeros_like(part.seq_ids), [0], 0)
        lags = part.token_lags
        seen = torch.zeros(most + 1, dtype=torch.int64, device=part.seq_ids.device)
        if lags is not None:
            for lag in range(most + 1):
                seen[lag] = ((lags == lag) & part.loss_mask).sum()
        dist.all_reduce(seen)
        tokens = seen.tolist()
        kept = [lag for lag in range(1, most + 1) if tokens[lag] and measured.number - lag in self._kept]
        return _Lags(lags, [0, *kept], max([0, *kept], key=tokens.__getitem__))

    @collective
    def _log_probs(
        self, measured: _Measured, settings: LogprobSettings | None = None, *, routed: bool | None = None
    ) -> Tensor | None:
        """[T'] float32, the first of `_policy`."""
        found = self._policy(measured, settings, routed=routed)
        return None if found is None else found[0]

    @collective
    def _policy(
        self,
        measured: _Measured,
        settings: LogprobSettings | None = None,
        *,
        routed: bool | None = None,
        ids: Tensor | None = None,
    ) -> tuple[Tensor, ...] | None:
        """Log-probs and entropies, [T'] float32 each, under the weights that the model has, and with ids
        their log-probs [T', K]; None on stages but the last.

        Args:
            measured: the samples.
            settings: of the log-probs; None: as training has them.
            routed: with the servers' experts; None: as training is.
            ids: [T', K] int32, distinct for a token.
        """
        scored = measured.scored
        steering: AbstractContextManager = nullcontext()
        routes = Routes()
        if self.options.router_replay == "R3" if routed is None else routed:
            routes, steering = scored.routes, scored.routes.replaying()
        with steering:
            packs = measured.packs if ids is None else replace(measured.packs, further_ids=ids)
            return compute_log_probs(
                scored.forward.model, packs, settings or scored.forward.settings, routes=routes
            )

    def end_step(self, ended: EndedStep) -> None:
        """Print the verdict of a batch that was measured, on the job's last rank."""
        numbers = self._run.reports.numbers
        if self._layout.is_job_reporter and "ledger/tokens" in numbers:
            line = verdict_line(numbers, self.absent, self.options.urls)
            print(f"[rollout] ledger of step {ended.number}: {line}", flush=True)


def _named_layers(kind: str, layers: Node, whole: str) -> Callable[[Node], str]:
    return lambda changed: f"{kind}/{name_of_layers(changed, layers, whole)}"


FEATURE = LedgerFeature
