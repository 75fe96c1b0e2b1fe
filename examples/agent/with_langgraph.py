"""The task with LangGraph (pip install langgraph langchain-openai)."""

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from langgraph.prebuilt import create_react_agent


@tool
def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    return a + b


async def run(task, base_url, api_key):
    """One episode; its reward. A model that calls without end is wrong."""
    model = ChatOpenAI(model="policy", base_url=base_url, api_key=api_key, max_retries=0)
    agent = create_react_agent(model, [add])
    try:
        result = await agent.ainvoke({"messages": task["messages"]}, {"recursion_limit": 8})
    except GraphRecursionError:
        return 0.0
    return float(str(result["messages"][-1].content).strip() == task["label"])
