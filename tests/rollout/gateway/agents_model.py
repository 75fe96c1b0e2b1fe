"""For tests of episodes of agents: a byte-level tokenizer with the control tokens of real templates, and a
client whose answers are given or drawn, and logged.
"""

import asyncio
import functools
import json
from pathlib import Path

import torch

from megatron_rl_corr.data.tokenizer import Tokenizer
from megatron_rl_corr.engines.trajectory import TopLogprobs
from megatron_rl_corr.rollout import Support, Trajectory, VersionSpan
from megatron_rl_corr.rollout.gateway.episode import Episode, EpisodeRules
from megatron_rl_corr.rollout.gateway.templates import Templates
from megatron_rl_corr.rollout.sampling import SamplingParams
from megatron_rl_corr.rollout.seeds import Draw
from tests.rollout.gateway import published_templates

TEMPLATES = Path(__file__).parents[2] / "data/chat_templates"
NAMES = sorted(path.stem for path in TEMPLATES.glob("*.jinja"))
BOS = "<s>"
CONTROL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|user|>",
    "<|tool|>",
    "<|assistant|>",
    "<|system|>",
    "<|observation|>",
    "<|end|>",
    "<|eot_id|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "[INST]",
    "[/INST]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "<|im_user|>",
    "<|im_assistant|>",
    "<|im_system|>",
    "<|im_middle|>",
    "<|tool_call_begin|>",
    "<|argument_begin|>",
    "<|tool_call_end|>",
    "<User>",
    "<Assistant>",
    "<output>",
    "<end>",
    "[gMASK]",
    "<sop>",
    "<|start|>",
    "<|channel|>",
    "<|message|>",
    "<|call|>",
    "<|return|>",
    "<s>",
    "</s>",
    *published_templates.CONTROL,
]
MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>", *published_templates.MARKS)
"""Tokens of their own that are no control tokens."""
SIMPLE = (
    "{% if tools %}{{ tools[0].function.name }}{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function.name }}"
    "{{ call.function.arguments | tojson }}</tool_call>{% endfor %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ENDS = {
    "qwen2_5": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "deepseek_v3": "<end>",
    "glm_4_5": "",
    "phi_3": "<|end|>",
    "llama_3_1": "<|eot_id|>",
    "gpt_oss": "<|end|>",
    "mistral": "</s>",
    "kimi": "<|im_end|>",
}
"""What ends a turn."""


@functools.cache
def backend():
    """A byte-level BPE with a few hundred merges."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Backend

    made = Backend(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator(["the weather of the city of Oslo is wet and cold today"] * 9, trainer)
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in CONTROL])
    made.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKS])
    return made


@functools.cache
def fast(template):
    """What transformers loads, with a template of the folder or a text of one."""
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerFast

    own = Backend.from_str(backend().to_str())
    end = end_of(template) or "<|endoftext|>"
    made = PreTrainedTokenizerFast(
        tokenizer_object=own, bos_token=BOS, eos_token="<|end|>", clean_up_tokenization_spaces=False
    )
    if template.startswith(published_templates.PREFIX):
        made.chat_template = published_templates.text_of_template(template)
        made.eos_token = published_templates.family(template).eos or end
    else:
        made.eos_token = end
        made.chat_template = (TEMPLATES / f"{template}.jinja").read_text() if template in NAMES else template
    return made


def end_of(template):
    """What ends a turn; "": the beginning of the next one."""
    if template.startswith(published_templates.PREFIX):
        return published_templates.family(template).end
    return ENDS.get(template, "<|end|>")


def templates(template=SIMPLE, **variables):
    return Templates(Tokenizer(fast(template), "FOLDER"), variables)


def ids_of(text):
    return backend().encode(text, add_special_tokens=False).ids


def text_of(ids):
    return backend().decode([int(one) for one in ids], skip_special_tokens=False)


def parse(text, tools, turn, cut):
    """Calls are <tool_call>{"name": ..., "arguments": {...}}</tool_call>."""
    content, *blocks = text.split("<tool_call>")
    calls = []
    for number, block in enumerate(blocks):
        try:
            call = json.loads(block.removesuffix("</tool_call>"))
            function = {"name": call["name"], "arguments": json.dumps(call["arguments"])}
        except (ValueError, KeyError):
            return text, []
        calls.append({"id": f"c{turn.zfill(5)}{number:03}", "type": "function", "function": function})
    return content, calls


class Servers:
    """Answers `turn` from a script of (text or ids, finish reason), or by a function of the request, and logs
    all.

    Version k is that of the k-th request's answer; the log-prob of a token is a number that no other has.
    """

    vocab_size, seed = 690, 0

    def __init__(self, *script, draws=None, routes=False, support=False):
        self.script, self.draws, self.routes, self.support = list(script), draws, routes, support
        self.log = []

    def check_sampling(self, sampling):
        pass

    async def turn(self, prompt_ids, sampling, draw, *, prefer=None, routes_from=0):
        made = self.script.pop(0) if self.draws is None else self.draws(prompt_ids, sampling, draw)
        prompt = prompt_ids.tolist()
        if isinstance(made, Exception):
            raise made
        said, reason, *wait = made
        for _ in range(wait[0] if wait else 0):
            await asyncio.sleep(0)
        ids = torch.tensor(ids_of(said) if isinstance(said, str) else said, dtype=torch.int64)
        number = len(self.log)
        part = Trajectory(
            prompt_index=0,
            sample_index=draw.sample,
            prompt_ids=torch.tensor(prompt),
            output_ids=ids,
            rollout_logprobs=-(number + torch.arange(ids.numel()) / 1024 + 1 / 2048).float(),
            finish_reason=reason,
            weight_versions=(VersionSpan(f"v{number}", 0, ids.numel()),),
            cached_tokens=number,
            server=f"http://{number % 3}",
            routed_experts=routes_of([*prompt, *ids.tolist()])[routes_from:] if self.routes else None,
            routes_from=routes_from if self.routes else 0,
            support=support_of(ids) if self.support else None,
            top_logprobs=top_of(ids) if self.support else None,
        )
        self.log.append(
            {
                "prompt": prompt,
                "part": part,
                "sampling": sampling,
                "draw": draw,
                "prefer": prefer,
                "ids": ids.tolist(),
            }
        )
        return part


def routes_of(ids):
    """[len(ids) - 1, 1, 2] uint8: of each token but the last, from its id and place."""
    return torch.tensor(
        [[[one % 251, at % 251]] for at, one in enumerate(ids[:-1])], dtype=torch.uint8
    ).reshape(-1, 1, 2)


def support_of(ids):
    """Each token was drawn from itself and the next id."""
    pairs = torch.stack([ids, ids + 1], 1).flatten().to(torch.int32)
    return Support(pairs, torch.full((ids.numel(),), 2, dtype=torch.int32))


def top_of(ids):
    """Each token's likeliest ids are itself and the next id."""
    pairs = torch.stack([ids, ids + 1], 1).to(torch.int32)
    return TopLogprobs(pairs, -pairs.float())


def episode(
    servers, template=SIMPLE, *, max_new_tokens=400, max_tokens=100_000, max_turns=1000, sample=3, **rules
):
    how = {"parse": parse, **rules}
    sampling = how.pop("sampling", None) or SamplingParams(max_new_tokens)
    return Episode(
        servers,
        template if isinstance(template, Templates) else templates(template),
        EpisodeRules(sampling, max_tokens, max_turns, **how),
        Draw(0, 7, sample),
    )
