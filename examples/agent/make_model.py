"""Makes the model that the training begins with: a tiny Qwen3-MoE that calls a tool in the right form, and
mostly with wrong numbers.

python make_model.py OUT_DIR [--seed 0] [--steps 200]

A supervised training of two minutes shows it conversations: a sum, a call of `add`, its result, the answer.
The numbers of the calls are right at first, and more and more often made up, until a third of them is
right; some conversations have no call and a made-up answer.
"""

import argparse
import random
from pathlib import Path

from task import NUMBERS

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
CALLS, RIGHT = 0.8, 0.4
"""At the end of the training, the share of conversations with a call, and of calls with the right numbers."""
ROWS, LENGTH = 128, 40
"""Conversations of a step, and tokens of each with its padding."""
IGNORED = -100


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


def model_config(tokenizer):
    """The architecture of the quickstart: 4 sparse layers of 8 experts, 2 of them active."""
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        norm_topk_prob=True,
        rope_theta=10000.0,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        initializer_range=0.05,
        bos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )


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


def teach(model, tokenizer, *, steps, seed):
    """Supervised training on conversations; returns the last loss."""
    import torch

    generator = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, steps)
    for step in range(steps):
        shown = [conversation(tokenizer, generator, step / steps) for _ in range(ROWS)]
        ids, labels = (torch.tensor(rows) for rows in zip(*shown, strict=True))
        logits = model(input_ids=ids).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 50 == 0:
            print(f"step {step} of {steps}: loss {float(loss):.3f}", flush=True)
    return float(loss)


def make_model(out_dir: Path, *, seed: int, steps: int) -> float:
    """Writes config, float32 safetensors and tokenizer into `out_dir`; returns the loss of the
    supervised training.
    """
    import torch
    from transformers import Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    tokenizer = make_tokenizer()
    config = model_config(tokenizer)
    model = Qwen3MoeForCausalLM(config).to(torch.float32)
    # transformers makes the row of <pad> zero. When the model samples that id, the gradient of a norm at 0
    # is 1000-fold, and clipping takes the rest of the step away.
    pad_row = model.model.embed_tokens.weight[config.pad_token_id]
    torch.nn.init.normal_(pad_row, std=config.initializer_range)
    loss = teach(model, tokenizer, steps=steps, seed=seed)
    model.save_pretrained(out_dir)
    tokenizer.save_pretrained(out_dir)
    return loss


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=200, help="of the supervised training")
    arguments = parser.parse_args()
    loss = make_model(arguments.out_dir, seed=arguments.seed, steps=arguments.steps)
    print(f"{arguments.out_dir}: supervised loss {loss:.3f}")


if __name__ == "__main__":
    main()
