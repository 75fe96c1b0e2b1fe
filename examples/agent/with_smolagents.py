"""The task with smolagents (pip install "smolagents[openai]")."""

from smolagents import OpenAIServerModel, ToolCallingAgent, tool


@tool
def add(a: int, b: int) -> int:
    """The sum of two numbers.

    Args:
        a: one.
        b: the other.
    """
    return a + b


def run(task, base_url, api_key):
    """One episode; its reward."""
    model = OpenAIServerModel("policy", api_base=base_url, api_key=api_key)
    agent = ToolCallingAgent([add], model, max_steps=3, verbosity_level=0)
    return float(str(agent.run(task["messages"][-1]["content"])).strip() == task["label"])
