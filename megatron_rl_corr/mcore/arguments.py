"""The launcher's flags: parsed and checked before anything heavy is imported; added to Megatron's own parser.

Only the standard library and config.py, so that a wrong flag is told at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.config.rules import check_trainer_inputs
from megatron_rl_corr.mcore.client_flags import ClientOptions, add_client_arguments, client_options
from megatron_rl_corr.mcore.correction_flags import add_correction, correction_config
from megatron_rl_corr.mcore.environment_flags import add_environment, environment_timeout_s, max_turns
from megatron_rl_corr.mcore.one_update import check_one_update
from megatron_rl_corr.mcore.policy_flags import add_model_check
from megatron_rl_corr.mcore.reward_flags import RewardOptions, add_reward_arguments, reward_options

PREFIX = "--rollout-"
CHECKS = ("semantic", "all", "off")
STALE = ("keep", "drop")
PAUSE_MODES = ("retract", "in_place")
TRANSPORTS = ("distributed", "tensor", "disk")
PROOFS = ("checksum", "off")
REPLAYS = ("off", "R2", "R3")
DEFAULT_MIN_AGREEMENT = 0.25


@dataclass(frozen=True)
class RolloutOptions:
    """Where samples come from and where the step's numbers go."""

    urls: tuple[str, ...]
    client: ClientOptions
    hf_checkpoint: str
    allow_model_differences: bool
    prompts: str
    reward_function: str | None
    rewards: RewardOptions
    eval_prompts: str | None
    environment: str | None
    max_turns: int | None
    """Of the policy in an episode; None without an environment."""
    environment_timeout_s: float | None
    """Longest call of one method of the environment; None without one."""
    group_size: int
    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    server_check: str
    max_first_step_kl: float | None
    """None: by the types of the numbers on both sides."""
    linear_logprobs: bool
    fp32_lm_head: bool
    inplace_gradient: bool
    max_lag: int
    stale_samples: str
    pause_mode: str
    bucket_mib: float
    weight_transport: str
    weight_dir: str | None
    verify_push: str
    log_dir: str | None
    save_trajectories: str | None
    router_replay: str
    router_replay_min_agreement: float | None
    """None without R3."""
    expert_statistics: bool


def add_rollout_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add our groups of flags to Megatron's parser, or to our own."""
    add_correction(parser.add_argument_group("rollout correction"))
    _add_rollout(parser.add_argument_group("rollouts"))
    add_model_check(parser.add_argument_group("model"))
    add_reward_arguments(parser.add_argument_group("rewards"))
    _add_router_replay(parser.add_argument_group("mixture of experts"))
    add_client_arguments(parser.add_argument_group("rollout servers"))
    return parser


def _add_rollout(group: Any) -> None:
    add = group.add_argument
    add("--rollout-url", metavar="URL", nargs="+", default=None,
        help="SGLang servers, for example http://127.0.0.1:30000")
    add("--rollout-hf-checkpoint", metavar="DIR", default=None,
        help="Hugging Face folder of the model that the servers run: loaded into Megatron's shards when a "
        "run starts without --load, and the source of weight names and of the true vocabulary size")
    add("--rollout-prompts", metavar="JSONL", default=None,
        help='one JSON object a line: {"input_ids": [...]} or {"prompt": "text"}, further keys for the '
        "reward")
    add("--rollout-reward-function", metavar="FILE.py:NAME", default=None,
        help="reward(prompt, output_ids, finish_reason) -> number; also package.module:NAME, or none where the "
        "environment scores")
    add("--rollout-eval-prompts", metavar="JSONL", default=None,
        help="held-out prompts, sampled once each after every --eval-interval steps with the same settings and reward; "
        "logged as eval/*")
    add_environment(add)
    add("--rollout-group-size", metavar="G", type=int, default=8,
        help="samples of each prompt (default 8); --global-batch-size counts samples")
    add("--rollout-max-new-tokens", metavar="N", type=int, default=1024,
        help="longest response, in tokens, what an environment says included (default 1024)")
    add("--rollout-temperature", metavar="T", type=float, default=1.0,
        help="sampling temperature, applied to the training log-probs too (default 1.0)")
    add("--rollout-top-p", metavar="P", type=float, default=1.0,
        help="nucleus sampling; the training log-probs are renormalised on the ids that it kept (default 1.0)")
    add("--rollout-top-k", metavar="K", type=int, default=-1,
        help="sample from the K likeliest ids, 2 to 4096; --rollout-top-p needs it, because SGLang tells the kept ids "
        "only with it (default -1: off)")
    add("--rollout-server-check", metavar="KIND", default=CHECKS[0],
        help="at the start, ask the servers what `megatron-rl-corr doctor` asks in a second: semantic (default) "
        "refuses to train on another distribution and prints the rest, all refuses on any finding, off asks nothing")
    add("--rollout-max-first-step-kl", metavar="X", type=float, default=None,
        help="the run ends if the train-infer KL (k3) of the first step, which the very weights that are trained have "
        "sampled, is above X (default: 1e-4 where both sides are float32, 1e-1 with a quantised server, else 1e-2)")
    add("--rollout-linear-logprobs", action="store_true",
        help="training log-probs from hidden states, a chunk of logits at a time: all logits are never held (no bias, "
        "MTP or truncated sampling)")
    add("--rollout-fp32-lm-head", action="store_true",
        help="logits in float32, as SGLang's --enable-fp32-lm-head makes them; with --rollout-linear-logprobs")
    add("--rollout-inplace-gradient", action="store_true",
        help="write the gradient of the logits over the logits, which saves one copy; nothing else may read them")
    add("--rollout-max-lag", metavar="K", type=int, default=0,
        help="sample ahead of training, from weights up to K versions old: servers and trainer work at the same "
        "time; the correction takes the age into account (default 0: on-policy, one after the other)")
    add("--rollout-stale-samples", metavar="KIND", default=STALE[0],
        help="samples that took so long that they are more than K versions old: keep (default) corrects them like "
        "the others, drop asks for new ones, which prefers short responses")
    add("--rollout-pause-mode", metavar="MODE", default=PAUSE_MODES[0],
        help="responses that are running while weights change: retract (default) computes their keys and values anew, "
        "in_place goes on with the old ones, and needs servers with --disable-overlap-schedule")
    add("--rollout-bucket-mib", metavar="MIB", type=float, default=256.0,
        help="weights are sent in buckets of this size (default 256)")
    add("--rollout-weight-transport", metavar="KIND", default=TRANSPORTS[0],
        help="how new weights get to the servers: distributed (default) broadcasts over NCCL or gloo, tensor hands "
        "them to servers on the same host, disk writes them to --rollout-weight-dir")
    add("--rollout-weight-dir", metavar="DIR", default=None,
        help="folder for --rollout-weight-transport disk, seen by every server under the same path; a Hugging Face "
        "model for each of the last two versions")
    add("--rollout-verify-push", metavar="KIND", default=PROOFS[0],
        help="after every push: checksum (default) asks every server for checksums of its weights, which must agree "
        "with the other servers' and with the trainer's own of up to 256 MiB a pipeline stage; off asks nothing")
    add("--rollout-log-dir", metavar="DIR", default=None,
        help="write metrics.jsonl and run.json there, for `megatron-rl-corr report DIR`")
    add("--rollout-save-trajectories", metavar="DIR", default=None,
        help="write every step's samples there, with both policies' log-probs, masks and advantages: a Parquet file a "
        "step and replica; needs the scoring pass, but in bypass mode")


def _add_router_replay(group: Any) -> None:
    group.add_argument(
        "--router-replay", metavar="KIND", default=REPLAYS[0],
        help="experts of a token in training: off (default) as Megatron's routers choose, R3 as the servers did (start "
        "them with --enable-return-routed-experts); R2, as they chose for the old log-probs, needs several updates a "
        "batch, which there are not yet")
    group.add_argument(
        "--router-replay-min-agreement", metavar="K", type=float, default=None,
        help="with R3, a step whose servers' routes agree less with Megatron's own choice, as Cohen's kappa of a "
        f"sample, is refused before it trains (default {DEFAULT_MIN_AGREEMENT}; -1 leaves the rule out)")
    group.add_argument(
        "--expert-statistics", action="store_true",
        help="tokens, mean |log-ratio|, mean weight and rejected fraction of every expert, in experts.jsonl of "
        "--rollout-log-dir and as heat maps in TensorBoard")


def parse(arguments: Sequence[str]) -> tuple[RolloutCorrectionConfig, RolloutOptions]:
    """Our flags out of a whole Megatron command line, checked. ValueError names the flag and the remedy."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    add_rollout_arguments(parser)
    try:
        values, others = parser.parse_known_args(list(arguments))
    except argparse.ArgumentError as error:
        raise ValueError(str(error).removeprefix("argument ")) from None
    known = [option for action in parser._actions for option in action.option_strings]
    for other in others:
        name = other.split("=")[0]
        if name.startswith(PREFIX):
            near = [flag for flag in known if flag.startswith(name)] or difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else "see --help"
            raise ValueError(f"unknown flag {name}; {hint}")
    config = correction_config(values)
    if config.kl_loss_coef:
        raise ValueError(
            f"kl_loss_coef {config.kl_loss_coef} needs a reference policy, which the launcher does not load; set it to "
            "0, or call policy_loss with ref_logprobs from your own loop"
        )
    by_turn = [rule.name for rule in config.rollout_rs if rule.level == "turn_mean"]
    by_turn += ["--rollout-is turn"] if config.rollout_is == "turn" else []
    if by_turn and not values.rollout_environment:
        raise ValueError(
            f"{by_turn[0]} looks at turns, and without --rollout-environment every rollout has one; add it, or use a "
            "token or sequence level"
        )
    check_trainer_inputs(
        config.rollout_rs, lambda flag: getattr(values, flag.removeprefix("--").replace("-", "_")),
        bypass_mode=config.bypass_mode,
    )
    if config.bypass_mode and values.expert_statistics:
        raise ValueError(
            "--expert-statistics watches the pass that computes old log-probs, which bypass mode leaves out; drop it"
        )
    options = rollout_options(values)
    check_one_update(config, values)
    return config, options


def _min_agreement(values: argparse.Namespace) -> float | None:
    kind, given = values.router_replay, values.router_replay_min_agreement
    if kind not in REPLAYS:
        raise ValueError(f"--router-replay must be {', '.join(REPLAYS)}, got {kind!r}")
    if kind != "R3":
        if given is not None:
            raise ValueError(
                f"--router-replay-min-agreement {given} has no effect with --router-replay {kind}; drop it, or use R3"
            )
        return None
    if given is not None and not -1 <= given < 1:
        raise ValueError(f"--router-replay-min-agreement must be in [-1, 1), got {given}")
    return DEFAULT_MIN_AGREEMENT if given is None else given


def rollout_options(values: argparse.Namespace) -> RolloutOptions:
    """ValueError for what is missing or out of range."""
    reward = None if values.rollout_reward_function == "none" else values.rollout_reward_function
    required = {"url": values.rollout_url, "hf-checkpoint": values.rollout_hf_checkpoint,
                "prompts": values.rollout_prompts, "reward-function": reward or values.rollout_environment}  # fmt: skip
    for flag, value in required.items():
        if not value:
            raise ValueError(f"{PREFIX}{flag} is required; see --help")
    fields = {field.name for field in dataclasses.fields(RolloutOptions)}
    fields -= {"urls", "client", "reward_function", "rewards", "max_turns", "environment_timeout_s"}
    fields -= {"router_replay", "router_replay_min_agreement", "expert_statistics"}
    options = RolloutOptions(
        urls=tuple(values.rollout_url), client=client_options(values), reward_function=reward,
        rewards=reward_options(values, function=reward), max_turns=max_turns(values),
        environment_timeout_s=environment_timeout_s(values),
        router_replay=values.router_replay,
        router_replay_min_agreement=_min_agreement(values), expert_statistics=values.expert_statistics,
        **{name: getattr(values, f"rollout_{name}") for name in fields},
    )
    for name in ("group_size", "max_new_tokens", "temperature", "bucket_mib"):
        value = getattr(options, name)
        if not value > 0:
            raise ValueError(f"{PREFIX}{name.replace('_', '-')} must be positive, got {value}")
    known = {"server_check": CHECKS, "stale_samples": STALE, "pause_mode": PAUSE_MODES, "weight_transport": TRANSPORTS,
             "verify_push": PROOFS}  # fmt: skip
    for name, allowed in known.items():
        if getattr(options, name) not in allowed:
            raise ValueError(
                f"{PREFIX}{name.replace('_', '-')} must be {', '.join(allowed)}, got {getattr(options, name)!r}"
            )
    if (options.weight_transport == "disk") != (options.weight_dir is not None):
        raise ValueError(
            "--rollout-weight-transport disk needs --rollout-weight-dir, a folder that every server sees by this path"
            if options.weight_dir is None
            else f"--rollout-weight-dir has no effect with --rollout-weight-transport {options.weight_transport}; drop "
            "it, or use disk"
        )
    if options.max_first_step_kl is not None and not options.max_first_step_kl > 0:
        raise ValueError(f"--rollout-max-first-step-kl must be positive, got {options.max_first_step_kl}")
    if options.max_lag < 0:
        raise ValueError(f"--rollout-max-lag must be at least 0, got {options.max_lag}")
    for name in ("stale_samples", "pause_mode"):
        if options.max_lag == 0 and getattr(options, name) not in (STALE[0], PAUSE_MODES[0]):
            raise ValueError(
                f"{PREFIX}{name.replace('_', '-')} {getattr(options, name)} has no effect with --rollout-max-lag 0, as "
                "no sample is running while weights change; add --rollout-max-lag 1, or drop it"
            )
    if options.inplace_gradient and (options.linear_logprobs or options.top_k > 0):
        raise ValueError(
            "--rollout-inplace-gradient has no effect with --rollout-linear-logprobs, which holds no logits, nor with "
            "--rollout-top-k, whose gradient is sparse; drop it"
        )
    if options.fp32_lm_head and not options.linear_logprobs:
        raise ValueError("--rollout-fp32-lm-head has no effect on Megatron's own logits; add --rollout-linear-logprobs")
    if options.linear_logprobs and (options.top_p < 1 or options.top_k > 0):
        raise ValueError(
            f"--rollout-linear-logprobs with --rollout-top-p {options.top_p} and --rollout-top-k {options.top_k}: the "
            "ids that the server kept are looked up in the logits; drop the one or the others"
        )
    if options.group_size < 2:
        raise ValueError(
            "--rollout-group-size 1 leaves a group-relative advantage of 0 everywhere; use 2 or more"
        )
    return options
