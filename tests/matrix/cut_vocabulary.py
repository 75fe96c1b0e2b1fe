"""cut_vocabulary.py MODEL_DIR SIZE  makes a Hugging Face model one of fewer ids, in its folder."""

import sys

from transformers import AutoModelForCausalLM


def main(folder, size):
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.config.eos_token_id = model.config.pad_token_id = None
    model.resize_token_embeddings(int(size))
    model.save_pretrained(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
