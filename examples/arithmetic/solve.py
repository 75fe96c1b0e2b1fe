"""Asks a Hugging Face folder the questions of a file with transformers: python solve.py
HF_DIR FILE.jsonl ...
"""

import argparse
import json
from pathlib import Path

NEW_TOKENS = 8


def share_solved(folder, file, *, samples=1, greedy=True):
    """The share of right answers to the file's questions.

    Args:
        folder: the model, in Hugging Face format.
        file: JSON lines with messages and a label.
        samples: answers to each question.
        greedy: the likeliest token each time; else drawn at temperature 1, as the training does.
    """
    import torch
    from math_verify import parse, verify
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    how = (
        {"do_sample": False} if greedy else {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    )
    rows = [json.loads(line) for line in Path(file).read_text().splitlines()]
    right = 0
    for row in rows:
        text = tokenizer.apply_chat_template(row["messages"], add_generation_prompt=True, tokenize=False)
        ids = torch.tensor([tokenizer.encode(text, add_special_tokens=False)] * samples)
        answers = model.generate(
            ids,
            max_new_tokens=NEW_TOKENS,
            attention_mask=torch.ones_like(ids),
            pad_token_id=tokenizer.pad_token_id,
            **how,
        )[:, ids.shape[1] :]
        label = parse(row["label"])
        right += sum(
            verify(label, parse(tokenizer.decode(answer, skip_special_tokens=True))) for answer in answers
        )
    return right / len(rows) / samples


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", metavar="HF_DIR")
    parser.add_argument("files", metavar="FILE.jsonl", nargs="+")
    arguments = parser.parse_args()
    for file in arguments.files:
        print(f"{file}: {share_solved(arguments.folder, file):.3f} solved greedily")


if __name__ == "__main__":
    main()
