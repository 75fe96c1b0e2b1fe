"""What the correction does: frozen, checked when it is made, the same from Python, YAML and flags.

rho = pi_train / pi_rollout everywhere; every bound is one end of a closed interval.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from megatron_rl_corr.config import notation
from megatron_rl_corr.config.checks import NO_WEIGHTS, check_bounds, close_to, nearest, plain
from megatron_rl_corr.config.dialects import in_our_words
from megatron_rl_corr.config.fields import Positive, check_values, make, option, options_of
from megatron_rl_corr.config.loss_settings import LossSettings
from megatron_rl_corr.config.presets import PRESET_FIELDS
from megatron_rl_corr.config.problems import Problems, Refusal
from megatron_rl_corr.config.rules import RejectionRule, inputs_of, rules_help


@dataclass(frozen=True)
class RolloutCorrectionConfig(LossSettings):
    """Correction: importance weights, rejection rules, policy loss and how it is averaged.

    The settings of the loss are those of LossSettings. Example: RolloutCorrectionConfig(rollout_is="token",
    rollout_is_upper=2.0)
    """

    rollout_is: Literal["token", "sequence", "geometric", "turn"] | None = option(None, none="none")
    """Level of the importance weight pi_train / pi_rollout: token (rho_t), sequence (their
    product), geometric (their geometric mean) or turn (their product over the token's turn); none
    turns the weights off.
    """

    rollout_is_mode: Literal["truncate", "clip", "mask", "gamma"] = "truncate"
    """Weights out of bounds: truncate makes them min(w, upper), clip moves them into [lower, upper], mask
    makes them 0 (IcePop). Where only `rollout_is_threshold` is given, one bound truncates and two mask.
    gamma has no bounds: with `rollout_is` sequence it makes w^k e^(l (1 - w)) of them, k = 2 and l = 3
    where the advantage is not negative, else 3 and 2 (VESPO, arXiv:2602.10693).
    """

    rollout_is_lower: float | None = option(None, flag=None)
    """Lower bound of the weight; for clip and mask."""

    rollout_is_upper: float | None = option(None, flag=None)
    """Upper bound of the weight; verl's usual value is 2.0."""

    rollout_is_batch_normalize: bool = False
    """Divide the weights by their mean over the global batch: over tokens, sequences or turns, as the
    level says. A product's log is clamped to +-340 then, not to +-20, so that a batch of products below
    e^-20 is not left uncorrected.
    """

    rollout_rs: tuple[RejectionRule, ...] = option(
        (), metavar="RULE[,RULE]", more=f"The rules: {rules_help()}."
    )
    """Rejection rules; a token is kept only if all of them keep it. verl's *_k1 bound 1/rho; none disables
    rejection."""

    rollout_m2_threshold: Annotated[float | None, Positive("0.04 is usual", finite=True)] = option(
        None, metavar="X", none="none"
    )
    """M2PO: drop the tokens of largest D^2 until the mean of D^2 over the rest is at most this; 0.04 in
    its paper (arXiv:2510.01161).
    """

    rollout_batch_filter_kl: Annotated[float | None, Positive("use 1e-2, for example", finite=True)] = option(
        None, metavar="X", none="none"
    )
    """Skip the update of a step whose train-infer KL (k3) is above this."""

    bypass_mode: bool = False
    """Two policies: pi_rollout stands in for pi_old, which is not computed; the correction is made in the
    loss, of the current policy against pi_rollout, one microbatch at a time.
    """

    diagnostics_only: bool = False
    """Measure and log the correction, change nothing: every weight is 1 and no valid token is masked."""

    def collect(self, problems: Problems, unknown: Iterable[str] = ()) -> Self:
        object.__setattr__(self, "rollout_rs", tuple(self.rollout_rs))
        return super().collect(problems, unknown)

    def check_weights(self) -> None:
        lower, upper, mode = self.rollout_is_lower, self.rollout_is_upper, self.rollout_is_mode
        if self.rollout_is is None:
            if (lower, upper, self.rollout_is_batch_normalize, mode) != (None, None, False, "truncate"):
                raise ValueError(
                    "`rollout_is_threshold`, `rollout_is_mode` and `rollout_is_batch_normalize` have no "
                    "effect without weights; add `rollout_is` token, sequence or geometric, or drop them"
                )
            return
        if mode == "gamma":
            self._check_gamma()
            return
        if upper is None:
            raise ValueError(f"`rollout_is` {self.rollout_is} needs `rollout_is_threshold`; 2.0 is usual")
        check_bounds("`rollout_is_threshold`", lower, upper, NO_WEIGHTS)
        if mode == "truncate" and lower is not None:
            raise ValueError(
                f"`rollout_is_threshold` lower bound {plain(lower)} has no effect with `rollout_is_mode` "
                "truncate; use `rollout_is_mode` clip or mask, or give the upper bound alone"
            )
        if mode == "clip" and lower is None:
            raise ValueError(
                f"`rollout_is_mode` clip needs both bounds, got only upper {plain(upper)}; give "
                "`rollout_is_threshold` as LOWER_UPPER, for example 0.5_5.0"
            )

    def _check_gamma(self) -> None:
        if self.rollout_is != "sequence":
            raise ValueError(
                "`rollout_is_mode` gamma weighs whole sequences by the product of their ratios, got "
                f"`rollout_is` {self.rollout_is}; use `rollout_is` sequence, or another mode"
            )
        for name in ("rollout_is_lower", "rollout_is_upper"):
            if getattr(self, name) is not None:
                raise ValueError(
                    f"`{name}` {plain(getattr(self, name))} has no effect with `rollout_is_mode` gamma, "
                    "whose weights are at most 1.25 without a bound; drop it, and `rollout_is_threshold`, "
                    "or use another mode"
                )
        if self.rollout_is_batch_normalize:
            raise ValueError(
                "`rollout_is_batch_normalize` with `rollout_is_mode` gamma: divided by their mean, weights "
                "of at most 1.25 would grow without a bound, those of positive and of negative advantages "
                "unlike; drop it"
            )
        if self.kl_loss_type == "unbiased" and not self.bypass_mode:
            raise ValueError(
                "`kl_loss_type` unbiased with `rollout_is_mode` gamma: its ratio is corrected by the "
                "weights, and gamma's depend on the advantage's sign; use `kl_loss_type` k3+, or another "
                "mode"
            )

    def check_rules(self) -> None:
        for rule in self.rollout_rs:
            if not isinstance(rule, RejectionRule):
                raise ValueError(
                    f"`rollout_rs` takes RejectionRule objects, got {rule!r}; from_dict takes their names"
                )
        names = [rule.name for rule in self.rollout_rs]
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise Refusal(
                f"`rollout_rs` names {name} twice; give each rule once, with one pair of bounds"
                for name in twice
            )

    def check_token_advantage(self) -> None:
        kind = self.advantage_kind
        if not self.advantage_by_token:
            return
        if self.bypass_mode:
            raise ValueError(
                f"`advantage` {kind} needs the distributions of pi_old, of a pass that `bypass_mode` leaves "
                "out; drop that, or use `advantage` group_mean"
            )
        if asker := self.needed_inputs.get("advantages"):
            raise ValueError(
                f"{asker} needs the advantage of a whole response before the correction, and `advantage` "
                f"{kind} gives one a token, from the corrected weights; drop one of them"
            )

    def check_distilled_advantage(self) -> None:
        if self.distill_coef and (asker := self.needed_inputs.get("advantages")):
            raise ValueError(
                f"{asker} needs the advantage of a whole response before the correction, and `distill_coef` "
                f"{plain(self.distill_coef)} gives one a token; drop one of them"
            )

    def check_bypass_weights(self) -> None:
        if self.bypass_mode and self.rollout_is is not None and self.kind.has_ratio:
            raise ValueError(
                f"`rollout_is` {self.rollout_is} in bypass mode would weigh twice: the ratio of `loss` "
                f"{self.loss} is pi_theta / pi_rollout already; use `rollout_is` none, or `loss` reinforce"
            )

    def check_bypass(self) -> None:
        if not self.bypass_mode:
            return
        whole_batch = {
            "`rollout_is_batch_normalize`": self.rollout_is_batch_normalize,
            "`loss_denominator` kept": self.loss_denominator == "kept",
            "`rollout_m2_threshold`": self.rollout_m2_threshold is not None,
            "`rollout_batch_filter_kl`": self.rollout_batch_filter_kl is not None,
            "`clip_sat_tail`": self.clip_sat_tail is not None,
        }
        given = [setting for setting, is_given in whole_batch.items() if is_given]
        if given:
            raise Refusal(
                f"{setting} needs the whole batch, but bypass mode corrects one microbatch at a time, in the "
                "loss; drop it, or `bypass_mode`"
                for setting in given
            )

    @property
    def decided_by_turn(self) -> list[str]:
        """The rules and weights that look at turns, as an error names them."""
        weights = ["`rollout_is` turn"] if self.rollout_is == "turn" else []
        return [rule.name for rule in self.rollout_rs if rule.level == "turn_mean"] + weights

    @property
    def needed_inputs(self) -> dict[str, str]:
        """Each input of RULE_INPUTS that the correction needs, and the setting that needs it."""
        found = inputs_of(self.rollout_rs)
        if self.rollout_is_mode == "gamma":
            found.setdefault("advantages", "rollout_is_mode gamma")
        return found

    @property
    def changes_gradient(self) -> bool:
        """True if any weight or rejection acts; without them the correction only measures."""
        acts = (
            self.rollout_is,
            self.rollout_m2_threshold,
            self.rollout_batch_filter_kl,
            self.rollout_rs or None,
        )
        return not self.diagnostics_only and any(part is not None for part in acts)

    @classmethod
    def from_preset(
        cls, name: str, instead: Mapping[str, Any] | None = None, unknown: Iterable[str] = ()
    ) -> RolloutCorrectionConfig:
        """The preset of this name, with these settings (ours or a peer's) replaced.

        Args:
            name: of the preset.
            instead: settings over it.
            unknown: as `with_settings`.

        Raises:
            ValueError: a name that no preset has, with the nearest one; or settings that do not go with
                the preset's, with those of it that the error is about.
        """
        if name not in PRESETS:
            raise Refusal([f"`rollout_correction_preset`: unknown preset {name!r}{nearest(name, PRESETS)}"])
        try:
            return PRESETS[name].with_settings(instead or {}, unknown)
        except Refusal as error:
            raise Refusal(_with_presets_own(error.problems, name, instead or {}), error.partial) from error

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any]) -> RolloutCorrectionConfig:
        """From our field names, or a peer's keys with the peer's values (verl's k1 bounds on 1/rho
        are translated).

        Args:
            mapping: settings; the key `preset` names one to start from.

        Raises:
            ValueError: an unknown key, or what the dataclass refuses.
        """
        ours = [field.name for field in dataclasses.fields(cls)]
        known = [*ours, *notation.KEYS]
        problems, meant = Problems(), set()
        for key in mapping:
            if key not in known:
                problems.add(f"unknown key {key!r}{nearest(key, known)}")
                meant.update(close_to(key, known))
        settings = {key: value for key, value in mapping.items() if key in known}
        try:
            if "preset" in settings:
                made = cls.from_preset(settings.pop("preset"), settings, meant)
            else:
                made = cls().with_settings(settings, meant)
        except Refusal as error:
            problems.add(error)
            made = error.partial
        problems.raise_all(made)
        return made

    @classmethod
    def from_yaml(cls, path: str, **instead: Any) -> RolloutCorrectionConfig:
        """From a YAML mapping, at the top level or under the key `rollout_correction`.

        Args:
            path: the file.
            instead: settings that stand in for the file's, before it is checked as a whole.

        Raises:
            ValueError: as `from_dict`, with the file's name, or the file is no YAML mapping.
            OSError: it can't be read.
        """
        from megatron_rl_corr.config.yaml_file import read_yaml

        content = dict(read_yaml(path))
        whole = [name for name, one in options_of(cls).items() if one.kind is int]
        for name in whole:  # all numbers of a file are read as floats
            if isinstance(value := content.get(name), float) and value.is_integer():
                content[name] = int(value)
        try:
            return cls.from_dict({**content, **instead})
        except Refusal as error:
            raise error.each(lambda text: f"`rollout_correction_config` {path}: {text}") from error

    def with_settings(
        self, mapping: Mapping[str, Any], unknown: Iterable[str] = ()
    ) -> RolloutCorrectionConfig:
        """This configuration with these settings (ours or a peer's) replaced; to turn a part off
        clears its bounds.

        Args:
            mapping: the settings.
            unknown: settings whose values were refused before: what depends on them is not judged.

        Raises:
            ValueError: everything that can't be, or that has no effect.
        """
        problems, fields = (
            Problems(),
            {field.name: getattr(self, field.name) for field in dataclasses.fields(self)},
        )
        values, refused = notation.resolve(mapping, fields, problems, unknown := set(unknown))
        alone = {name: value for name, value in mapping.items() if name in refused and name not in unknown}
        check_values(type(self), in_our_words(alone), problems)
        made = make(type(self), values, problems, refused)
        if problems:
            raise Refusal(problems.found, made)
        return made


def _with_presets_own(problems: Iterable[str], preset: str, given: Mapping[str, Any]) -> Iterator[str]:
    """The problems of settings over a preset; of one about the preset's fields these are named as such.

    Where settings are told for one field already, what they have against more fields of the
    preset is left out.
    """
    told, rest = [], []
    for text in problems:
        fields = frozenset(re.findall(r"`(\w+)`", text))
        ours, own = (
            fields.intersection(given),
            [one for one in PRESET_FIELDS[preset] if one in fields - given.keys()],
        )
        if own:
            rest.append((text, ours, own))
        else:
            told.append(ours)
            yield text
    for text, ours, own in rest:
        if any(ours <= other for other in told):
            continue
        told.append(ours)
        values = ", ".join(f"`{field}` {plain(PRESET_FIELDS[preset][field])}" for field in own)
        yield (
            f"{text}. {values} is of `rollout_correction_preset` {preset}: leave out what does not go with "
            "it, or the preset"
        )


PRESETS: dict[str, RolloutCorrectionConfig] = {
    name: RolloutCorrectionConfig(**fields) for name, fields in PRESET_FIELDS.items()
}
