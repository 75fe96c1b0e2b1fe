"""Makes a tiny Qwen3-MoE whose vocabulary has the control tokens of published chat templates:
python make_byte_model.py OUT_DIR
"""

import sys

import torch
from transformers import Qwen3MoeForCausalLM

from examples.quickstart.make_model import model_config
from tests.rollout.gateway.agents_model import SIMPLE, Servers, fast


def main(out):
    torch.manual_seed(0)
    config = model_config()
    config.vocab_size, config.max_position_embeddings = Servers.vocab_size, 8192
    made = fast(SIMPLE)
    config.eos_token_id, config.pad_token_id = made.eos_token_id, None
    Qwen3MoeForCausalLM(config).to(torch.float32).save_pretrained(out)
    made.save_pretrained(out)


if __name__ == "__main__":
    main(*sys.argv[1:])
