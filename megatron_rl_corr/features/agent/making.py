"""Makes what runs a run's agents, of its flags."""

from __future__ import annotations

import shlex

from megatron_rl_corr.config.flags import warn
from megatron_rl_corr.config.run import RunConfig
from megatron_rl_corr.data.tokenizer import Tokenizer
from megatron_rl_corr.rollout.agents.agents import NO_LIMIT, Agents
from megatron_rl_corr.rollout.agents.harnesses import Harnesses
from megatron_rl_corr.rollout.agents.starter import HarnessKind
from megatron_rl_corr.rollout.gateway.answering import answer_rules
from megatron_rl_corr.rollout.gateway.server import Gateway
from megatron_rl_corr.rollout.gateway.templates import Templates
from megatron_rl_corr.rollout.sampling import training_sampling


def make_agents(
    options: RunConfig, tokenizer: Tokenizer | None, *, seq_length: int | None, replica: int
) -> Agents:
    """The agents of a run; nothing is started.

    Raises:
        ValueError: there is no chat template, or no such tool format.
    """
    if tokenizer is None:
        raise ValueError(
            "`agent` needs a tokenizer with a chat template in `hf_checkpoint`; add the model's files"
        )
    sampling = training_sampling(options)
    command = None if options.agent_command is None else tuple(shlex.split(options.agent_command))
    kind = HarnessKind(
        options.agent,
        command,
        options.agent_timeout_s,
        options.agent_memory_gib,
        "`agent`" if command is None else "`agent_command`",
    )
    rules = answer_rules(
        tokenizer,
        sampling,
        max_tokens=NO_LIMIT if seq_length is None else seq_length + 1,
        max_turns=options.agent_max_turns,
        tool_format=options.agent_tool_parser,
        separate_thoughts=options.agent_reasoning == "separate",
        warn=warn if replica == 0 else lambda text: None,
    )
    port = options.gateway_port + replica if options.gateway_port else 0
    gateway = Gateway(
        sampling, host=options.gateway_host, port=port, strict=options.gateway_strict, model_name="policy"
    )
    return Agents(
        Harnesses(kind, options.names_of_keys, python=options.agent_python),
        gateway,
        Templates(tokenizer, options.template_variables()),
        rules,
        options.agent_branches,
    )
