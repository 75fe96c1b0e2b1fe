"""The task with a loop of one's own over the Anthropic SDK (pip install anthropic)."""

import ssl

from anthropic import AsyncAnthropic, DefaultAsyncHttpxClient

CERTIFICATES = ssl.create_default_context()
"""Read once: each client would take 50 ms for it."""
TOOL = {
    "name": "add",
    "description": "The sum of two numbers.",
    "input_schema": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}


def add(arguments):
    """What the tool says; the arguments may be anything."""
    try:
        return str(int(arguments["a"]) + int(arguments["b"]))
    except (KeyError, TypeError, ValueError):
        return "a and b must be numbers"


async def run(task, base_url, api_key):
    """One episode; its reward."""
    http, url = DefaultAsyncHttpxClient(verify=CERTIFICATES), base_url.removesuffix("/v1")
    client = AsyncAnthropic(base_url=url, api_key=api_key, max_retries=0, http_client=http)
    messages, text = list(task["messages"]), ""
    for _ in range(3):
        answer = await client.messages.create(model="policy", max_tokens=24, messages=messages, tools=[TOOL])
        messages.append({"role": "assistant", "content": answer.content})
        text = "".join(block.text for block in answer.content if block.type == "text")
        calls = [block for block in answer.content if block.type == "tool_use"]
        if not calls:
            break
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": add(call.input)} for call in calls
        ]
        messages.append({"role": "user", "content": results})
    return float(str(text).strip() == task["label"])
