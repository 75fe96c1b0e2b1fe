"""The task with Pydantic AI (pip install "pydantic-ai-slim[openai]")."""

import ssl

import genai_prices.data  # noqa: F401  or each episode, a fork of this process, would
import openai.resources.chat.completions.completions  # noqa: F401
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from pydantic_ai import Agent, UnexpectedModelBehavior, UsageLimitExceeded, UsageLimits
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

CERTIFICATES = ssl.create_default_context()
"""Read once: each client would take 50 ms for it."""


async def run(task, base_url, api_key):
    """One episode; its reward. A model that calls without end, or what is not there, is wrong."""
    http = DefaultAsyncHttpxClient(verify=CERTIFICATES)
    client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http)
    model = OpenAIChatModel("policy", provider=OpenAIProvider(openai_client=client))
    agent = Agent(model, retries=1)

    @agent.tool_plain
    def add(a: int, b: int) -> int:
        """The sum of two numbers."""
        return a + b

    question = task["messages"][-1]["content"]
    try:
        result = await agent.run(question, usage_limits=UsageLimits(request_limit=4))
    except (UnexpectedModelBehavior, UsageLimitExceeded):
        return 0.0
    return float(str(result.output).strip() == task["label"])
