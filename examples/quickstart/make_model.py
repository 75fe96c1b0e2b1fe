"""Makes a tiny Qwen3-MoE and its character tokenizer in Hugging Face format: python make_model.py OUT_DIR"""

import argparse
import string
from pathlib import Path

CHARACTERS = string.digits + string.ascii_lowercase + string.ascii_uppercase + " :;,.+-*/=<>()[]?!#"
SPECIALS = ("<pad>", "<eos>")
VOCAB_SIZE = len(CHARACTERS) + len(SPECIALS)


def make_tokenizer():
    """One token per character, ids in the order of CHARACTERS, then <pad> and <eos>; no merges."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {token: i for i, token in enumerate((*CHARACTERS, *SPECIALS))}
    # No unknown token: a character outside the vocabulary is an error, not a silent "?".
    tokenizer = Tokenizer(models.WordLevel(vocab))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(SPECIALS))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        clean_up_tokenization_spaces=False,
    )
    assert len(fast) == VOCAB_SIZE, (len(fast), VOCAB_SIZE)
    return fast


def model_config():
    """The architecture: 4 sparse layers of 8 experts, 2 of them active; about 0.5 million parameters."""
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
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
        # Small enough that the untrained model samples nearly uniformly: every answer is possible at first.
        initializer_range=0.05,
        bos_token_id=None,
        pad_token_id=VOCAB_SIZE - 2,
        eos_token_id=VOCAB_SIZE - 1,
    )


def make_model(out_dir: Path, *, seed: int) -> int:
    """Writes config, float32 safetensors and tokenizer into `out_dir`; returns the number of parameters."""
    import torch
    from transformers import Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    config = model_config()
    model = Qwen3MoeForCausalLM(config).to(torch.float32)
    # transformers makes the row of <pad> zero; the model may sample it, and a norm's gradient
    # at 0 is 1000-fold.
    pad_row = model.model.embed_tokens.weight[config.pad_token_id]
    torch.nn.init.normal_(pad_row, std=config.initializer_range)
    model.save_pretrained(out_dir)
    make_tokenizer().save_pretrained(out_dir)
    return sum(p.numel() for p in model.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    parameters = make_model(arguments.out_dir, seed=arguments.seed)
    print(f"{arguments.out_dir}: {parameters} parameters, {VOCAB_SIZE} tokens, seed {arguments.seed}")


if __name__ == "__main__":
    main()
