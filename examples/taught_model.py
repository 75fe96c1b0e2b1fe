"""The tiny Qwen3-MoE of the examples that begin with some knowledge: made, and taught by demonstrations."""

import argparse
import random
from pathlib import Path

IGNORED = -100
"""The label of a token that is not learnt."""


def model_config(tokenizer, *, positions):
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
        max_position_embeddings=positions,
        tie_word_embeddings=False,
        initializer_range=0.05,
        bos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )


def teach(model, demonstrations, *, steps, seed):
    """Supervised training; returns the last loss. demonstrations: as `make_taught_model`'s."""
    import torch

    generator = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, steps)
    for step in range(steps):
        shown = demonstrations(step / steps, generator)
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


def make_taught_model(out_dir: Path, tokenizer, demonstrations, *, positions, steps, seed) -> float:
    """Writes config, float32 safetensors and tokenizer into `out_dir`; returns the loss of the
    supervised training.

    Args:
        out_dir: the folder.
        tokenizer: of the model.
        demonstrations: demonstrations(done, generator) -> (ids, labels) of each row of a step, all of one
            length, when this fraction of the training is done.
        positions: the longest sequence.
        steps: of the training.
        seed: of the weights, and of the generator.
    """
    import torch
    from transformers import Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    config = model_config(tokenizer, positions=positions)
    model = Qwen3MoeForCausalLM(config).to(torch.float32)
    # transformers makes the row of <pad> zero. When the model samples that id, the gradient of a norm at 0
    # is 1000-fold, and clipping takes the rest of the step away.
    pad_row = model.model.embed_tokens.weight[config.pad_token_id]
    torch.nn.init.normal_(pad_row, std=config.initializer_range)
    loss = teach(model, demonstrations, steps=steps, seed=seed)
    model.save_pretrained(out_dir)
    tokenizer.save_pretrained(out_dir)
    return loss


def main(description, make_model, *, steps) -> None:
    """The command line of a make_model.py. steps: the default."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=steps, help="of the supervised training")
    arguments = parser.parse_args()
    loss = make_model(arguments.out_dir, seed=arguments.seed, steps=arguments.steps)
    print(f"{arguments.out_dir}: supervised loss {loss:.3f}")
