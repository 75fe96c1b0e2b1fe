"""Asks a gateway with OpenAI's client: python openai_client.py BASE_URL KEY; prints JSON.

It is run by an interpreter that has the client alone, so it imports nothing of this repository.
"""

import asyncio
import json
import sys

import openai

TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}},
    }
]
FOR_RESPONSES = [
    {"type": "function", "name": "add", "description": "Adds.", "parameters": {"type": "object"}}
]
CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


def user(text):
    return {"model": "gpt-any", "messages": [{"role": "user", "content": text}]}


def failure(call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except openai.APIStatusError as error:
        return {
            "name": type(error).__name__,
            "status": error.status_code,
            "code": error.code,
            "param": error.param,
        }
    except openai.APIError as error:
        return {"name": type(error).__name__, "code": getattr(error, "code", None), "text": error.message}
    return None


@case
def plain(client):
    parts = [{"type": "text", "text": "two"}, {"type": "text", "text": "parts"}]
    made = client.chat.completions.create(
        model="gpt-any",
        messages=[{"role": "developer", "content": "Be short."}, {"role": "user", "content": parts}],
        max_completion_tokens=7,
        stop=["HALT"],
        user="me",
        metadata={"a": "b"},
    )
    return made.to_dict()


@case
def header(client):
    raw = client.chat.completions.with_raw_response.create(**user("hi"), temperature=0.1, top_p=1, seed=3)
    return raw.headers.get("x-rollout-overridden")


@case
def no_header(client):
    raw = client.chat.completions.with_raw_response.create(**user("hi"), temperature=0.8, top_p=1.0)
    return raw.headers.get("x-rollout-overridden")


@case
def two_with_logprobs(client):
    made = client.chat.completions.create(**user("hi"), n=2, logprobs=True, top_logprobs=0)
    return [
        [
            choice.index,
            choice.message.content,
            [[t.token, t.logprob, t.bytes] for t in choice.logprobs.content],
        ]
        for choice in made.choices
    ] + [made.usage.completion_tokens]


@case
def streamed(client):
    chunks = list(client.chat.completions.create(**user("hi all"), stream=True))
    return [chunk.to_dict() for chunk in chunks]


@case
def streamed_two(client):
    texts, usages = ["", ""], []
    options = {"include_usage": True}
    for chunk in client.chat.completions.create(**user("hi"), stream=True, n=2, stream_options=options):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
        usages.append(chunk.usage and chunk.usage.total_tokens)
    return [texts, usages[-1], set(usages[:-1]) == {None}]


@case
def streamed_logprobs(client):
    found = []
    for chunk in client.chat.completions.create(**user("hi all"), stream=True, logprobs=True):
        for choice in chunk.choices:
            found += [t.token for t in choice.logprobs.content] if choice.logprobs else []
    return found


@case
def tools(client):
    messages = [{"role": "user", "content": "call"}]
    first = client.chat.completions.create(model="m", messages=messages, tools=TOOLS, tool_choice="auto")
    message = first.choices[0].message
    messages.append(message)
    messages += [{"role": "tool", "tool_call_id": call.id, "content": "3"} for call in message.tool_calls]
    second = client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
    return [first.choices[0].finish_reason, message.to_dict(), second.choices[0].message.content]


@case
def tools_helper(client):
    with client.chat.completions.stream(**user("call"), tools=TOOLS) as stream:
        for _ in stream:
            pass
        made = stream.get_final_completion().choices[0]
    strict = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    parsed = client.chat.completions.parse(**user("call"), tools=strict).choices[0]
    seconds = []
    for message in (made.message, parsed.message, parsed.message.model_dump()):
        messages = [{"role": "user", "content": "call"}, message, {"role": "user", "content": "helped"}]
        second = client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
        seconds.append(second.choices[0].message.content)
    return [
        made.finish_reason,
        made.message.content,
        [call.function.arguments for call in made.message.tool_calls],
        seconds,
    ]


@case
def calls_alone(client):
    made = client.chat.completions.create(**user("calls"), tools=TOOLS).choices[0]
    return [made.message.content, len(made.message.tool_calls)]


@case
def no_tools(client):
    made = client.chat.completions.create(**user("call"), tools=TOOLS, tool_choice="none").choices[0]
    return [made.finish_reason, made.message.content]


@case
def forced(client):
    """Headers, and how many calls there are."""
    named, function = {"type": "function", "name": "add"}, {"name": "add"}
    chats = [
        client.chat.completions.with_raw_response.create(**user("call"), tools=TOOLS, tool_choice=choice)
        for choice in ("required", {"type": "function", "function": function})
    ]
    responses = [
        client.responses.with_raw_response.create(
            model="m", input="call", tools=FOR_RESPONSES, tool_choice=choice
        )
        for choice in ("required", named, "none")
    ]
    return [
        [raw.headers.get("x-rollout-overridden") for raw in (*chats, *responses)],
        [len(raw.parse().choices[0].message.tool_calls) for raw in chats],
        [[raw.parse().tool_choice, len(raw.parse().output)] for raw in responses],
    ]


@case
def thoughts(client):
    made = client.chat.completions.create(
        **user("think"),
        reasoning_effort="low",
        extra_body={"chat_template_kwargs": {"enable_thinking": True}},
    )
    message = made.choices[0].message
    return [message.content, message.reasoning_content]


@case
def cut(client):
    return client.chat.completions.create(**user("cut"), max_tokens=2).choices[0].finish_reason


@case
def completion(client):
    made = client.completions.create(model="m", prompt="once upon", logprobs=0, stop="HALT", n=2)
    return made.to_dict()


@case
def completion_of_ids(client):
    return client.completions.create(model="m", prompt=[5, 6, 7], max_tokens=3).choices[0].text


@case
def completion_streamed(client):
    chunks = list(client.completions.create(model="m", prompt="cut", stream=True, logprobs=0))
    tokens = [
        token
        for chunk in chunks
        for choice in chunk.choices
        if choice.logprobs
        for token in choice.logprobs.tokens
    ]
    return ["".join(chunk.choices[0].text for chunk in chunks), chunks[-1].choices[0].finish_reason, tokens]


@case
def response(client):
    made = client.responses.create(
        model="m",
        input="hi",
        instructions="Be short.",
        max_output_tokens=9,
        include=["message.output_text.logprobs"],
    )
    again = client.responses.retrieve(made.id)
    return [made.output_text, made.to_dict(), again.to_dict() == made.to_dict()]


@case
def response_followed(client):
    first = client.responses.create(model="m", input="call", tools=FOR_RESPONSES, instructions="first")
    outputs = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "3"}
        for item in first.output
        if item.type == "function_call"
    ]
    second = client.responses.create(
        model="m", previous_response_id=first.id, input=outputs, tools=FOR_RESPONSES, instructions="second"
    )
    by_items = client.responses.create(
        model="m",
        input=[{"role": "user", "content": "call"}, *first.output, *outputs],
        tools=FOR_RESPONSES,
        instructions="second",
    )
    return [second.output_text, by_items.output_text, second.previous_response_id == first.id]


@case
def response_thoughts(client):
    first = client.responses.create(model="m", input="think", reasoning={"effort": "low"})
    second = client.responses.create(
        model="m",
        input=[{"role": "user", "content": "think"}, *first.output, {"role": "user", "content": "go on"}],
    )
    return [[item.type for item in first.output], second.output_text]


@case
def response_streamed(client):
    kinds = []
    with client.responses.stream(model="m", input="call", tools=FOR_RESPONSES) as stream:
        for event in stream:
            kinds.append(event.type)
        final = stream.get_final_response()
    return [kinds, final.output_text, [item.type for item in final.output], final.output[-1].arguments]


@case
def response_raw_events(client):
    return [event.to_dict() for event in client.responses.create(model="m", input="think", stream=True)]


@case
def response_cut(client):
    made = client.responses.create(model="m", input="cut")
    *_, last = client.responses.create(model="m", input="cut", stream=True)
    return [made.status, made.incomplete_details.reason, last.type]


@case
def models(client):
    return [model.id for model in [*client.models.list(), client.models.retrieve("any/other")]]


@case
def refusals(client):
    chat, text, responses = client.chat.completions.create, client.completions.create, client.responses.create
    return {
        "unknown": failure(chat, **user("hi"), extra_body={"best": 1}),
        "choice": failure(chat, **user("hi"), tools=TOOLS, tool_choice="any"),
        "allowed": failure(
            chat,
            **user("hi"),
            tools=TOOLS,
            tool_choice={"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}},
        ),
        "json": failure(chat, **user("hi"), response_format={"type": "json_object"}),
        "image": failure(
            chat,
            model="m",
            messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}],
        ),
        "top_logprobs": failure(chat, **user("hi"), logprobs=True, top_logprobs=2),
        "both": failure(chat, **user("hi"), max_tokens=1, max_completion_tokens=1),
        "n": failure(chat, **user("hi"), n=0),
        "type": failure(chat, **user("hi"), n="two"),
        "parallel": failure(chat, **user("hi"), parallel_tool_calls=False),
        "role": failure(chat, model="m", messages=[{"role": "robot", "content": "hi"}]),
        "empty": failure(chat, model="m", messages=[]),
        "context": failure(chat, **user("long")),
        "context_streamed": failure(chat, **user("long"), stream=True),
        "late": failure(lambda: list(chat(**user("late"), stream=True))),
        "late_response": failure(lambda: list(responses(model="m", input="late", stream=True))),
        "echo": failure(text, model="m", prompt="hi", echo=True),
        "suffix": failure(text, model="m", prompt="hi", suffix="x"),
        "best_of": failure(text, model="m", prompt="hi", best_of=3),
        "prompts": failure(text, model="m", prompt=["a", "b"]),
        "previous": failure(responses, model="m", input="hi", previous_response_id="resp_none"),
        "schema": failure(
            responses,
            model="m",
            input="hi",
            text={"format": {"type": "json_schema", "name": "x", "schema": {}}},
        ),
        "search": failure(responses, model="m", input="hi", tools=[{"type": "web_search"}]),
        "background": failure(responses, model="m", input="hi", background=True),
        "key": failure(client.with_options(api_key="wrong").chat.completions.create, **user("hi")),
        "path": failure(client.embeddings.create, model="m", input="hi"),
        "fault": failure(chat, **user("fail")),
    }


@case
def kept_alive(client):
    chunks = list(client.chat.completions.create(**user("slow"), stream=True))
    events = list(client.responses.create(model="m", input="slow", stream=True))
    return [
        "".join(chunk.choices[0].delta.content or "" for chunk in chunks),
        events[-1].response.output_text,
    ]


@case
def gone(client):
    """A client that waits no longer asks again, twice at most; a stream is left after its first piece."""
    impatient = client.with_options(timeout=0.5, max_retries=1)
    found = [failure(impatient.chat.completions.create, **user("wait"))["name"]]
    found.append(failure(impatient.responses.create, model="m", input="wait")["name"])
    stream = client.chat.completions.create(**user("big"), stream=True)
    next(stream)
    stream.close()
    return found


@case
def cancelled(client):
    async def one():
        async with openai.AsyncOpenAI(base_url=client.base_url, api_key=client.api_key) as impatient:
            try:
                await asyncio.wait_for(impatient.chat.completions.create(**user("wait")), 0.5)
            except TimeoutError:
                return True

    return asyncio.run(one())


@case
def at_once(client):
    async def all_of_them():
        async with openai.AsyncOpenAI(base_url=client.base_url, api_key=client.api_key) as many:
            asked = [many.chat.completions.create(**user(f"number {i}")) for i in range(64)]
            return [made.choices[0].message.content for made in await asyncio.gather(*asked)]

    return asyncio.run(all_of_them())


def main(base_url, key):
    client = openai.OpenAI(base_url=base_url, api_key=key)
    print(json.dumps({name: function(client) for name, function in CASES.items()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
