"""Compares a server's log-probs with a Hugging Face model's in float32, on tokens that the server sampled.

N sampled tokens, R of one response, V vocabulary.
"""

import asyncio
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_rl_corr.doctor import sampling
from megatron_rl_corr.doctor.distances import by_probability, distance
from megatron_rl_corr.doctor.findings import Row, found
from megatron_rl_corr.doctor.probe import Answer, Probe
from megatron_rl_corr.engines.errors import RolloutServerError
from megatron_rl_corr.engines.sglang.requests import Request

RESPONSES, TOKENS = 4, 48
NOISE_FACTOR = 4.0
"""Times the model's own 16-bit rounding that a 16-bit server may differ in the mean. Measured on the tiny model:
0.8 to 0.9 for a bfloat16 server, 60 and more for weights of another seed."""
TEXT = "The quick brown fox jumps: 12 + 34 = 46?"


def read_config(directory: str | Path) -> dict[str, Any]:
    """config.json of a Hugging Face folder. Raises ValueError where there is none."""
    path = Path(directory) / "config.json"
    if not path.is_file():
        raise ValueError(f"--model must be a Hugging Face folder, got {directory}: it holds no config.json")
    return json.loads(path.read_text())


class ReferenceModel:
    """The model of a Hugging Face folder on the CPU, in float32 and in bfloat16."""

    def __init__(self, directory: str | Path):
        if importlib.util.find_spec("transformers") is None:
            raise ValueError("--model needs transformers, which is not installed; pip install transformers")
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    def logits(self, answers: list[Answer]) -> list[torch.Tensor]:
        """[R, V] float32 of each response, in the model's present precision."""
        with torch.no_grad():
            return [
                self._model(torch.tensor([a.prompt + a.output])).logits[0, len(a.prompt) - 1 : -1].float()
                for a in answers
            ]

    def logits_in_both(self, answers: list[Answer]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """In float32, then in bfloat16; afterwards the model is bfloat16."""
        exact = self.logits(answers)
        self._model.to(torch.bfloat16)
        return exact, self.logits(answers)


async def ask_model(probe: Probe, directory: str, say: Callable[[str], None]) -> list[Row]:
    """Log-probs by bucket of pi_rollout, what they are of at other temperatures, and the tokenizer."""
    say(f"sampling {RESPONSES + 2} responses to compare with {directory}")
    answers = await asyncio.gather(
        *[probe.generate(probe.fresh_prompt(), TOKENS) for _ in range(RESPONSES)],
        probe.generate(probe.fresh_prompt(), TOKENS, temperature=sampling.HOT),
        probe.generate(probe.fresh_prompt(), TOKENS, top_p=sampling.TOP_P),
    )
    say("scoring them with the Hugging Face model in float32, then in bfloat16")
    exact, rounded = await asyncio.to_thread(lambda: ReferenceModel(directory).logits_in_both(answers))
    plain = answers[:RESPONSES]
    measured = np.concatenate([answer.logprobs for answer in plain])
    reference, noisy = (
        np.concatenate([_of(z, a.output) for z, a in zip(logits, plain, strict=False)]) for logits in (exact, rounded)
    )
    return [
        judge_model(measured, reference, noisy),
        hypotheses("at temperature 2", answers[-2], exact[-2], sampling.HOT, 1.0),
        hypotheses("at top-p 0.5", answers[-1], exact[-1], 1.0, sampling.TOP_P),
        await _tokenizer(probe, directory),
    ]


def judge_model(measured: np.ndarray, reference: np.ndarray, noisy: np.ndarray) -> Row:
    """Whether the server serves this model, and how exactly.

    measured [N]: sampled log-probs of the server; reference, noisy [N]: of the model in float32 and bfloat16. The
    difference of the last two is what 16-bit rounding does to this model on these tokens.
    """
    far, noise = distance(measured, reference), distance(noisy, reference)
    buckets = {name: each.numbers() for name, each in by_probability(measured, reference).items()}
    numbers = far.numbers() | {"bfloat16": noise.numbers(), "buckets": buckets}
    said = f"{far}; bfloat16 rounding of the model: mean {noise.mean:.1e}"
    if far.is_rounding(half=False):
        return Row("model difference", "ok", said, numbers)
    if far.mean <= NOISE_FACTOR * noise.mean:
        return found("model difference", "model_difference", said, **numbers)
    return found("model difference", "another_checkpoint", said, **numbers)


def hypotheses(when: str, answer: Answer, logits: torch.Tensor, temperature: float, top_p: float) -> Row:
    """Mean |D| of the answer to each distribution that its log-probs could be of, given the model's logits [R, V]."""
    candidates = {
        "raw": _of(logits, answer.output),
        "temperature-scaled": _of(logits / temperature, answer.output),
        "filtered": _of(_filtered(logits / temperature, top_p), answer.output),
    }
    means = {name: float(np.abs(answer.logprobs - each).mean()) for name, each in candidates.items()}
    said = ", ".join(f"{name} {mean:.1e}" for name, mean in means.items())
    return Row(f"log-probs {when}", "note", f"mean |D| to what they may be of: {said}", means)


def _of(logits: torch.Tensor, ids: list[int]) -> np.ndarray:
    return torch.log_softmax(logits, -1)[torch.arange(len(ids)), torch.tensor(ids)].double().numpy()


def _filtered(logits: torch.Tensor, top_p: float) -> torch.Tensor:
    """Without the ids whose likelier ones sum to more than top_p."""
    probabilities, order = torch.softmax(logits, -1).sort(dim=-1, descending=True)
    dropped = (probabilities.cumsum(-1) - probabilities) > top_p
    return logits.masked_fill(torch.zeros_like(dropped).scatter(-1, order, dropped), -torch.inf)


async def _tokenizer(probe: Probe, directory: str) -> Row:
    """Whether server and folder tokenise one text alike."""
    from transformers import AutoTokenizer

    try:
        answer = await probe.control(Request("POST", "/v1/tokenize", {"prompt": TEXT}))
        own = AutoTokenizer.from_pretrained(directory)(TEXT)["input_ids"]
    except (RolloutServerError, OSError, ValueError) as error:
        if isinstance(error, RolloutServerError) and error.status is None:
            raise
        return Row("tokenizer", "note", f"cannot be told: {error}")
    if answer.get("tokens") != own:
        said = f"{TEXT!r} is {len(answer.get('tokens') or [])} tokens to the server, {len(own)} to {directory}"
        return found("tokenizer", "vocabulary_differs", said, server=answer.get("tokens"), model=own)
    return Row("tokenizer", "ok", f"one text is the same {len(own)} tokens to both")
