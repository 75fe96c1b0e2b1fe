"""The seam between the package and a rollout engine: an `Engine` builds requests and parses answers,
and sends nothing.

A new engine is a folder beside this file, whose module has `ENGINE`, an object of a subclass of `Engine`, and
an entry in config/run.py ENGINES. What it does not define raises `UnsupportedByEngine`. What only an
examination asks for is in `inspection`.

P prompt tokens, R response tokens, M layers with experts, k experts a token.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from megatron_rl_corr.engines.errors import RolloutServerError
from megatron_rl_corr.engines.inspection import Inspection
from megatron_rl_corr.engines.memory import MemoryRelease
from megatron_rl_corr.engines.routes import ExpertShape
from megatron_rl_corr.engines.sampling_limits import check_limits
from megatron_rl_corr.engines.trajectory import SamplingParams, Trajectory
from megatron_rl_corr.engines.types import (
    EngineLimits,
    NamedTensor,
    Part,
    Progress,
    Request,
    ServerChecksums,
    ServerRanks,
    Transport,
)


class Engine(Inspection, MemoryRelease, Protocol):
    """One program that rollout servers run: its requests, answers and limits; `Inspection`,
    `MemoryRelease` have more.

    Methods without a transport among their arguments send nothing. Those that return a `Request` may
    return None for a step that the engine does not have and does not need.
    """

    name: str
    """As users write it, for instance "SGLang"."""
    limits: EngineLimits
    generate_endpoint: str
    """The path that `generate` sends its request to, for messages."""

    # Addresses and connections

    def checked_urls(self, urls: Sequence[str]) -> tuple[str, ...]:
        """The addresses in their canonical form. Raises ValueError for what is no address, and for
        one given twice.
        """
        raise self._unsupported("addresses")

    def open_transport(
        self,
        urls: Sequence[str],
        *,
        timeout_s: float,
        connect_timeout_s: float,
        api_key: str | None = None,
        ca_file: str | Path | None = None,
    ) -> Transport:
        """A transport to these servers. Raises ValueError for a key or a file that can't be used."""
        raise self._unsupported("a transport")

    async def recognizes(self, url: str, transport: Transport, timeout_s: float) -> bool:
        """True if this engine, or a router of its servers, answers there. Raises
        RolloutServerError for no answer.
        """
        raise self._unsupported("being recognized")

    async def find_servers(
        self, urls: Sequence[str], transport: Transport, timeout_s: float
    ) -> tuple[str, ...]:
        """The addresses, each router's replaced by those of the servers behind it."""
        return tuple(urls)

    def progress(self, transport: Transport, url: str) -> Progress:
        """A watch of one server."""
        raise self._unsupported("progress of requests")

    # Samples

    def check_sampling(self, sampling: SamplingParams) -> None:
        """Raise ValueError, naming the field, the value and the remedy, where the limits forbid
        these parameters.
        """
        check_limits(self.name, self.limits, sampling)

    def sampling_problem(self, server_info: Mapping[str, Any], sampling: SamplingParams) -> str | None:
        """Why this server, as it was started, can't sample so, with the remedy; None: it can."""
        return None

    def batch_invariance_problem(self, server_info: Mapping[str, Any]) -> str | None:
        """Why a token's log-prob may depend on what else this server computes, with the remedy; None: it
        does not.
        """
        return f"`batch_invariant`: {self.name} has no batch-invariant mode that is known; leave it out"

    def logprob_type(self, server_info: Mapping[str, Any]) -> str:
        """The number type that the server's log-probs have, by torch's name."""
        return "float32"

    def sampling_test(self, sampling: SamplingParams) -> Request | None:
        """Ask for a sample that shows which distribution log-probs are of; None: there is
        nothing to find out.
        """
        return None

    def sampling_test_problem(self, answer: Mapping[str, Any], sampling: SamplingParams) -> str | None:
        """What the answer to `sampling_test` says is wrong, with the remedy; None: nothing."""
        return None

    def generate(
        self,
        prompt_ids: Sequence[int] | np.ndarray,
        sampling: SamplingParams,
        request_id: str | None = None,
        *,
        seed: int,
        routed_experts: bool = False,
        routes_from: int = 0,
        cache_key: str | None = None,
    ) -> Request:
        """Ask for one response to one prompt, with a log-prob for every sampled token, and no text.

        Args:
            prompt_ids: P ids, each in the vocabulary; an array is not made a list of.
            sampling: how to sample; where it `needs_mask` the answer must bring the sampling mask, and its
                `top_logprobs` likeliest ids of each token.
            request_id: a name by which `abort_request` can end it.
            seed: in [-2**63, 2**63), for servers that heed one.
            routed_experts: also return which experts each token but the last went to.
            routes_from: leave out the routes of the first tokens.
            cache_key: share keys and values only with requests of the same one.
        """
        raise self._unsupported("sampling")

    def parse(
        self,
        body: bytes,
        *,
        prompt_ids: Tensor,
        prompt_index: int,
        sample_index: int,
        server: str,
        max_new_tokens: int,
        vocab_size: int | None = None,
        truncated: bool = False,
        top_logprobs: int = 0,
        experts: ExpertShape | None = None,
        routes_from: int = 0,
        pushes_retract: bool = False,
        keys: ExpertShape | None = None,
    ) -> Trajectory:
        """The response in the answer to `generate`.

        Args:
            body: of the answer.
            prompt_ids: [P] int64, what was sent.
            prompt_index, sample_index, server: go into the trajectory.
            max_new_tokens: what was asked for; R is at most that.
            vocab_size: every id must be below it.
            truncated: the request had top_p, top_k or min_p, so the trajectory has a support, and its
                log-probs are renormalised on it.
            top_logprobs: the request asked for so many of the likeliest ids of each token.
            experts: the request asked for routed experts of a model of this shape.
            routes_from: the token that they were asked for from.
            pushes_retract: weights change in a pause of mode retract, for an engine that tells how often a
                response was computed anew, but not where.
            keys: the request's `SamplingParams.keys`; given where it has some.

        Returns:
            It, without the routes of tokens that may have been computed anew since they were sampled with.

        Raises:
            RolloutServerError: the answer says that the request failed.
            RolloutProtocolError: the answer contradicts itself or the request.
        """
        raise self._unsupported("sampling")

    # Control: an answer is a dict, as `parse_control` returns it

    def parse_control(self, body: bytes, *, server: str, endpoint: str, status: int) -> dict[str, Any]:
        """The answer to any other request. Raises RolloutServerError for one that says it failed."""
        raise self._unsupported("control requests")

    def health(self) -> Request:
        """Succeeds once the server can sample."""
        raise self._unsupported("health")

    def alive(self) -> Request:
        """Answered at once by a server that is paused, or busy with its weights."""
        raise self._unsupported("alive")

    def holder_alive(self) -> Request:
        """Answered by the process that holds the weights, also while the server is paused; not while that
        process waits in a broadcast.
        """
        raise self._unsupported("holder_alive")

    def server_info(self) -> Request:
        """Version, launch arguments and state."""
        raise self._unsupported("server_info")

    def model_info(self) -> Request:
        """The model, and what its weights are called."""
        raise self._unsupported("model_info")

    def weight_version(self, model_info: Mapping[str, Any]) -> str:
        """The name of the weights in an answer to `model_info`."""
        raise self._unsupported("weight versions")

    def is_quantized(self, server_info: Mapping[str, Any]) -> bool:
        """True if the server computes with weights, or keeps keys and values, of fewer than 16 bits."""
        raise self._unsupported("server_info")

    def dtype(self, server_info: Mapping[str, Any]) -> str:
        """What the server computes in, for instance "bfloat16"."""
        raise self._unsupported("server_info")

    def memory_report(self) -> Request | None:
        """Ask how much memory the server takes; None: it does not tell."""
        return None

    def memory_in_use(self, answer: Mapping[str, Any]) -> dict[str, float]:
        """What for -> GiB on each of its ranks, in an answer to `memory_report`; {}: it does not tell."""
        return {}

    def pause_generation(self, mode: str) -> Request:
        """Stop sampling; new requests wait.

        Args:
            mode: of running requests. abort: they return at once with their tokens so far; in_place:
                they go on later with their keys and values; retract: they go on later, with keys and
                values computed anew.
        """
        raise self._unsupported(f"pause mode {mode}")

    def refuses_while_paused(self, error: RolloutServerError) -> bool:
        """True if a server refused a request for nothing but a pause: sent again after it,
        it will be taken.
        """
        return False

    def continue_generation(self) -> Request:
        """Go on after a pause; harmless without one."""
        raise self._unsupported("pauses")

    def pause_problem(
        self, server_info: Mapping[str, Any], mode: str, *, keyed_cache: bool, samples_ahead: bool
    ) -> str | None:
        """Why this server can't be paused in this mode for a weight update, with the remedy; None: it can.

        Args:
            server_info: the server's.
            mode: as in `pause_generation`.
            keyed_cache: requests name the weights that they are meant for as their cache_key.
            samples_ahead: responses run while weights are updated.
        """
        raise self._unsupported(f"pause mode {mode}")

    def flush_cache(self) -> Request:
        """Forget cached prefixes."""
        raise self._unsupported("flush_cache")

    # Weight updates

    def ranks(self, url: str, server_info: Mapping[str, Any]) -> ServerRanks:
        """How the server is sharded. Raises RolloutProtocolError for several replicas behind one address."""
        raise self._unsupported("weight updates")

    def begin_weight_update(
        self,
        tensors: Mapping[str, Sequence[int]] | None = None,
        *,
        checksums: bool = True,
        changes_follow: bool = False,
    ) -> Request:
        """Open the session that weights must be sent in.

        Args:
            tensors: all that will be sent, Hugging Face name -> shape, for servers that check it;
                None: not known.
            checksums: `weights_checker` will be asked afterwards.
            changes_follow: `begin_changes` may come, in this session or a later one.
        """
        raise self._unsupported("weight updates")

    def changes_problem(self, server_info: Mapping[str, Any]) -> str | None:
        """Why the server can't take pushes of changes alone, with the remedy; None: it can."""
        return f"{self.name} takes pushes of everything only; use `push` full"

    def begin_changes(self, push: str, base: str, stages: int, *, ranks: ServerRanks) -> Request:
        """Expect `weight_changes` in the open session.

        Args:
            push: version that they make.
            base: version that the server has.
            stages: pipeline stages of the trainer, each of which sends its own.
            ranks: of the server.
        """
        raise self._unsupported("pushes of changes")

    def end_weight_update(self) -> Request:
        """Close it."""
        raise self._unsupported("weight updates")

    def update_is_open(self, error: Exception) -> bool:
        """True if `begin_weight_update` failed because an earlier update was broken off before its end."""
        return False

    def init_weights_update_group(
        self,
        master_address: str,
        master_port: int,
        *,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str,
    ) -> Request:
        """Join the process group in which the trainer is rank 0; the server's ranks start at rank_offset."""
        raise self._unsupported("weight transport distributed")

    def destroy_weights_update_group(self, group_name: str) -> Request:
        """Leave that group."""
        raise self._unsupported("weight transport distributed")

    def update_weights_from_distributed(
        self, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]], *, group_name: str
    ) -> Request:
        """Receive one broadcast from rank 0 per name, in order; weights keep their name, and
        cached prefixes stay.

        Args:
            names: Hugging Face names.
            dtypes: for instance "bfloat16".
            shapes: of the whole tensors.
            group_name: as the group was made.
        """
        raise self._unsupported("weight transport distributed")

    def serialized(self, bucket: Sequence[NamedTensor]) -> str:
        """A bucket as text that one tensor-parallel rank of a server on this host can load."""
        raise self._unsupported("weight transport tensor")

    def update_weights_from_tensor(self, entries: Sequence[str]) -> Request:
        """Load a bucket: for each tensor-parallel rank what `serialized` made."""
        raise self._unsupported("weight transport tensor")

    def update_weights_from_disk(self, model_path: str) -> Request:
        """Load a Hugging Face folder, by the path that the server knows it by; the weights
        keep their name.
        """
        raise self._unsupported("weight transport disk")

    def update_weight_version(self, new_version: str) -> Request:
        """Rename the weights; running requests go on."""
        raise self._unsupported("weight versions")

    def server_times(self, body: bytes) -> dict[str, float]:
        """Seconds that the server tells of a response: total_s, and where it measures them queue_s
        and first_token_s.

        first_token_s is from the request to the first token; total_s to the last one.
        """
        return {}

    # Verification of an update

    def weights_checker(self) -> Request:
        """Ask for the server's checksums of its weights."""
        raise self._unsupported("checksums")

    def checksums(
        self, url: str, server_info: Mapping[str, Any], answer: Mapping[str, Any]
    ) -> ServerChecksums:
        """The checksums in an answer to `weights_checker`. Raises RolloutProtocolError for an
        answer without them.
        """
        raise self._unsupported("checksums")

    def checksum(self, tensor: Tensor, device: str) -> str | None:
        """The checksum of a tensor as a server on `device` computes it; None where its
        algorithm is not known.
        """
        return None

    def hashed(self, bucket: Sequence[NamedTensor]) -> Sequence[NamedTensor]:
        """The tensors that a server's checksums are of, once it has loaded a bucket."""
        return bucket

    def server_parameter(self, name: str) -> tuple[str, Part]:
        """The server's name of the parameter that a Hugging Face tensor is a part of, and which part."""
        return name, (-1, 0)

    def held_in(self, parameter: str, held: Container[str]) -> str:
        """The parameter, of those that a server holds, that has this one in it; its own name
        where no other does.
        """
        return parameter

    def held_as(self, parameter: str, held: Container[str]) -> str:
        """The name by which a server that holds `held` has this parameter; its own where it has none."""
        return parameter

    def possible_layouts(self, parts: Mapping[Part, Tensor], *, rank: int, size: int) -> Iterator[Tensor]:
        """What tensor-parallel rank `rank` of `size` may hold of a parameter."""
        return iter(())
