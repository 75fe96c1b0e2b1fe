"""Reads the tool calls of texts by SGLang's parsers: python sglang_tool_calls.py TEXTS.json OUT.json."""

import json
import sys
from pathlib import Path

from sglang.srt.entrypoints.openai.protocol import Tool
from sglang.srt.environ import envs
from sglang.srt.function_call.function_call_parser import FunctionCallParser
from sglang.srt.parser.reasoning_parser import ReasoningParser

PARSERS = {
    "hermes": "hermes",
    "qwen3_coder": "qwen3_coder",
    "glm45": "glm45",
    "llama3": "llama3",
    "mistral": "mistral",
    "deepseek_v3": "deepseekv3",
    "deepseek_v31": "deepseekv31",
    "kimi_k2": "kimi_k2",
    "gemma4": "gemma4",
    "gpt_oss": "gpt-oss",
}


def parsed(name, text, tools):
    parser = FunctionCallParser([Tool(**tool) for tool in tools], PARSERS[name])
    if not parser.has_tool_call(text):  # its server does not ask further
        return [text, []]
    content, calls = parser.parse_non_stream(text)
    return [content, [[call.name, call.parameters] for call in calls]]


def thoughts(name, text):
    parser = ReasoningParser("qwen3" if name == "own" else "deepseek-r1")
    return list(parser.parse_non_stream(text))


def main(texts, out):
    given = json.loads(Path(texts).read_text())
    with envs.SGLANG_FORWARD_UNKNOWN_TOOLS.override(True):
        calls = [parsed(name, text, given["tools"]) for name, text in given["calls"]]
    found = {"calls": calls, "thoughts": [thoughts(name, text) for name, text in given["thoughts"]]}
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
