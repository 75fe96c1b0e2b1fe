"""Makes the model that the training begins with: a tiny Qwen3-MoE that knows the form of an answer and
is mostly wrong.

python make_model.py OUT_DIR [--seed 0] [--steps 450]

A supervised training of a minute teaches it to answer \\boxed{NUMBER}. The numbers that it is shown are
right at first, and more and more often made up, until one in five is right. So it knows the answers in
part and seldom says them.
"""

import string
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from task import KINDS, questions, row
from taught_model import IGNORED, main, make_taught_model

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


def make_model(out_dir: Path, *, seed: int, steps: int) -> float:
    """A model in `out_dir` that was shown answers to all questions in each step; returns the last loss."""
    tokenizer = make_tokenizer()
    asked = []
    for kind in KINDS:
        for question, answer in questions(kind):
            text = tokenizer.apply_chat_template(
                row(question, answer)["messages"], add_generation_prompt=True, tokenize=False
            )
            asked.append((tokenizer.encode(text), answer))

    def demonstrations(done, generator):
        right = share_right(done)
        return [demonstration(prompt, answer, right, tokenizer, generator) for prompt, answer in asked]

    return make_taught_model(out_dir, tokenizer, demonstrations, positions=512, steps=steps, seed=seed)


if __name__ == "__main__":
    main(__doc__, make_model, steps=450)
