"""The flags of agents and of the gateway that they ask."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Annotated, Literal

from megatron_rl_corr.config.fields import Between, EpisodeMaker, Options, Positive, option

ANY = "agent or agent_command"


@dataclass(frozen=True, kw_only=True)
class AgentConfig(Options):
    """Agents: harnesses that speak OpenAI's or Anthropic's protocol, trained as they are."""

    acts_in_replay = False
    makes_samples = EpisodeMaker(
        ("agent", "agent_command"),
        "agent_max_turns",
        "megatron_rl_corr.features.agent.making:make_agents",
        functions=("agent",),
        bounds_turns=True,
        needs_packs=True,
    )

    agent: str | None = option(None, metavar="FILE.py:NAME")
    """Episodes of an agent: NAME(task, base_url, api_key), async or not, runs one in a process of its own
    and returns its reward, a dict with "reward", or None, and then `reward_function` scores; also
    package.module:NAME.
    """

    agent_command: str | None = option(None, metavar="COMMAND")
    """The same by a program, without a shell: OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL and
    ANTHROPIC_API_KEY are in its environment, ROLLOUT_TASK is the path of a JSON file, and the last line of
    its output may be the reward.
    """

    agent_python: str | None = option(None, metavar="PATH", needs="agent")
    """Interpreter that runs it (default: the trainer's), where its packages need others than the trainer's;
    Python 3.12 or later, with orjson.
    """

    agent_max_turns: Annotated[int | None, Positive()] = option(None, metavar="N", needs=ANY, usual=64)
    """Requests of an episode, at most; later ones are refused."""

    agent_timeout_s: Annotated[float | None, Positive(finite=True)] = option(
        None, metavar="S", needs=ANY, usual=1800.0
    )
    """Longest episode, in seconds; its processes are ended and its sample has failed after that."""

    agent_memory_gib: Annotated[float | None, Positive()] = option(None, metavar="GIB", needs=ANY, usual=4.0)
    """Data (RLIMIT_DATA) that each process of an episode may allocate."""

    agent_branches: Literal["episode", "sequence"] = option("episode", needs=ANY)
    """What means over samples in the loss take as one, where an episode has several sequences, as its agent
    edits its history: the episode, or each sequence.
    """

    agent_tool_parser: str | None = option(None, metavar="auto|NAME", needs=ANY, usual="auto")
    """How the model writes tool calls, by the name of a format; auto: as its chat template says."""

    agent_reasoning: Literal["content", "separate"] = option("content", needs=ANY)
    """Thoughts in <think> are in an answer's content, as sampled, or apart from it as reasoning_content: an
    agent that does not send them back then begins another sequence with each turn.
    """

    gateway_host: str | None = option(None, metavar="HOST", needs=ANY, usual="127.0.0.1")
    """Address that the gateway listens at; whoever reaches it needs the key of a running episode."""

    gateway_port: Annotated[int | None, Between(0, 65535)] = option(None, metavar="PORT", needs=ANY, usual=0)
    """Its port on the first data-parallel replica, the next one on the second and so on; 0: free ones."""

    gateway_strict: bool = option(False, needs=ANY)
    """Refuse requests that ask for another temperature and so on than the run's, which they get all the same
    without this.
    """

    def check_command(self) -> None:
        """ValueError for a command that can't be split, or is empty."""
        if self.agent_command is None:
            return
        try:
            words = shlex.split(self.agent_command)
        except ValueError as error:
            raise ValueError(f"`agent_command` {self.agent_command!r} can't be split: {error}") from None
        if not words:
            raise ValueError("`agent_command` is empty; give a program and its arguments")

    def check_rows(self) -> None:
        """ValueError for padded rows, of which each replica has equally many."""
        if (self.agent or self.agent_command) and self.pad_sequences:
            raise ValueError(
                "`pad_sequences` with an agent: an episode may have any number of sequences, and each "
                "replica has the same number of rows; drop `pad_sequences`, so that they are packed"
            )


OPTIONS = AgentConfig
