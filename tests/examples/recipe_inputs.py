"""What a recipe needs, at the real models' sizes and without a download: config.json, a
tokenizer, Parquet data.
"""

import json
import string

import pyarrow
from pyarrow import parquet

from tests.commands.planner.published import QWEN3_4B, QWEN3_30B_A3B
from tests.models.published_configs import GPT_OSS_20B

CONFIGS = {
    "qwen3_4b": QWEN3_4B,
    "qwen3_30b_a3b": QWEN3_30B_A3B,
    "gpt_oss_20b": {key: value for key, value in GPT_OSS_20B.items() if key != "quantization_config"},
}
"""gpt-oss as transformers makes it of the published one, in bfloat16."""
TEMPLATE = (
    "{% if reasoning_effort is defined %}{{ reasoning_effort }}{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if enable_thinking is false %}<think></think>{% endif "
    "%}{% endif %}"
)


def write_model(folder, config):
    """config.json, and a tokenizer of one token a character: fewer than the model has
    rows, as Qwen3's own.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({character: i for i, character in enumerate(string.printable)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    names = ("<|im_end|>", "<|system|>", "<|user|>", "<|assistant|>")
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))


def write_gsm8k(path):
    """Rows as GSM8K has them."""
    rows = {"question": ["What is 2 + 3?"] * 32, "answer": ["2 + 3 = <<2+3=5>>5\n#### 5"] * 32}
    parquet.write_table(pyarrow.table(rows), path)


def write_dapo(path):
    """Rows as DAPO-math-17k has them."""
    rows = {
        "data_source": ["math_dapo"] * 32,
        "prompt": [[{"role": "user", "content": "What is 2 + 3?"}]] * 32,
        "ability": ["MATH"] * 32,
        "reward_model": [{"ground_truth": "5", "style": "rule-lighteval/MATH_v2"}] * 32,
        "extra_info": [{"index": "9a9b6eb4"}] * 32,
    }
    parquet.write_table(pyarrow.table(rows), path)
