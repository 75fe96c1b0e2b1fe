"""The part of the seam that examines a server: samples and scores in detail, its version,
model and endpoints.

P prompt tokens, R response tokens, K likeliest ids of a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from megatron_rl_corr.engines.routes import ExpertShape
from megatron_rl_corr.engines.trajectory import SamplingParams, VersionSpan
from megatron_rl_corr.engines.types import Request, UnsupportedByEngine


@dataclass(frozen=True)
class KeptIds:
    """The ids that top-p and top-k kept, as a server returned them."""

    ids: list[list[int]]
    """For each of R tokens the ids it was drawn from."""
    logprobs: list[float | None]
    """[R] log-probs of the sampled ids, renormalised on those."""


@dataclass(frozen=True)
class DetailedSample:
    """A sampled response, with the likeliest ids beside each token.

    Example: DetailedSample([1, 2], [7], np.array([-0.9]), np.array([[-0.9, -1.6]]), np.array([[7, 9]])).
    """

    prompt: list[int]
    """[P] ids."""
    output: list[int]
    """[R] ids."""
    logprobs: np.ndarray
    """[R] log-probs of the sampled ids, finite."""
    top: np.ndarray
    """[R, K] log-probs of the likeliest ids, in falling order."""
    top_ids: np.ndarray
    """[R, K] the likeliest ids."""
    kept: KeptIds | str = "they were not returned"
    """What top-p and top-k kept; a text: why that is unknown."""
    routed_ids: int | str | None = None
    """How many expert ids came with P + R - 1 tokens; a text: what is wrong with them; None: none came."""
    retractions: int | None = 0
    """Times that a pause made the server compute the request anew; None: the server does not tell."""
    version_spans: tuple[VersionSpan, ...] | None = None
    """Which weights sampled which tokens; None: the server does not tell."""
    cached_tokens: int | None = None
    """Prompt tokens whose keys and values were cached; None: the server does not tell."""


@dataclass(frozen=True)
class TokenScores:
    """Log-probs of a text's tokens at temperature 1, from a prefill."""

    logprobs: np.ndarray
    """[R] log-probs of the ids after the prompt, finite."""
    top: np.ndarray
    """[R, K] log-probs of the likeliest ids at their positions, in falling order."""
    top_ids: np.ndarray
    """[R, K] the likeliest ids."""
    version: str | None = None
    """The name of the weights that answered; None: the server does not tell."""


@dataclass(frozen=True)
class VersionSupport:
    """What a run can do with a server's version. Example: VersionSupport("0.5.23", "0.5.19 to 0.5.23")."""

    version: str
    tested: str
    """The versions that were tested, oldest and newest."""
    lacks: str = ""
    """What the version does not have and every run needs, for instance "pauses"."""
    note: str = ""
    """A sentence on what the version limits, or on what is not known of it."""


@dataclass(frozen=True)
class ServedModel:
    """The model that a server names; None: it does not tell."""

    path: str | None
    """Its Hugging Face folder or repository."""
    served_name: str | None
    """What clients call it."""
    type: str | None
    """`model_type` of its config.json."""
    weight_version: str | None
    """The name of its weights."""
    is_initial: bool
    """The weights are named as those that the server was started with."""


@dataclass(frozen=True)
class UpdateSupport:
    """How a server's weights can be updated."""

    transports: tuple[str, ...]
    """Some of "distributed", "tensor" and "disk"."""
    session: bool
    """Weights are sent between `Engine.begin_weight_update` and `Engine.end_weight_update`."""
    remark: str = ""
    """What limits it, for messages."""


class Inspection(Protocol):
    """Requests that only an examination of a server sends, and their answers.

    An answer is a dict, as `Engine.parse_control` returns it. What an engine does not define raises
    `UnsupportedByEngine`, and the doctor's row says so.
    """

    name: str
    remedies: Mapping[str, str] = MappingProxyType({})
    """What mends what an examination finds, in this engine's flags: a name in DEFECTS of
    doctor/findings.py -> that.
    """

    renormalises: bool = False
    """Log-probs of a sample under top_p are renormalised on what it kept; False: of the whole vocabulary."""

    most_scored_ids: int = 0
    """Ids that one `score_ids` may have; 0: there is no such request."""

    # Samples and scores

    def detailed_sample(
        self,
        prompt_ids: list[int],
        sampling: SamplingParams,
        *,
        seed: int | None = None,
        likeliest: int,
        sampling_mask: bool = False,
        routed_experts: bool = False,
        request_id: str | None = None,
        cache_key: str | None = None,
    ) -> Request:
        """Ask for one response to one prompt, with log-probs of the likeliest ids at each token.

        Args:
            prompt_ids: P ids, each in the vocabulary.
            sampling: how to sample; unlike `Engine.generate`, also what the limits forbid.
            seed: in [-2**63, 2**63); None: the server's choice.
            likeliest: K.
            sampling_mask: also return the ids that top-p and top-k kept.
            routed_experts: also return which experts each token but the last went to.
            request_id: a name by which `abort_request` can end it.
            cache_key: share keys and values only with requests of the same one.
        """
        raise self._unsupported("samples with the likeliest ids")

    def parse_detailed_sample(
        self,
        answer: Mapping[str, Any],
        *,
        server: str,
        prompt_ids: list[int],
        tokens: int,
        experts: ExpertShape | None = None,
    ) -> DetailedSample:
        """The response in the answer to `detailed_sample`.

        Args:
            answer: to the request.
            server: its address, for errors.
            prompt_ids: P ids, what was sent.
            tokens: most tokens of the response, for errors.
            experts: how the model routes; None: unknown, so that only the number of expert ids is checked.

        Raises:
            RolloutServerError: the answer says that the request failed.
            RolloutProtocolError: log-probs are missing, not finite, or of other ids than those sampled.
        """
        raise self._unsupported("samples with the likeliest ids")

    def score(
        self, prompt_ids: list[int], output_ids: list[int], *, likeliest: int, cache_key: str | None = None
    ) -> Request:
        """Ask for log-probs of given tokens from one prefill that reads no cached keys and values.

        Args:
            prompt_ids: P ids, each in the vocabulary.
            output_ids: R ids after them, which are scored.
            likeliest: K.
            cache_key: as in `detailed_sample`.
        """
        raise self._unsupported("scores of given tokens")

    def parse_scores(
        self, answer: Mapping[str, Any], *, server: str, output_ids: list[int], vocab_size: int
    ) -> TokenScores:
        """The scores in the answer to `score`. Raises as `parse_detailed_sample`.

        Args:
            answer: to the request.
            server: its address, for errors.
            output_ids: R ids, what was sent after the prompt.
            vocab_size: of the model.
        """
        raise self._unsupported("scores of given tokens")

    def most_likeliest(self, server_info: Mapping[str, Any]) -> int:
        """The largest K that `score` may ask the server for, beside the vocabulary's size."""
        return 20

    def score_ids(self, prompt_ids: list[int], ids: list[int], *, cache_key: str | None = None) -> Request:
        """Ask for log-probs of chosen ids as the next token, at temperature 1, however unlikely they are.

        Args:
            prompt_ids: P ids, each in the vocabulary.
            ids: distinct ones, each in the vocabulary, at most `most_scored_ids`.
            cache_key: as in `detailed_sample`.
        """
        raise self._unsupported("log-probs of chosen ids")

    def parse_id_scores(self, answer: Mapping[str, Any], *, server: str, ids: list[int]) -> np.ndarray:
        """[I] the log-probs in the answer to `score_ids`, in the order of its ids; -inf of one that has no
        mass. Raises as `parse_detailed_sample`.
        """
        raise self._unsupported("log-probs of chosen ids")

    def abort_request(self, request_id: str) -> Request:
        """End a running request, which then returns its tokens so far."""
        raise self._unsupported("ending a request")

    def tokenize(self, text: str) -> Request:
        """Ask for the ids that the server's tokenizer makes of a text."""
        raise self._unsupported("tokenizing")

    def tokenized(self, answer: Mapping[str, Any]) -> list[int] | None:
        """The ids in the answer to `tokenize`; None: there are none."""
        raise self._unsupported("tokenizing")

    def has_tokenizer(self, server_info: Mapping[str, Any]) -> bool:
        """True if the server can make ids of a text at all."""
        return True

    # What a server tells of itself

    def version_support(self, server_info: Mapping[str, Any]) -> VersionSupport:
        """What a run can do with the version in an answer to `Engine.server_info`."""
        raise self._unsupported("versions")

    def has_float32_head(self, server_info: Mapping[str, Any]) -> bool:
        """True if logits are float32 though the server computes in 16 bits."""
        return False

    def routes_problem(self, server_info: Mapping[str, Any]) -> str | None:
        """Why the server leaves out routed experts that it is asked for, with the remedy; None:
        it gives them all.
        """
        return None

    def drafts_itself(self, server_info: Mapping[str, Any]) -> bool:
        """True if the server drafts tokens with the checkpoint's own layers (MTP), and updates those too."""
        return False

    quantises_updates_with: str = ""
    """The option of a server that quantises what it is sent, for messages; "": there is none."""

    def quantises_updates(self, server_info: Mapping[str, Any]) -> bool:
        """True if the server quantises the weights that it is sent."""
        return False

    def quantization(self, server_info: Mapping[str, Any]) -> str | None:
        """How the server's launch options quantise its weights; None: they don't, though
        its checkpoint may.
        """
        return None

    def cache_block(self, server_info: Mapping[str, Any]) -> int:
        """Tokens of which the prefix cache keeps all or none; a hit has a multiple of it and
        leaves one to compute.
        """
        return 1

    def served_model(self, model_info: Mapping[str, Any], server_info: Mapping[str, Any]) -> ServedModel:
        """The model in the answers to `Engine.model_info` and `Engine.server_info`."""
        raise self._unsupported("model_info")

    def list_endpoints(self) -> Request:
        """Ask which requests the server has."""
        raise self._unsupported("lists of endpoints")

    def update_support(
        self, url: str, answer: Mapping[str, Any], server_info: Mapping[str, Any]
    ) -> UpdateSupport:
        """How weights can be updated, from the answers to `list_endpoints` and `Engine.server_info`.

        Raises:
            RolloutProtocolError: the answer lists none.
        """
        raise self._unsupported("lists of endpoints")

    def list_models(self) -> Request:
        """Ask which models the server has, and how long their contexts are."""
        raise self._unsupported("lists of models")

    def context_length(self, url: str, answer: Mapping[str, Any]) -> int:
        """The most tokens of prompt and response together, from the answer to `list_models`.

        Raises:
            RolloutProtocolError: the answer does not tell.
        """
        raise self._unsupported("lists of models")

    def sequence_limit(self) -> Request:
        """Ask how long a sequence may be: for what one request finds room for, which may be less than a
        context.
        """
        return self.list_models()

    def longest_sequence(self, url: str, answer: Mapping[str, Any]) -> int:
        """L, from the answer to `sequence_limit`: a request is taken, and its response not cut before
        max_new_tokens, whose prompt is shorter than L and L at most with max_new_tokens.

        Raises:
            RolloutProtocolError: the answer does not tell.
        """
        return self.context_length(url, answer)

    def all_checksums(self, url: str, answer: Mapping[str, Any]) -> list[dict[str, str]]:
        """{parameter: checksum} of each rank, a draft model's too, from the answer to
        `Engine.weights_checker`.

        Raises:
            RolloutProtocolError: the answer has none.
        """
        raise self._unsupported("checksums")

    def _unsupported(self, what: str) -> UnsupportedByEngine:
        return UnsupportedByEngine(self.name, what)
