"""The task with the OpenAI Agents SDK (pip install openai-agents)."""

import ssl

import openai.resources.chat.completions.completions  # noqa: F401  or each episode, a fork of this process, would
from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from agents.exceptions import MaxTurnsExceeded, ModelBehaviorError
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

set_tracing_disabled(True)
CERTIFICATES = ssl.create_default_context()
"""Read once: each client would take 50 ms for it."""


@function_tool
def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    return a + b


async def run(task, base_url, api_key):
    """One episode; its reward. A model that calls without end, or what is not there, is wrong."""
    http = DefaultAsyncHttpxClient(verify=CERTIFICATES)
    client = AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0, http_client=http)
    agent = Agent(
        name="calculator",
        tools=[add],
        model=OpenAIChatCompletionsModel(model="policy", openai_client=client),
    )
    try:
        result = await Runner.run(agent, task["messages"], max_turns=4)
    except (MaxTurnsExceeded, ModelBehaviorError):
        return 0.0
    return float(str(result.final_output).strip() == task["label"])
