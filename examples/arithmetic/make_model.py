"""Makes the model that the training begins with: a tiny Qwen3-MoE that knows the form of an answer and
is mostly wrong.

python make_model.py OUT_DIR [--seed 0] [--steps 450]

A supervised training of a minute teaches it to answer \\boxed{NUMBER}. The numbers that it is shown are
right at first, and more and more often made up, until one in five is right. So it knows the answers in
part and seldom says them.
"""

import argparse
import random
import string
from pathlib import Path

from task import KINDS, questions, row

CHARACTERS = string.digits + string.ascii_letters + " +-=.,:?!{}()\\\n"
SPECIALS = ("<pad>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>")
BOXED = "\\boxed{"
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
RIGHT = 0.2
"""Share of the right answers among those that the model is shown."""
LARGEST = 18
LONGEST = 5
"""Tokens of the longest response."""
IGNORED = -100


def make_tokenizer():
    """A token for each character, one for what begins an answer, and the specials; with a chat template."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {token: i for i, token in enumerate((*CHARACTERS, BOXED))}
    # No unknown token: a character outside the vocabulary is an error, not a silent "?".
    tokenizer = Tokenizer(models.WordLevel(vocab))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\\boxed\{|[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<|end|>",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = TEMPLATE
    return fast


def model_config(tokenizer):
    """The architecture of the quickstart: 4 sparse layers of 8 experts, 2 of them active; half a
    million parameters.
    """
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
        max_position_embeddings=512,
        tie_word_embeddings=False,
        initializer_range=0.05,
        bos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )


def share_right(done):
    """Of the answers shown when this fraction of the training is done: all at first, RIGHT at the end."""
    return 1.0 - (1.0 - RIGHT) * min(1.0, max(0.0, (done - 0.4) / 0.4))


def demonstration(prompt, answer, right, tokenizer, generator):
    """(ids, labels) of a question whose answer is right in this share of the cases, else made up."""
    shown = answer if generator.random() < right else generator.randrange(LARGEST + 1)
    response = tokenizer.encode(f"{BOXED}{shown}}}<|end|>")
    padding = LONGEST - len(response)
    ids = [*prompt, *response, *[tokenizer.pad_token_id] * padding]
    return ids, [IGNORED] * len(prompt) + response + [IGNORED] * padding


def teach(model, tokenizer, *, steps, seed):
    """Supervised training on the answers, all questions in each step; returns the last loss."""
    import torch

    generator = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, steps)
    asked = []
    for kind in KINDS:
        for question, answer in questions(kind):
            text = tokenizer.apply_chat_template(
                row(question, answer)["messages"], add_generation_prompt=True, tokenize=False
            )
            asked.append((tokenizer.encode(text), answer))
    for step in range(steps):
        right = share_right(step / steps)
        shown = [demonstration(prompt, answer, right, tokenizer, generator) for prompt, answer in asked]
        ids, labels = (torch.tensor(rows) for rows in zip(*shown, strict=True))
        logits = model(input_ids=ids).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
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
    parser.add_argument("--steps", type=int, default=450, help="of the supervised training")
    arguments = parser.parse_args()
    loss = make_model(arguments.out_dir, seed=arguments.seed, steps=arguments.steps)
    print(f"{arguments.out_dir}: supervised loss {loss:.3f}")


if __name__ == "__main__":
    main()
