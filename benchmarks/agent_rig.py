"""What benchmarks/agents.py puts around a gateway: a tokenizer with a real chat template, and rollout servers
that answer at once, in a process of their own.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import orjson

from benchmarks.agent_clients import CALLED, Conversation
from benchmarks.client import FORK, serve
from benchmarks.ingest import answer
from megatron_rl_corr.data.tokenizer import Tokenizer
from megatron_rl_corr.engines.trajectory import SamplingParams
from megatron_rl_corr.rollout.gateway.answering import AUTO, answer_rules
from megatron_rl_corr.rollout.gateway.episode import EpisodeRules

ROOT = Path(__file__).resolve().parents[1]
VOCAB_SIZE = 16_384
SAMPLING = SamplingParams(4096)
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def text_of_docs() -> str:
    """The project's pages, of which conversations are made."""
    return "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").rglob("*.md")))


def make_tokenizer(text: str, template: str) -> Tokenizer:
    """Merges of bytes, as those of most models, trained on the text.

    Args:
        text: what it is trained on.
        template: a name in tests/data/chat_templates, of a model that has CONTROL.
    """
    from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Bytes
    from transformers import PreTrainedTokenizerFast

    made = Bytes(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(CONTROL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([text], trainer)
    made.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in CONTROL])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<|im_end|>", clean_up_tokenization_spaces=False
    )
    fast.chat_template = (ROOT / f"tests/data/chat_templates/{template}.jinja").read_text(encoding="utf-8")
    return Tokenizer(fast, "here")


def rules_of(tokenizer: Tokenizer) -> EpisodeRules:
    """Of a run with the defaults, whose episodes may be long."""
    return answer_rules(
        tokenizer,
        SAMPLING,
        max_tokens=1 << 20,
        max_turns=1000,
        tool_format=AUTO,
        separate_thoughts=False,
        warn=lambda text: None,
    )


def conversation(
    tokenizer: Tokenizer, text: str, *, turns: int, new: int, tokens: int, calls: bool = False
) -> Conversation:
    """An agent's conversation, cut out of the text.

    Args:
        tokenizer, text: what it is made of.
        turns: answers.
        new: tokens that come before each.
        tokens: of an answer.
        calls: each answer has a call.
    """
    ids = tokenizer.encode(text)
    ids *= 2 + turns * new // len(ids)

    def piece(begin: int, count: int) -> str:
        return tokenizer.decode(ids[begin : begin + count])

    news = tuple(piece(1000 + number * new, new) for number in range(turns))
    return Conversation(piece(0, 400), piece(500, tokens).strip(), news, calls)


def answer_of(tokenizer: Tokenizer, told: Conversation) -> bytes:
    """A server's answer in SGLang's form: that of the conversation, with the end of the turn."""
    # As tests/data/chat_templates/qwen3.jinja writes it: what is sampled otherwise is rendered twice.
    call = f'<tool_call>{{"name": "{CALLED["name"]}", "arguments": {CALLED["arguments"]}}}</tool_call>'
    ids = tokenizer.encode(told.answer + call * told.calls + "<|im_end|>")
    made = orjson.loads(answer(len(ids), False))
    meta, made["output_ids"] = made["meta_info"], ids
    values = [row[0] for row in meta["output_token_logprobs"]]
    meta["output_token_logprobs"] = [[value, one, None] for value, one in zip(values, ids, strict=True)]
    meta["finish_reason"] = {"type": "stop", "matched": ids[-1]}
    del meta["prompt_tokens"]  # it is told by servers that have counted
    return orjson.dumps(made)


@contextmanager
def server(body: bytes, delay: tuple[float, float] = (0.0, 0.0)) -> Iterator[str]:
    """The address of a server in another process, which gives this answer to everything."""
    queue = FORK.SimpleQueue()
    process = FORK.Process(target=serve, args=([body], delay, 1, queue), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{queue.get()[0]}"
    finally:
        process.kill()
        process.join()
