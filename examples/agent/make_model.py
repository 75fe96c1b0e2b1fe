"""Makes the model that the training begins with: a tiny Qwen3-MoE that calls a tool in the right form, and
mostly with wrong numbers.

python make_model.py OUT_DIR [--seed 0] [--steps 400]

A supervised training of two minutes shows it conversations: a sum, a call of `add`, its result, the answer.
The numbers of the calls are right at first, and more and more often made up, until three in ten are
right; some conversations have no call and a made-up answer.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from task import NUMBERS
from taught_model import IGNORED, main, make_taught_model

SPECIALS = ("<pad>", "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>", "<|tools|>", "<|end|>")
PIECES = ("<tool_call>", "</tool_call>", '{"name": "add", "arguments": {"a": ', ', "b": ', "}}")
"""Texts of a call that are one token each."""
TEMPLATE = (
    "{% if tools %}<|tools|>{% for tool in tools %}{{ tool.function.name }} {% endfor %}<|end|>{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}<tool_call>"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "</tool_call>{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "add"}}]
CALLS, RIGHT = 0.8, 0.3
"""At the end of the training, the share of conversations with a call, and of calls with the right numbers."""
ROWS, LENGTH = 128, 40
"""Conversations of a step, and tokens of each with its padding."""


def make_tokenizer():
    """A token for each byte, one for each piece of a call, and the specials; with a chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in PIECES])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<|end|>",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = TEMPLATE
    return fast


def conversation(tokenizer, generator, done):
    """(ids, labels) of one, when this fraction of the training is done: only the assistant's turns are
    learnt.
    """
    share = min(1.0, max(0.0, (done - 0.5) / 0.2))
    calls, right = 1 - share * (1 - CALLS), 1 - share * (1 - RIGHT)
    a, b = generator.choice(NUMBERS), generator.choice(NUMBERS)
    messages = [{"role": "user", "content": f"{a}+{b}"}]
    shown = [messages]
    if generator.random() < calls:
        if generator.random() > right:
            b = generator.choice(NUMBERS)
        call = {"type": "function", "function": {"name": "add", "arguments": {"a": a, "b": b}}}
        answered = [
            *messages,
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": str(a + b)},
        ]
        shown = [messages, answered]
        answer = str(a + b)
    else:
        answer = str(generator.choice(NUMBERS) + generator.choice(NUMBERS))
    whole = tokenizer.apply_chat_template(
        [*shown[-1], {"role": "assistant", "content": answer}], tools=TOOLS, tokenize=False
    )
    ids, labels, at = [], [], 0
    for before in shown:  # the turn behind each is the assistant's
        start = len(
            tokenizer.apply_chat_template(before, tools=TOOLS, add_generation_prompt=True, tokenize=False)
        )
        end = whole.index("<|end|>", start) + len("<|end|>")
        for text, learnt in ((whole[at:start], False), (whole[start:end], True)):
            part = tokenizer.encode(text, add_special_tokens=False)
            ids += part
            labels += part if learnt else [IGNORED] * len(part)
        at = end
    padding = LENGTH - len(ids)
    return ids + [tokenizer.pad_token_id] * padding, labels + [IGNORED] * padding


def make_model(out_dir: Path, *, seed: int, steps: int) -> float:
    """A model in `out_dir` that was shown ROWS conversations in each step; returns the last loss."""
    tokenizer = make_tokenizer()

    def demonstrations(done, generator):
        return [conversation(tokenizer, generator, done) for _ in range(ROWS)]

    return make_taught_model(out_dir, tokenizer, demonstrations, positions=8192, steps=steps, seed=seed)


if __name__ == "__main__":
    main(__doc__, make_model, steps=400)
