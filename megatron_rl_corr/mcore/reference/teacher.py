"""The teacher of on-policy distillation, whose servers score each batch.

T tokens of this rank's batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from megatron_rl_corr.config.flags import warn
from megatron_rl_corr.engines.control import ServerControl
from megatron_rl_corr.engines.errors import RolloutServerError
from megatron_rl_corr.mcore.checks.source_check import difference_of_tokenizers
from megatron_rl_corr.mcore.forward import BatchForward
from megatron_rl_corr.mcore.reference.served_scores import ServedScores
from megatron_rl_corr.reduce.collectives import collective
from megatron_rl_corr.reduce.failure import StartupError
from megatron_rl_corr.rollout.scorer import Scorer

FLAG = "--rollout-teacher-url"


@dataclass(frozen=True)
class Teacher:
    """A frozen policy that scores batches; without servers the null form."""

    served: ServedScores | None = None

    @collective
    def scores(self, forward: BatchForward) -> Mapping[str, Tensor]:
        """The fields teacher_* of `LossInputs`, of the batch's labels, on the last stage; {} on others and
        without a teacher. Every rank calls it. Raises as `ServedScores.of_batch`.
        """
        found = None if self.served is None else self.served.of_batch(forward)
        if found is None:
            return {}
        logprobs, ids, top = found
        likeliest = {"teacher_ids": ids, "teacher_top_logprobs": top} if self.served.likeliest else {}
        return {"teacher_logprobs": logprobs, **likeliest}

    def close(self) -> None:
        """Leave its servers, if it has any."""
        if self.served is not None:
            self.served.close()


async def check_teacher(
    scorer: Scorer, vocab_size: int, texts: Mapping[str, list[int]], likeliest: int
) -> None:
    """That each of a teacher's servers has the ids of the policy, and lists as many as are asked for.

    Where both sides have a tokenizer a few texts must be the same ids; a vocabulary may then be padded
    further. Else the vocabularies must have the same size, and one line says that no more is known.

    Args:
        scorer: of the servers, which answer.
        vocab_size: of the policy.
        texts: text -> the ids that the policy's tokenizer makes of it; none without a tokenizer.
        likeliest: K.

    Raises:
        StartupError: a server has another vocabulary, or lists fewer ids.
        RolloutError: one does not answer.
    """
    control = scorer.control
    for url, info in zip(scorer.urls, await control.server_info(), strict=True):
        engine = control.engine_of(url)
        if likeliest > (most := min(engine.most_likeliest(info), vocab_size)):
            raise StartupError(
                f"--rollout-distill-top-k {likeliest}: {FLAG} {url} lists at most {most} ids; ask for fewer, "
                "or start it with a larger bound"
            )
        # Where neither is there ids are looked up unchecked, and one too many may end the server.
        checks_ids = engine.most_scored_ids > 0 or engine.has_tokenizer(info)
        if checks_ids and (why := await _refused(control, url, vocab_size - 1)) is not None:
            raise StartupError(
                f"{FLAG} {url} has another vocabulary than --rollout-hf-checkpoint, of {vocab_size} ids: it "
                f"does not take the last of them ({why}); serve a teacher with the policy's tokenizer"
            )
        if texts and engine.has_tokenizer(info):
            remedy = "serve a teacher with the policy's tokenizer"
            if (error := await difference_of_tokenizers(control, url, texts, remedy)) is not None:
                raise StartupError(f"{FLAG} {error}")
        elif checks_ids and await _refused(control, url, vocab_size) is None:
            raise StartupError(
                f"{FLAG} {url} has another vocabulary than --rollout-hf-checkpoint, of {vocab_size} ids: it "
                "takes one beyond them, and without a tokenizer on both sides no text can tell whether these "
                "only pad it; give both their tokenizers, or serve a teacher with the policy's vocabulary"
            )
        else:
            size = "its vocabulary has the policy's size; " if checks_ids else ""
            warn(
                f"{FLAG} {url}: {size}that its ids mean the same as the policy's is not checked without a "
                "tokenizer on both sides"
            )


async def _refused(control: ServerControl, url: str, token: int) -> str | None:
    """Why a server does not score this id; None: it does."""
    engine = control.engine_of(url)
    # Ids that are asked for are checked where ids that are given may be looked up unchecked.
    chosen = engine.most_scored_ids > 0
    request = engine.score_ids([0], [token]) if chosen else engine.score([0], [token], likeliest=1)
    try:
        await control.ask(url, request)
    except RolloutServerError as error:
        if error.status is None or error.status >= 500:
            raise
        return str(error)
    return None
