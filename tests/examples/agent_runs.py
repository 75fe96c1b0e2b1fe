"""Episodes of the agent example's harnesses, by the real packages, behind a gateway in this process."""

from pathlib import Path

import pytest

from megatron_rl_corr.data.prompt import Prompt
from megatron_rl_corr.data.tokenizer import Tokenizer
from megatron_rl_corr.engines.trajectory import SamplingParams
from megatron_rl_corr.rollout.agents.agents import Agents
from megatron_rl_corr.rollout.agents.harnesses import Harnesses
from megatron_rl_corr.rollout.agents.starter import HarnessKind
from megatron_rl_corr.rollout.gateway.answering import answer_rules
from megatron_rl_corr.rollout.gateway.server import Gateway
from megatron_rl_corr.rollout.gateway.templates import Templates

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples/agent"
PYTHON = ROOT / ".venv-agents/bin/python"
AGENTS = sorted(path.stem.removeprefix("with_") for path in EXAMPLE.glob("with_*.py"))
SAMPLING = SamplingParams(24)
CONTEXT = 8000
"""Tokens of a conversation: the example's model has a token for each byte."""


def require_harnesses():
    if not PYTHON.exists():
        pytest.skip("the harnesses are not installed; make setup-agents installs them")


class KeptAgents(Agents):
    """Keeps the episodes of which the samples are."""

    def __init__(self, *how):
        super().__init__(*how)
        self.episodes = {}

    async def _run(self, episode, *of):
        branches, latest = await super()._run(episode, *of)
        self.episodes[episode] = branches
        return branches, latest


async def episodes(client, model, name, sums, samples):
    """{episode: its branches} of so many of each sum, (a, b), and all counts."""
    tokenizer = Tokenizer.from_folder(model)
    rules = answer_rules(
        tokenizer,
        SAMPLING,
        max_tokens=CONTEXT,
        max_turns=20,
        tool_format="auto",
        separate_thoughts=False,
        warn=pytest.fail,
    )
    kind = HarnessKind(f"{EXAMPLE / f'with_{name}.py'}:run", None, 240.0, 4.0, "`agent`")
    gateway, templates = Gateway(SAMPLING), Templates(tokenizer)
    agents = KeptAgents(Harnesses(kind, python=str(PYTHON)), gateway, templates, rules, "episode")
    rows = [
        Prompt(at, [1], {"messages": [{"role": "user", "content": f"{a}+{b}"}]}, "text", label=str(a + b))
        for at, (a, b) in enumerate(sums)
    ]
    await agents.start()
    try:
        await agents.generate(client, rows, SAMPLING, samples_per_prompt=samples)
    finally:
        await agents.close()
    return agents.episodes, agents.counts
