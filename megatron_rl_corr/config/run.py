"""What a run is started with, beside its correction: servers, samples, rewards, model,
weights, experts, logs.

One frozen dataclass a topic, which checks itself; `RunConfig` is all of them. A field is a flag:
`group_size` is --rollout-group-size, and its docstring is the flag's help.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from megatron_rl_corr.config.distillation import TeacherConfig
from megatron_rl_corr.config.features import feature_options
from megatron_rl_corr.config.fields import Between, EpisodeMaker, Options, Positive, option, options_of
from megatron_rl_corr.config.groups import GroupsConfig
from megatron_rl_corr.config.policy import ExpertsConfig, ModelConfig, WeightSyncConfig
from megatron_rl_corr.config.problems import check_each, known
from megatron_rl_corr.config.prompts import PromptsConfig
from megatron_rl_corr.config.reference import ReferenceConfig
from megatron_rl_corr.config.replay import ReplayConfig
from megatron_rl_corr.config.reward_specs import RewardSpec, parse_rewards
from megatron_rl_corr.config.rewards import RewardsConfig
from megatron_rl_corr.config.samples import SamplesConfig
from megatron_rl_corr.config.supervision import SupervisionConfig
from megatron_rl_corr.config.updates import UpdatesConfig
from megatron_rl_corr.config.urls import check_source, check_urls_of, is_key

ENGINES = {"sglang": "megatron_rl_corr.engines.sglang", "vllm": "megatron_rl_corr.engines.vllm"}
"""The programs that servers may run, and the module that speaks to each."""
AUTO = "auto"
"""Ask each server which of them it runs."""
OVER_HTTP = (AUTO, "sglang", "vllm")
"""Engines whose addresses are checked before anything is imported; another one checks its own."""


CHANGING = ("servers_file", "servers_poll_s", "servers_drain_s", "servers_wait_s")
"""Options of a fleet that changes; no client's."""


@dataclass(frozen=True, kw_only=True)
class ServersConfig(Options):
    """Rollout servers: where they are, how many samples they are sent at a time, how long each
    answer may take.
    """

    urls: tuple[str, ...] = option(
        (), flag="--rollout-url", metavar="URL", required_unless="replay or servers_file"
    )
    """Servers, for example http://127.0.0.1:30000."""

    servers_file: tuple[str, ...] = option((), metavar="SOURCE")
    """Where servers come and go while the run goes on: a file with an address a line, a folder of such
    files, dns://NAME:PORT, or the address of a router. Beside those of `urls`, which stay.
    """

    servers_poll_s: Annotated[float | None, Positive()] = option(
        None, metavar="S", needs="servers_file", usual=2.0
    )
    """Seconds between two readings of `servers_file`; a change is believed when two are equal."""

    servers_drain_s: Annotated[float | None, Between(0)] = option(
        None, metavar="S", needs="servers_file", usual=30.0
    )
    """Longest time that a server which was taken out of `servers_file` may go on with its samples; what
    is not done then is sampled anew at another one.
    """

    servers_wait_s: Annotated[float | None, Positive()] = option(
        None, metavar="S", needs="servers_file", usual=1800.0
    )
    """Longest wait for a server, at the start or later, when there is none, before the run ends; in the
    place of `outage_timeout_s`.
    """

    engine: str = option(AUTO, choices=(AUTO, *ENGINES))
    """The program that the servers run; auto: each is asked which it is, and a run may have
    servers of both kinds.
    """

    server_check: Literal["semantic", "all", "off"] = "semantic"
    """Ask the servers at the start what `megatron-rl-corr doctor` asks in a second: semantic
    refuses to train on another distribution and prints the other findings, all refuses on any
    finding, off asks nothing.
    """

    max_concurrency: Annotated[int, Positive()] = option(64, metavar="N")
    """Samples in flight per data-parallel replica."""

    max_per_server: Annotated[int | None, Positive()] = option(None, metavar="N")
    """Samples in flight per data-parallel replica at each server (default: as many as at all
    of them together).
    """

    timeout_s: Annotated[float, Positive()] = option(600.0, metavar="S")
    """Longest wait, in seconds, for the answer to a pause or to a bucket of weights; samples
    have no such limit.
    """

    read_timeout_s: Annotated[float, Positive()] = option(60.0, metavar="S")
    """Longest time without progress of the samples at a server, before it is left out; waiting in its
    queue and pauses don't count.
    """

    answer_timeout_s: Annotated[float | None, Positive()] = option(None, metavar="S")
    """Longest time until the answer to one request for a sample, queue included and pushes not, whatever the
    server's counters say (default: an hour, or a second for each token that it may have, if that is longer).
    """

    outage_timeout_s: Annotated[float, Between(0)] = option(10.0, metavar="S")
    """Longest wait for a server to come back when none is left, before the run ends."""

    update_timeout_s: Annotated[float, Positive()] = option(3600.0, metavar="S")
    """Longest wait, in a push, for a server that reads or writes all of its weights: a folder, checksums,
    the end of an update.
    """

    push_timeout_s: Annotated[float | None, Positive()] = option(None, metavar="S")
    """Longest time of a whole push: a server that is waited for when an attempt has used up half of what is
    left is left out, and the others have the rest (default: twice `update_timeout_s`).
    """

    ingest_process: Literal["auto", "on", "off"] = "auto"
    """Ask for samples, and read their answers, in a process beside each data-parallel replica: answers with
    routed experts, of a hundred megabytes, then cost the trainer's interpreter some milliseconds. auto: with
    `router_replay` R3.
    """

    max_retries: Annotated[int, Between(0)] = option(3, metavar="N")
    """Failed requests of one sample that are asked again."""

    max_continuations: Annotated[int, Between(0)] = option(8, metavar="N")
    """Times that one sample is continued that a server cut short."""

    ca_file: str | None = option(None, metavar="PEM")
    """Certificates that https servers are trusted by, instead of the system's."""

    api_key_env: str | None = option(None, metavar="NAME")
    """Environment variable that holds the servers' --api-key."""

    def check(self) -> None:
        if self.engine in OVER_HTTP:
            check_urls_of("`urls`", self.urls)
        elif self.ingest_process != "auto":
            raise ValueError(
                f"`ingest_process` {self.ingest_process} has no effect on `engine` {self.engine}; "
                "leave it out"
            )

    def check_servers_file(self) -> None:
        """ValueError for a source that is none."""
        for source in self.servers_file:
            try:
                check_source(source)
            except ValueError as error:
                raise ValueError(f"`servers_file`: {error}") from None

    def check_key(self) -> None:
        if self.api_key_env is not None and not os.environ.get(self.api_key_env):
            raise ValueError(
                f"`api_key_env`: the environment variable {self.api_key_env} is not set; export it"
            )
        if self.api_key_env is not None and not is_key(os.environ[self.api_key_env]):
            raise ValueError(
                f"`api_key_env`: the value of {self.api_key_env} must be printable ASCII without spaces "
                "around it; is there a line end at its end?"
            )

    def check_ca_file(self) -> None:
        if self.ca_file is not None and not os.path.isfile(self.ca_file):
            raise ValueError(f"`ca_file`: there is no file {self.ca_file}")

    def client_arguments(self) -> dict[str, Any]:
        """RolloutClient's keyword arguments. Reads the key, which is in no flag, no log and no file."""
        others = ("urls", "server_check", "api_key_env", *CHANGING)
        names = [field.name for field in dataclasses.fields(ServersConfig) if field.name not in others]
        key = None if self.api_key_env is None else os.environ[self.api_key_env]
        given = {name: getattr(self, name) for name in names}
        process = {"auto": None, "on": True, "off": False}[self.ingest_process]
        if self.servers_file:
            given |= {"changes": True, "outage_timeout_s": self.servers_wait_s}
        return given | {"api_key": key, "ingest_process": process}


@dataclass(frozen=True, kw_only=True)
class EnvironmentConfig(Options):
    """Environments: what answers between the turns of an episode."""

    makes_samples = EpisodeMaker(
        ("environment",),
        "max_turns",
        "megatron_rl_corr.rollout.episodes:episodes_of",
        functions=("environment",),
    )

    environment: str | None = option(None, metavar="FILE.py:NAME")
    """Episodes of several turns: NAME(prompt) makes an Environment, which answers between the policy's
    turns and may score them; also package.module:NAME.
    """

    max_turns: Annotated[int | None, Positive()] = option(None, metavar="N", needs="environment", usual=8)
    """Turns of the policy in an episode, at most."""

    environment_timeout_s: Annotated[float | None, Positive()] = option(
        None, metavar="S", needs="environment", usual=600.0
    )
    """Longest call of one method of the environment, in seconds; its sample has failed after that."""


@dataclass(frozen=True, kw_only=True)
class LogsConfig(Options):
    """Logs: where metrics are written."""

    log_dir: str | None = option(None, metavar="DIR")
    """Write metrics.jsonl and run.json there, for `megatron-rl-corr report DIR`."""


TOPICS = (
    ServersConfig,
    PromptsConfig,
    SamplesConfig,
    RewardsConfig,
    GroupsConfig,
    EnvironmentConfig,
    UpdatesConfig,
    ModelConfig,
    ReferenceConfig,
    TeacherConfig,
    WeightSyncConfig,
    ExpertsConfig,
    LogsConfig,
    SupervisionConfig,
    ReplayConfig,
    *feature_options(),
)
IDLE_TOPICS = (
    ServersConfig,
    PromptsConfig,
    RewardsConfig,
    GroupsConfig,
    EnvironmentConfig,
    WeightSyncConfig,
    *(topic for topic in TOPICS if not topic.acts_in_replay),
)
IDLE_OPTIONS = ("max_lag", "stale_samples", "pause_mode", "save_waiting_gib")
"""What has no effect in a replay."""
OF_SCORERS = ("engine", "max_concurrency", "timeout_s", "max_retries", "api_key_env", "ca_file")
"""Options of servers that act on those of a reference policy and of a teacher too."""


@dataclass(frozen=True, kw_only=True)
class RunConfig(*reversed(TOPICS)):
    """Everything that a run is started with, beside its correction, in one object:
    `RunConfig(urls=..., ...)`.
    """

    acts_in_replay = True  # of its topics some do not
    writes = tuple(one for topic in TOPICS for one in topic.writes)
    makers = tuple(topic.makes_samples for topic in TOPICS if topic.makes_samples is not None)
    """What may make samples."""

    @property
    def maker(self) -> EpisodeMaker | None:
        """What makes samples of prompts; None: a sample is one response."""
        asked = [one for one in self.makers if any(getattr(self, name) for name in one.asked_by)]
        return asked[0] if asked else None

    @property
    def most_turns(self) -> int | None:
        """Turns of an episode, at most; None: samples are single responses."""
        maker = self.maker
        return None if maker is None else getattr(self, maker.turns)

    @property
    def scoring_urls(self) -> tuple[str, ...]:
        """Servers that score samples and are never pushed to."""
        return self.reference_urls + self.teacher_urls

    @property
    def names_of_keys(self) -> set[str]:
        """Variables of the environment that hold keys, which no process with a user's code needs."""
        return {self.api_key_env, self.reward_api_key_env} - {None}

    @property
    def rewards(self) -> tuple[RewardSpec, ...]:
        """What the reward is the weighted sum of; none where the episodes score themselves."""
        return parse_rewards(
            self.reward_function, self.reward_url, self.reward_weights, max_new_tokens=self.max_new_tokens
        )

    def check(self) -> None:
        rewarded = self.reward_function or self.reward_url or self.maker
        if self.replay is None and not (rewarded or self.teacher_urls):
            raise ValueError("`reward_function` is required; see --help")

    def check_makers(self) -> None:
        """ValueError where two options would make the samples."""
        given = [name for one in self.makers for name in one.asked_by if getattr(self, name)]
        if len(given) > 1:
            raise ValueError(f"`{given[0]}` and `{given[1]}` would both make the samples; drop one of them")

    def check_rewards(self) -> None:
        if self.replay is None:
            parse_rewards(
                self.reward_function, self.reward_url, self.reward_weights, max_new_tokens=self.max_new_tokens
            )

    def check_reward_weights(self) -> None:
        """ValueError where no reward counts, and no teacher trains."""
        if self.reward_weights and not any(self.reward_weights) and not self.teacher_urls:
            raise ValueError(
                "`reward_weights` are all 0, which leaves every reward at 0; give one of them another weight"
            )

    def check_unread_labels(self) -> None:
        """ValueError where no reward reads a label in a way that may fail."""
        if self.unread_labels == "drop" and not any(spec.reads_label for spec in self.rewards):
            raise ValueError(
                "`unread_labels` drop has no effect without `reward_function` math, which alone may not "
                "read a label; drop it"
            )

    def check_gradient(self) -> None:
        if self.inplace_gradient and (self.linear_logprobs or self.top_k > 0):
            raise ValueError(
                "`inplace_gradient` has no effect with `linear_logprobs`, which holds no logits, nor with "
                "`top_k`, whose gradient is sparse; drop it"
            )

    def check_logprobs(self) -> None:
        if self.linear_logprobs and (self.top_p < 1 or self.top_k > 0):
            raise ValueError(
                f"`linear_logprobs` with `top_p` {self.top_p} and `top_k` {self.top_k}: the ids that the "
                "server kept are looked up in the logits; drop the one or the others"
            )

    def check_colocated_transport(self) -> None:
        """ValueError for a transport that does not go with turns of servers and trainer."""
        if self.colocate and self.weight_transport != "tensor":
            raise ValueError(
                f"`colocate` with `weight_transport` {self.weight_transport}: weights go from one process to "
                "the other in the memory of the GPU that both are on; give `weight_transport` tensor"
            )

    def check_colocated_servers(self) -> None:
        """ValueError for servers that come and go where each has the trainer's GPUs."""
        if self.colocate and self.servers_file:
            raise ValueError(
                "`servers_file` with `colocate`: servers that come and go have no turn with the trainer on "
                "its GPUs; drop one of them"
            )

    def check_colocated_lag(self) -> None:
        """ValueError for samples ahead of training where servers and trainer have turns."""
        if self.colocate and self.max_lag > 0:
            raise ValueError(
                f"`colocate` with `max_lag` {self.max_lag}: servers have no memory while the trainer trains, "
                "and can't sample ahead; drop one of them"
            )

    def check_colocated_engine(self) -> None:
        """ValueError for an engine whose turns with the trainer are not tested."""
        if self.colocate and self.engine not in (AUTO, "sglang"):
            raise ValueError(
                f"`colocate` with `engine` {self.engine}: the release of its memory is not tested here; use "
                "SGLang, or drop `colocate`"
            )

    def check_replay(self) -> None:
        """ValueError for options that are given and have no effect where nothing is sampled."""
        if self.replay is None:
            return

        def check(name: str) -> None:
            one = options_of(RunConfig)[name]
            # nobody gives the usual one beside what it needs
            if getattr(self, name) not in (one.default, one.usual):
                raise ValueError(
                    f"`{name}` has no effect with `replay`, which trains on saved samples: no server is "
                    "asked, nothing is scored or pushed; drop it"
                )

        truncated = known(lambda: self.truncated_samples)
        check_each(check, idle_in_replay(scored=bool(self.scoring_urls), masked=truncated == "mask"))


def idle_in_replay(*, scored: bool, masked: bool) -> tuple[str, ...]:
    """Options that a replay refuses, as they have no effect.

    Args:
        scored: servers of a reference policy, or of a teacher, are asked.
        masked: `truncated_samples` is mask.
    """
    acts = (OF_SCORERS if scored else ()) + (("truncated_samples",) if masked else ())
    names = [name for topic in IDLE_TOPICS for name in options_of(topic) if name not in acts]
    return (*names, *IDLE_OPTIONS)
