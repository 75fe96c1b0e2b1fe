"""Asks a Hugging Face folder the questions of a file with transformers: python solve.py HF_DIR FILE.jsonl ..."""

import argparse
import json
from pathlib import Path


def share_solved(folder, file, new_tokens=8):
    """The share of the questions that the model answers rightly, greedily."""
    import torch
    from math_verify import parse, verify
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rows = [json.loads(line) for line in Path(file).read_text().splitlines()]
    solved = 0
    for row in rows:
        text = tokenizer.apply_chat_template(row["messages"], add_generation_prompt=True, tokenize=False)
        ids = torch.tensor([tokenizer.encode(text, add_special_tokens=False)])
        answer = model.generate(
            ids, do_sample=False, max_new_tokens=new_tokens, attention_mask=torch.ones_like(ids),
            pad_token_id=tokenizer.pad_token_id,
        )[0, ids.shape[1] :]  # fmt: skip
        solved += verify(parse(row["label"]), parse(tokenizer.decode(answer, skip_special_tokens=True)))
    return solved / len(rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", metavar="HF_DIR")
    parser.add_argument("files", metavar="FILE.jsonl", nargs="+")
    arguments = parser.parse_args()
    for file in arguments.files:
        print(f"{file}: {share_solved(arguments.folder, file):.3f}")


if __name__ == "__main__":
    main()
