"""Asks a gateway with Anthropic's client: python anthropic_client.py ROOT_URL KEY; prints JSON.

It is run by an interpreter that has the client alone, so it imports nothing of this repository.
"""

import asyncio
import json
import sys

import anthropic

TOOLS = [{"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}]
CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


def user(text):
    return {"model": "claude-any", "max_tokens": 9, "messages": [{"role": "user", "content": text}]}


def failure(call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except anthropic.APIStatusError as error:
        kind = (error.body or {}).get("error", {}).get("type")
        return {"name": type(error).__name__, "status": error.status_code, "type": kind, "text": str(error)}
    return None


@case
def plain(client):
    made = client.messages.create(
        model="claude-any",
        max_tokens=9,
        system=[{"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "two"}, {"type": "text", "text": "parts"}]}
        ],
        stop_sequences=["HALT"],
        metadata={"user_id": "me"},
    )
    return made.to_dict()


@case
def header(client):
    raw = client.messages.with_raw_response.create(**user("hi"), extra_body={"temperature": 0.1, "top_k": 4})
    return raw.headers.get("x-rollout-overridden")


@case
def streamed(client):
    return [event.to_dict() for event in client.messages.create(**user("hi all"), stream=True)]


@case
def streamed_helper(client):
    with client.messages.stream(**user("call"), tools=TOOLS) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    return [text, final.to_dict()]


@case
def tools(client):
    messages = [{"role": "user", "content": "call"}]
    first = client.messages.create(model="m", max_tokens=9, messages=messages, tools=TOOLS)
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "3"}]}
        for block in first.content
        if block.type == "tool_use"
    ]
    messages += [
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [*results, {"type": "text", "text": "go on"}]},
    ]
    second = client.messages.create(
        model="m", max_tokens=9, messages=messages, tools=TOOLS, tool_choice={"type": "auto"}
    )
    return [first.stop_reason, [block.to_dict() for block in first.content], second.content[0].text]


@case
def runner(client):
    """The runner asks for a thread first, and goes on without one by itself."""
    calls = []

    @anthropic.beta_tool
    def add(a: int = 0, b: list[object] | None = None) -> str:
        """Adds.

        Args:
            a: one number.
            b: others.
        """
        calls.append([a, b])
        return "added"

    runs = client.beta.messages.tool_runner(**user("calls once"), tools=[add])
    return [runs.until_done().content[0].text, len(calls)]


@case
def forced(client):
    create, found = client.messages.with_raw_response.create, []
    for choice in ({"type": "any"}, {"type": "tool", "name": "add"}):
        raw = create(**user("call"), tools=TOOLS, tool_choice=choice)
        found.append([raw.headers.get("x-rollout-overridden"), raw.parse().stop_reason])
    return found


@case
def thoughts(client):
    thinking = {"type": "enabled", "budget_tokens": 1024}
    first = client.messages.create(**user("think"), thinking=thinking)
    second = client.messages.create(
        model="m",
        max_tokens=9,
        messages=[
            {"role": "user", "content": "think"},
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": "go on"},
        ],
    )
    with client.messages.stream(**user("think"), thinking=thinking) as stream:
        again = stream.get_final_message()
    return [
        [block.type for block in first.content],
        second.content[0].text,
        [block.to_dict() for block in again.content] == [block.to_dict() for block in first.content],
    ]


@case
def ends(client):
    return [
        [made.stop_reason, made.stop_sequence]
        for made in (
            client.messages.create(**user("hi"), stop_sequences=["HALT"]),
            client.messages.create(**user("cut")),
            client.messages.create(**user("stop"), stop_sequences=["X", "HALT"]),
            client.messages.create(**user("calls"), tools=TOOLS),
        )
    ]


@case
def kept_alive(client):
    with client.messages.stream(**user("slow")) as stream:
        return stream.get_final_text()


@case
def refusals(client):
    create = client.messages.create
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
    begun = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "So"}]
    return {
        "choice": failure(create, **user("hi"), tools=TOOLS, tool_choice={"type": "some"}),
        "serial": failure(
            create, **user("hi"), tools=TOOLS, tool_choice={"type": "auto", "disable_parallel_tool_use": True}
        ),
        "image": failure(create, model="m", max_tokens=9, messages=[{"role": "user", "content": [image]}]),
        "begun": failure(create, model="m", max_tokens=9, messages=begun),
        "bash": failure(create, **user("hi"), tools=[{"type": "bash_20250124", "name": "bash"}]),
        "unknown": failure(create, **user("hi"), extra_body={"best": 1}),
        "context": failure(create, **user("long")),
        "late": failure(lambda: list(create(**user("late"), stream=True))),
        "key": failure(client.with_options(api_key="wrong").messages.create, **user("hi")),
        "fault": failure(create, **user("fail")),
        "path": failure(client.messages.batches.list),
    }


@case
def models(client):
    found = [*client.models.list(), client.models.retrieve("any-other")]
    return [[one.id, one.type, one.display_name, one.created_at.year] for one in found]


@case
def counted(client):
    asked = {"model": "m", "system": "Be short.", "messages": [{"role": "user", "content": "hi"}]}
    return [
        client.messages.count_tokens(**asked).input_tokens,
        client.beta.messages.count_tokens(**asked).input_tokens,
    ]


@case
def gone(client):
    """A client that waits no longer, and a stream that is left after its first events."""
    impatient = client.with_options(timeout=0.5, max_retries=0)
    try:
        impatient.messages.create(**user("wait"))
    except anthropic.APITimeoutError as error:
        found = type(error).__name__
    with client.messages.stream(**user("big")) as stream:
        next(iter(stream))
    return found


@case
def at_once(client):
    async def all_of_them():
        async with anthropic.AsyncAnthropic(base_url=client.base_url, api_key=client.api_key) as many:
            asked = [many.messages.create(**user(f"number {i}")) for i in range(64)]
            return [made.content[0].text for made in await asyncio.gather(*asked)]

    return asyncio.run(all_of_them())


def main(base_url, key):
    client = anthropic.Anthropic(base_url=base_url, api_key=key)
    print(json.dumps({name: function(client) for name, function in CASES.items()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
