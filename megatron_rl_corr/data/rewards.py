"""Scores samples as they end: by their environment, or by the weighted sum of rewards,
beside the event loop.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_rl_corr.config.flags import warn
from megatron_rl_corr.config.reward_specs import RewardSpec, parse_rewards
from megatron_rl_corr.config.run import RunConfig
from megatron_rl_corr.data.label_check import unread_labels
from megatron_rl_corr.data.loading import load
from megatron_rl_corr.data.prompt import Prompt
from megatron_rl_corr.data.prompts import PromptDataset
from megatron_rl_corr.data.reward_functions import RewardFunctions, as_sample_failure, value_of
from megatron_rl_corr.data.reward_input import RewardInput, reward_input
from megatron_rl_corr.data.reward_url import RewardURL
from megatron_rl_corr.data.reward_worker import FLAG
from megatron_rl_corr.data.rows import BadRow
from megatron_rl_corr.data.tokenizer import Tokenizer
from megatron_rl_corr.engines.errors import SampleFailure

if TYPE_CHECKING:
    from megatron_rl_corr.engines.trajectory import Trajectory

COUNTS_TOKENS = ("overlong", "length")
"""Built-in rewards that need no text."""
NAMED_LABELS = 5
"""Labels that can't be read, of which the start shows so many."""
LABELS_CHECKED = 8
"""Rows whose labels are looked at before the first sample."""


def load_function(spec: str) -> Callable:
    """The function named by "path/to/file.py:name" or "package.module:name".

    Raises:
        ValueError: as `load_with_module`.
    """
    return load(spec, FLAG)


@dataclass(frozen=True)
class Score:
    """A sample's reward. Example: Score(0.5, {"math": 1.0, "short": -0.5}) with weights 1 and 1."""

    reward: float
    """Finite in float32."""
    parts: dict[str, float] = field(default_factory=dict)
    """Named rewards before their weights, and further numbers of their dicts; empty where the
    environment scored.
    """


class Rewards:
    """Scores samples with reward functions, or with the reward of their environments.

    An `async def` runs on the event loop; a plain function in processes that load its file themselves, or in
    one thread of this process. Start, use and close it on one event loop.

    Args:
        specs: the rewards that are added up; or one function, "path/to/file.py:name" or "package.module:name"
            or the name of a built-in one; None or none: the environments score.
        workers: processes for plain functions; 0: a thread of this process. None: DEFAULT_WORKERS.
        limit_s: seconds that a call may take.
        tokenizer: makes text of ids; None: there is none, and so no text.
        url_batch: samples that an address is sent at once, at most.
        api_key: of the addresses.
        hidden: variables of the environment that processes do not get, such as those with servers' keys.
        late: late(failure) is called when a call ends that was cancelled meanwhile; None:
            it had no failure.
    """

    def __init__(
        self,
        specs: Sequence[RewardSpec] | str | None,
        *,
        workers: int | None = None,
        limit_s: float,
        tokenizer: Tokenizer | None = None,
        url_batch: int = 32,
        api_key: str | None = None,
        hidden: Collection[str] = (),
        required: bool = True,
        late: Callable[[SampleFailure | None], None] = lambda failure: None,
    ):
        self._specs = parse_rewards([specs], [], []) if isinstance(specs, str) else tuple(specs or ())
        functions = [spec for spec in self._specs if spec.kind != "url"]
        self._functions = RewardFunctions(functions, workers=workers, limit_s=limit_s, hidden=hidden)
        how = {"batch": url_batch, "limit_s": limit_s, "api_key": api_key}
        self._urls = {spec.name: RewardURL(spec, **how) for spec in self._specs if spec.kind == "url"}
        self._tokenizer, self._required, self.late = tokenizer, required, late
        self._decoder = ThreadPoolExecutor(1, "rollout-decode")  # 10 ms for 32,000 tokens: not on the loop
        self._telling: set[asyncio.Task] = set()
        self._alone: list[RewardSpec] = []
        self._of_groups: list[RewardSpec] = []
        self._with_text = False

    @classmethod
    def of(cls, options: RunConfig, tokenizer: Tokenizer | None) -> Rewards:
        """Those that the options of a run name."""
        return cls(
            options.rewards,
            workers=options.reward_workers,
            limit_s=options.reward_timeout_s,
            tokenizer=tokenizer,
            hidden=options.names_of_keys,
            required=not options.teacher_urls or options.maker is not None,
            **options.reward_url_arguments(),
        )

    @property
    def compares(self) -> bool:
        """True if a reward is of whole groups, so that `of_sample` is not the whole score."""
        return bool(self._of_groups)

    async def start(self) -> None:
        """Load the functions and start their workers.

        Raises:
            ValueError: a function cannot be loaded, `reward_workers` has no effect on any, a built-in one
                needs text and there is no tokenizer, or an address does not answer.
        """
        texts = [spec for spec in self._specs if spec.kind == "builtin" and spec.source not in COUNTS_TOKENS]
        if texts and self._tokenizer is None:
            raise ValueError(
                f"{FLAG} {texts[0].source} needs the responses' text, and `hf_checkpoint` has no tokenizer; "
                "add its files, or use a reward of your own that scores ids"
            )
        try:
            for url in self._urls.values():
                await url.start()
            await self._functions.start()
        except BaseException:
            await self.close()
            raise
        forms = {
            spec.name: "sample" if spec.kind == "url" else self._functions.form_of(spec.name)
            for spec in self._specs
        }
        self._of_groups = [spec for spec in self._specs if forms[spec.name] == "group"]
        self._alone = [spec for spec in self._specs if spec not in self._of_groups]
        self._with_text = any(
            forms[spec.name] != "ids" and spec.source not in COUNTS_TOKENS for spec in self._specs
        )

    def check_labels(self, prompts: PromptDataset | None, flag: str) -> None:
        """ValueError where the first rows lack the label that a built-in reward compares with:
        later all would fail.

        Args:
            prompts: the data set; None on ranks that have none.
            flag: the option that named it.
        """
        wanting = [spec.source for spec in self._specs if spec.needs_label]
        for number in range(LABELS_CHECKED) if wanting and prompts is not None else ():
            try:
                prompt = prompts.at(number)
            except BadRow:  # counted and named when it is drawn
                continue
            if prompt.label is None:
                raise ValueError(
                    f"{FLAG} {wanting[0]} compares with a label, and row {prompt.index} of {flag} has none; "
                    "name the key that holds it with `label_key`, or leave the row out"
                )

    async def check_readable(self, prompts: PromptDataset, flag: str, *, drop: bool | None = None) -> None:
        """Judge the labels of the data before the first sample; those that `math` can't read are named.

        Args:
            prompts: the data set.
            flag: the option that named it.
            drop: leave such rows out, with a line; False refuses them, None too, where no
                option leaves any out.

        Raises:
            ValueError: there are such rows, and they are not left out, or all are.
        """
        for spec in self._specs:
            if not spec.reads_label:
                continue
            read, problems = await unread_labels(prompts, partial(self._functions.label_problems, spec.name))
            if not problems:
                continue
            named = [f"row {row} has the label {label!r}: {why}" for row, (label, why) in problems.items()]
            found = (
                f"{flag}: {FLAG} {spec.source} can't read the label of {len(problems)} of the {read} rows "
                f"that were looked at; {'; '.join(named[:NAMED_LABELS])}"
            )
            if not drop or len(problems) == read:
                leave = "" if drop is None else ", or train without these rows with `unread_labels` drop"
                raise ValueError(f"{found}. Mend the labels, or use exact or f1{leave}")
            warn(f"{found}. They are left out, as `unread_labels` drop says")
            prompts.leave_out({row: f"the label {label!r}: {why}" for row, (label, why) in problems.items()})

    def check_alone(self, flag: str) -> None:
        """Warn that `score` leaves rewards of groups out. Raises ValueError where there are no others.

        Args:
            flag: the option that wants samples scored alone.
        """
        left_out = " ".join(spec.source for spec in self._of_groups)
        if left_out and not self._alone:
            raise ValueError(
                f"{flag}: {FLAG} {left_out} compares the samples of a group, and an evaluation has none; add "
                "a reward that looks at one sample"
            )
        if left_out:
            warn(
                f"{flag}: its rewards are without those of {left_out}, which compares the samples of a group"
            )

    async def close(self) -> None:
        """End the workers, whatever they are doing."""
        await self._functions.close()
        for url in self._urls.values():
            await url.close()
        self._decoder.shutdown(wait=False)

    async def score(self, prompt: Prompt, trajectory: Trajectory) -> float:
        """The reward of a sample that has no group: the sum of the rewards that look at one sample alone.

        Raises:
            SampleFailure: as `of_sample`.
        """
        return (await self.of_sample(prompt, trajectory)).reward

    async def of_sample(self, prompt: Prompt, trajectory: Trajectory) -> Score:
        """The sum of the rewards that look at one sample alone.

        Args:
            prompt: the row of the data set.
            trajectory: the sample. Functions get all ids after the prompt, those of an environment included.

        Raises:
            SampleFailure: there is no reward. Its cause is `reward_timeout` past the limit, and
                `reward_error` for an exception (with its traceback), for a value that is not a finite
                number, and where both or neither of environment and function give a reward.
        """
        own = trajectory.environment_reward
        if own is None and not self._specs and not self._required:
            return Score(0.0)
        if (not self._specs) == (own is None):
            found = f"its environment or agent gave {'no reward' if own is None else f'the reward {own}'}"
            remedy = "give one of them" if own is None else "drop one of them"
            raise SampleFailure(
                "reward_error", f"{found}, and {FLAG} is {'not ' * (own is None)}given; {remedy}"
            )
        if own is not None:
            return Score(own, dict(trajectory.environment_parts or {}))
        left: list[asyncio.Task] = []
        texts = await self._texts(prompt, trajectory) if self._alone else (None, None)
        calls = [self._one(spec, reward_input(prompt, trajectory, texts), left) for spec in self._alone]
        try:
            found = await asyncio.gather(*calls, return_exceptions=True)
        except asyncio.CancelledError:
            if left:
                self._tell(left)
            raise
        return self._sum(Score(0.0), found)

    async def of_group(
        self, prompt: Prompt, trajectories: Sequence[Trajectory], scores: Sequence[Score]
    ) -> list[Score]:
        """The scores of `of_sample` with the rewards that compare samples added.

        Args:
            prompt: the row of the data set.
            trajectories: all samples of the group.
            scores: of each of them.

        Raises:
            SampleFailure: as `of_sample`; of all samples.
        """
        if not self._of_groups:
            return list(scores)
        texts = await asyncio.gather(*[self._texts(prompt, one) for one in trajectories])
        found = [
            await self._functions.call(
                spec.name, [reward_input(prompt, *one) for one in zip(trajectories, texts, strict=True)], []
            )
            for spec in self._of_groups
        ]
        return [self._sum(score, parts) for score, *parts in zip(scores, *found, strict=True)]

    async def _one(self, spec: RewardSpec, sample: RewardInput, left: list[asyncio.Task]) -> dict[str, float]:
        if spec.name in self._urls:
            return await self._urls[spec.name].call(sample)
        [parts] = await self._functions.call(spec.name, [sample], left)
        return parts

    def _sum(self, score: Score, found: Sequence[dict[str, float] | BaseException]) -> Score:
        """The score with these rewards added. Raises the first failure among them."""
        for parts in found:
            if isinstance(parts, BaseException):
                raise parts
        parts = {name: value for one in found for name, value in one.items()}
        total = np.float32(score.reward)
        with np.errstate(over="ignore", invalid="ignore"):
            for spec in self._specs:
                if spec.name in parts:
                    total += np.float32(spec.weight) * np.float32(parts[spec.name])
        if not math.isfinite(total):
            raise SampleFailure(
                "reward_error",
                f"the weighted sum of the rewards is {total} in float32, of {parts}; give smaller "
                "`reward_weights`",
            )
        return replace(score, reward=float(total), parts=score.parts | parts)

    async def _texts(self, prompt: Prompt, trajectory: Trajectory) -> tuple[str | None, str | None]:
        """Prompt and response as text, where a reward wants it and there is a tokenizer."""
        if not self._with_text or self._tokenizer is None:
            return prompt.text, None
        decode = asyncio.get_running_loop().run_in_executor
        response = await decode(self._decoder, self._tokenizer.decode, trajectory.output_ids.tolist())
        if prompt.text is not None:
            return prompt.text, response
        return await decode(self._decoder, self._tokenizer.decode, prompt.input_ids), response

    def _tell(self, calls: list[asyncio.Task]) -> None:
        """Count a sample once all of its calls have ended that went on when its group was given up."""

        async def tell() -> None:
            await asyncio.wait(calls)
            ended = [call for call in calls if not call.cancelled()]
            failures = [failure for call in ended if (failure := _failure_of(call)) is not None]
            if ended:
                self.late(failures[0] if failures else None)

        task = asyncio.get_running_loop().create_task(tell())
        self._telling.add(task)  # the loop itself holds tasks weakly
        task.add_done_callback(self._telling.discard)


def _failure_of(call: asyncio.Task) -> SampleFailure | None:
    """The failure of a sample whose call has ended."""
    error: Any = call.exception()
    if error is not None:
        return as_sample_failure(error)
    try:
        value_of(call.result())
    except SampleFailure as failure:
        return failure
    return None
