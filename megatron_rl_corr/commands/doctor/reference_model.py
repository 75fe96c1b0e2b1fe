"""Compares a server's log-probs with those of a Hugging Face model, on tokens that the server sampled.

N sampled tokens, R of one response, V vocabulary.
"""

import asyncio
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_rl_corr.commands.doctor.vocabulary_check import ask_vocabulary
from megatron_rl_corr.doctor import distribution
from megatron_rl_corr.doctor.distances import by_probability, distance
from megatron_rl_corr.doctor.findings import Row, found
from megatron_rl_corr.doctor.probe import REFUSED, NotAnswered, Probe, if_supported, known, unsupported
from megatron_rl_corr.doctor.vocabulary import CHECK
from megatron_rl_corr.engines.errors import RolloutServerError
from megatron_rl_corr.engines.inspection import DetailedSample
from megatron_rl_corr.engines.routes import ExpertShape
from megatron_rl_corr.engines.types import UnsupportedByEngine
from megatron_rl_corr.models.architectures import CODE_OF, expert_layers, num_experts
from megatron_rl_corr.models.hf_checkpoint import read_config

RESPONSES, TOKENS = 4, 48
NOISE_FACTOR = 4.0
"""Largest mean difference of a 16-bit server, in units of the model's own 16-bit rounding error. Measured
on the tiny model: 0.8 to 0.9 for a bfloat16 server, 60 and more for weights of another seed.
"""
TF32_SHARE = 4.0
"""A float32 server may multiply in TF32, of 3 more bits than bfloat16: differences of an
eighth are expected.
"""
TEXT = "The quick brown fox jumps: 12 + 34 = 46?"


def experts_shape(config: Mapping[str, Any]) -> ExpertShape | None:
    """How the model of a config.json routes; None for a dense model."""
    experts, top_k = num_experts(config), config.get("num_experts_per_tok")
    if experts is None or not top_k:
        return None
    return ExpertShape(config["num_hidden_layers"], expert_layers(config), top_k, experts)


class ReferenceModel:
    """A Hugging Face model on the CPU, in float32 and in bfloat16."""

    def __init__(self, directory: str | Path):
        if importlib.util.find_spec("transformers") is None:
            raise ValueError("--model needs transformers, which is not installed; pip install transformers")
        from transformers import AutoConfig, AutoModelForCausalLM

        own = read_config(directory)
        kind = own.pop("model_type", None)
        given = {"config": AutoConfig.for_model(CODE_OF[kind], **own)} if kind in CODE_OF else {}
        self._model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, trust_remote_code=False, **given
        ).eval()

    def logits(self, answers: list[DetailedSample]) -> list[torch.Tensor]:
        """Logits of each response, [R, V] float32, computed in the model's current precision."""
        with torch.no_grad():
            return [
                self._model(torch.tensor([a.prompt + a.output])).logits[0, len(a.prompt) - 1 : -1].float()
                for a in answers
            ]

    def logits_in_both(self, answers: list[DetailedSample]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Logits computed in float32 and in bfloat16; the model stays in bfloat16."""
        exact = self.logits(answers)
        self._model.to(torch.bfloat16)
        return exact, self.logits(answers)


async def ask_model(
    probe: Probe, half: bool | NotAnswered, directory: str, say: Callable[[str], None]
) -> list[Row]:
    """Compare log-probs by bucket of pi_rollout, their definition at other temperatures, and the tokenizer.

    Args:
        probe: of the server.
        half: it computes in 16 bits, as `Facts` has it.
        directory: Hugging Face folder of the model.
        say: called with the next question.

    Raises:
        RolloutError: the server could not be asked.
    """
    try:
        rows = await _compare(probe, known(half), directory, say)
    except (UnsupportedByEngine, RolloutServerError) as error:
        if isinstance(error, RolloutServerError) and error.status not in REFUSED:
            raise
        rows = [unsupported("model difference", error)]
    return [*rows, await _tokenizer(probe, directory)]


async def _compare(probe: Probe, half: bool, directory: str, say: Callable[[str], None]) -> list[Row]:
    say(f"sampling {RESPONSES + 2} responses to compare with {directory}")
    answers = await asyncio.gather(
        *[probe.generate(probe.fresh_prompt(), TOKENS) for _ in range(RESPONSES)],
        probe.generate(probe.fresh_prompt(), TOKENS, temperature=distribution.HOT),
        probe.generate(probe.fresh_prompt(), TOKENS, top_p=distribution.TOP_P),
    )
    say("scoring them with the Hugging Face model in float32, then in bfloat16")
    exact, rounded = await asyncio.to_thread(lambda: ReferenceModel(directory).logits_in_both(answers))
    plain = answers[:RESPONSES]
    measured = np.concatenate([answer.logprobs for answer in plain])
    reference, noisy = (
        np.concatenate([_logprobs(z, a.output) for z, a in zip(logits, plain, strict=False)])
        for logits in (exact, rounded)
    )
    say("asking for the log-probs of all ids")
    count, text_of = len(plain), id_texts(directory)
    whole = await if_supported(ask_vocabulary(probe, half, plain, exact[:count], rounded[:count], text_of))
    return [
        judge_model(measured, reference, noisy, half),
        unsupported(CHECK, whole) if isinstance(whole, NotAnswered) else whole,
        hypotheses("at temperature 2", answers[-2], exact[-2], distribution.HOT, 1.0),
        hypotheses("at top-p 0.5", answers[-1], exact[-1], 1.0, distribution.TOP_P),
    ]


def judge_model(measured: np.ndarray, reference: np.ndarray, noisy: np.ndarray, half: bool) -> Row:
    """Decide whether the server serves this model, and with which precision.

    Args:
        measured: [N] the server's log-probs of its samples.
        reference: [N] the model's in float32.
        noisy: [N] the model's in bfloat16; the difference to `reference` is the rounding error
            on these tokens.
        half: the server computes in 16 bits. If not, 16-bit rounding explains nothing.
    """
    far, noise = distance(measured, reference), distance(noisy, reference)
    buckets = {name: each.numbers() for name, each in by_probability(measured, reference).items()}
    numbers = far.numbers() | {"bfloat16": noise.numbers(), "buckets": buckets}
    message = f"{far}; bfloat16 rounding of the model: mean {noise.mean:.1e}"
    if far.is_rounding(half=False):
        return Row("model difference", "ok", message, numbers)
    if far.mean <= NOISE_FACTOR * noise.mean if half else far.max <= noise.max / TF32_SHARE:
        return found("model difference", "model_difference", message, **numbers)
    return found("model difference", "another_checkpoint", message, **numbers)


def hypotheses(
    when: str, answer: DetailedSample, logits: torch.Tensor, temperature: float, top_p: float
) -> Row:
    """Mean |D| between an answer's log-probs and each distribution they may be of, from the
    model's logits [R, V].
    """
    candidates = {
        "raw": _logprobs(logits, answer.output),
        "temperature-scaled": _logprobs(logits / temperature, answer.output),
        "filtered": _logprobs(_filtered(logits / temperature, top_p), answer.output),
    }
    means = {name: float(np.abs(answer.logprobs - each).mean()) for name, each in candidates.items()}
    message = ", ".join(f"{name} {mean:.1e}" for name, mean in means.items())
    return Row(f"log-probs {when}", "note", f"mean |D| to the distributions they may be of: {message}", means)


def _logprobs(logits: torch.Tensor, ids: list[int]) -> np.ndarray:
    return torch.log_softmax(logits, -1)[torch.arange(len(ids)), torch.tensor(ids)].double().numpy()


def _filtered(logits: torch.Tensor, top_p: float) -> torch.Tensor:
    """Logits with -inf for the ids that top-p drops: those after the first that reach top_p."""
    probabilities, order = torch.softmax(logits, -1).sort(dim=-1, descending=True)
    dropped = (probabilities.cumsum(-1) - probabilities) > top_p
    return logits.masked_fill(torch.zeros_like(dropped).scatter(-1, order, dropped), -torch.inf)


def id_texts(directory: str) -> Callable[[int], str]:
    """A function from an id to the id with its token, or without where the folder has no tokenizer."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except (OSError, ValueError):
        return str
    return lambda token: f"{token} {tokenizer.convert_ids_to_tokens(token)!r}"


async def _tokenizer(probe: Probe, directory: str) -> Row:
    """Compare the tokens that server and folder make of one text."""
    from transformers import AutoTokenizer

    try:
        answer = await probe.control(probe.engine.tokenize(TEXT))
        theirs = probe.engine.tokenized(answer)
        own = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)(TEXT)["input_ids"]
    except (RolloutServerError, OSError, ValueError) as error:
        if isinstance(error, RolloutServerError) and error.status is None:
            raise
        return Row("tokenizer", "note", f"unknown: {error}")
    if theirs != own:
        message = f"{TEXT!r} is {len(theirs or [])} tokens to the server, {len(own)} to {directory}"
        return found("tokenizer", "vocabulary_differs", message, server=theirs, model=own)
    return Row("tokenizer", "ok", f"one text is the same {len(own)} tokens to both")
