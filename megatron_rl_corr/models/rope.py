"""Rotary position embeddings: where config.json has their settings, and Megatron's flags for them.

transformers 5 has them in rope_parameters, older versions in rope_scaling and, beside it, rope_theta and
partial_rotary_factor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

COMMON = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "attention_factor",
        "truncate",
    ),
}
"""Kind of scaling -> its settings, beside those of COMMON."""
NEEDED: dict[str, tuple[str, ...]] = {
    "default": (),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
"""Those without which there is no scaling."""

ADDED = {
    "--beta-fast": (32.0, "rotations above which YaRN leaves a frequency of latent attention as it is"),
    "--beta-slow": (
        1.0,
        "rotations below which YaRN divides a frequency of latent attention by the whole factor",
    ),
}
"""Flag -> default and help: fields of Megatron's configuration for which its own command line has no flag."""

TEXT_ALONE = ("mrope_section", "mrope_interleaved")
"""Settings of positions of several axes, which are all one number for text."""

_TABLES = ("rope_scaling", "rope_parameters")


def rope_settings(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The settings in one table: rope_type, rope_theta, the share of a head that is rotated, and
    the scaling's own.

    Args:
        config: the model's config.json, with its sizes.
        defaults: transformers' rope_theta of the family, and its partial_rotary_factor and rope_parameters
            where it has some.

    Raises:
        ValueError: its tables contradict each other, or are none.
    """
    found = _one_table(config, defaults)
    kind = found.pop("rope_type")
    for key, default in (
        ("rope_theta", defaults["rope_theta"]),
        ("partial_rotary_factor", defaults.get("partial_rotary_factor", 1.0)),
    ):
        inner, outer = found.get(key), config.get(key)
        if inner is None and key == "rope_theta" and (key in found or config.get(key, default) is None):
            raise ValueError(
                "config.json: rope_theta null must be a whole number above 0; correct it, or take it out"
            )
        if None not in (inner, outer) and inner != outer:
            raise ValueError(
                f"config.json: {key} is {outer}, and {inner} among the rotary settings, and not every engine "
                "takes the same of the two; take one of them out"
            )
        found[key] = next((value for value in (inner, outer) if value is not None), default)
    if kind in ("llama3", "yarn") and found.get("original_max_position_embeddings") is None:
        found["original_max_position_embeddings"] = config["max_position_embeddings"]
    return {"rope_type": kind} | found


def rope_problems(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[str]:
    """A line for each rotary setting that the flags would pass over.

    Args:
        config: the model's config.json, with its sizes.
        defaults: as of `rope_settings`.
    """
    try:
        rope = rope_settings(config, defaults)
    except ValueError as error:
        return [str(error)]
    kind = rope["rope_type"]
    where = next((f"{name}: " for name in _TABLES if config.get(name)), "")
    lines = [
        f"config.json: {where}{key} {value!r} is no setting of rope_type {kind!r} that is known here, and a "
        "server may compute with it; use a model without it, or take it out of the config.json of trainer "
        "and servers if it changes nothing"
        for key, value in rope.items()
        if kind in KEYS and key not in (*COMMON, *KEYS[kind])
    ]
    share, theta = rope["partial_rotary_factor"], rope["rope_theta"]
    if "partial_rotary_factor" not in defaults and (share != 1 or isinstance(share, bool)):
        lines.append(
            f"config.json: partial_rotary_factor {share!r} is not what the flags train: this family rotates "
            "whole heads; use a model with partial_rotary_factor 1.0"
        )
    elif not (is_number(share) and 0 < share <= 1):
        lines.append(
            f"config.json: partial_rotary_factor {share!r} must be a number above 0, and 1 at most; correct "
            "it"
        )
    if not (is_number(theta) and theta > 0 and theta == math.floor(theta)):
        lines.append(
            f"config.json: rope_theta {theta!r} must be a whole number above 0, as Megatron's --rotary-base "
            "is; use a model with one"
        )
    return lines + _wrong_numbers(rope, where)


def _wrong_numbers(rope: Mapping[str, Any], where: str) -> list[str]:
    """A line for each number of the scaling that is none, or that is needed and not there."""
    kind, lines = rope["rope_type"], []
    for key in KEYS.get(kind, ()):
        value, needed = rope.get(key), key in NEEDED[kind]
        if key == "truncate":
            if not isinstance(rope.get(key, True), bool):
                lines.append(f"config.json: {where}truncate {value!r} must be true or false; correct it")
            continue
        if value is None and not needed:
            continue
        if key == "original_max_position_embeddings" and is_number(value) and value != int(value):
            lines.append(f"config.json: {where}{key} {value!r} must be a whole number; correct it")
        # A border of 0 is 0 for a server, and the usual one for transformers.
        positive = needed or key in ("beta_fast", "beta_slow")
        if not (is_number(value) and value >= 0 and (value > 0 or not positive)):
            least = "above 0" if positive else "from 0 on"
            lines.append(
                f"config.json: {where}{key} {value!r} must be a number {least}, for rope_type {kind!r}; "
                "correct it"
            )
    return lines


def rope_flags(config: Mapping[str, Any], defaults: Mapping[str, Any], *, latent: bool) -> list:
    """Megatron's flags for the rotary settings.

    Args:
        config: the model's config.json, with its sizes and without `rope_problems`.
        defaults: as of `rope_settings`.
        latent: multi-latent attention.

    Raises:
        ValueError: Megatron has no flag for a setting.
    """
    rope = rope_settings(config, defaults)
    kind = rope["rope_type"]
    positions = "yarn" if kind == "yarn" and not latent else "rope"
    flags = ["--position-embedding-type", positions, "--rotary-base", int(rope["rope_theta"])]
    if "partial_rotary_factor" in defaults:
        flags += ["--rotary-percent", rope["partial_rotary_factor"]]
    if kind == "default":
        # Megatron's fused kernel for latent attention, which is on by default, is YaRN's alone.
        return [*flags, "--rope-type", "rope", "--no-rope-fusion"] if latent else flags
    if kind == "llama3" and not latent:
        _demand(rope, low_freq_factor=1, high_freq_factor=4, original_max_position_embeddings=8192)
        return [*flags, "--use-rope-scaling", "--rope-scaling-factor", rope["factor"]]
    if kind == "yarn" and latent:
        _demand(rope, original_max_position_embeddings=4096, truncate=True)
        return [
            *flags,
            "--rope-type",
            "yarn",
            "--rotary-scaling-factor",
            rope["factor"],
            *_magnitudes(rope),
            *_betas(rope),
        ]
    if kind == "yarn" and "partial_rotary_factor" not in defaults:  # Megatron's YaRN rotates whole heads
        return [*flags, *_yarn(rope)]
    raise ValueError(
        f"config.json: rope_type {kind!r} is not supported for this architecture; use a model with rope_type "
        f"{_supported(defaults, latent=latent)}"
    )


def _supported(defaults: Mapping[str, Any], *, latent: bool) -> str:
    if latent:
        return "default or yarn"
    return "default or llama3" if "partial_rotary_factor" in defaults else "default, llama3 or yarn"


def _yarn(rope: Mapping[str, Any]) -> list:
    """YaRN without latent attention: cosines and sines times 0.1 ln(factor) + 1, Megatron's default."""
    given = [key for key in ("mscale", "mscale_all_dim", "attention_factor") if rope.get(key) is not None]
    if given:
        raise ValueError(
            f"config.json: {given[0]} is {rope[given[0]]}, which servers and transformers read otherwise "
            "where attention is not latent; use a model without it"
        )
    flags = [
        "--rotary-scaling-factor",
        rope["factor"],
        "--yarn-original-max-position-embeddings",
        int(rope["original_max_position_embeddings"]),
        "--yarn-beta-fast",
        rope.get("beta_fast", 32),
        "--yarn-beta-slow",
        rope.get("beta_slow", 1),
        "--no-rope-fusion",  # fused, packed sequences would lose that factor
    ]
    return flags if rope.get("truncate", True) else [*flags, "--no-yarn-correction-range-round-to-int"]


def _one_table(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The table that is there, with its kind as rope_type, else the family's; nulls are left out."""
    found = []
    for name in _TABLES:
        table = config.get(name)
        if table is None or table == {}:
            continue
        if not isinstance(table, Mapping):
            raise ValueError(
                f"config.json: {name} {table!r} must be an object of rotary settings; correct it"
            )
        old, kind = table.get("type"), table.get("rope_type")
        if None not in (old, kind) and old != kind:
            raise ValueError(
                f"config.json: {name} has type {old!r} and rope_type {kind!r}; take one of the two out"
            )
        rest = {
            key: value
            for key, value in table.items()
            if key not in ("type", "rope_type", *_of_images(defaults))
            and (value is not None or key in ("rope_theta", "truncate"))
        }
        if "truncate" in rest and rest["truncate"] is None:
            rest["truncate"] = False  # as transformers and servers read a null
        chosen = kind if kind is not None else old
        if chosen is None and ("type" in table or "rope_type" in table):
            raise ValueError(f"config.json: {name} has rope_type null; name the kind, or take it out")
        if chosen is not None and not isinstance(chosen, str):
            raise ValueError(f"config.json: {name} has rope_type {chosen!r}, which is no name; correct it")
        found.append({"rope_type": "default" if chosen is None else chosen} | rest)
    if len(found) == 2:
        both = [{key: table.get(key, config.get(key)) for key in {*found[0], *found[1]}} for table in found]
        if both[0] != both[1]:
            raise ValueError(
                "config.json: rope_scaling and rope_parameters differ, and transformers takes the first of "
                "the two; take one of them out"
            )
    return dict(found[0] if found else defaults.get("rope_parameters", {"rope_type": "default"}))


def _of_images(defaults: Mapping[str, Any]) -> tuple[str, ...]:
    return TEXT_ALONE if "full_attention_interval" in defaults else ()


def _magnitudes(rope: Mapping[str, Any]) -> list:
    """YaRN's factors of cosines and sines, and of the scores, where transformers, servers and
    Megatron agree on them.

    transformers 5.19 takes mscale and mscale_all_dim only where both are given; SGLang 0.5.23, vLLM 0.32
    and Megatron take each, and 1 and 0 for one that is not.
    """
    mscale, all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    if rope.get("attention_factor") is not None:
        raise ValueError(
            f"config.json: attention_factor is {rope['attention_factor']}, and Megatron has no flag for it; "
            "use a model with mscale and mscale_all_dim"
        )
    if not (mscale and all_dim) and not (mscale in (None, 1) and not all_dim):
        raise ValueError(
            f"config.json: mscale is {mscale} and mscale_all_dim {all_dim}, which transformers and servers "
            "read otherwise; use a model with both above 0"
        )
    return ["--mscale", mscale or 1, "--mscale-all-dim", all_dim or 0]


def _betas(rope: Mapping[str, Any]) -> list:
    """YaRN's two borders, as rotations within the original context, where they are not
    those of DeepSeek-V3.
    """
    found = {"--beta-fast": rope.get("beta_fast", 32), "--beta-slow": rope.get("beta_slow", 1)}
    return [word for flag, value in found.items() if value != ADDED[flag][0] for word in (flag, value)]


def _demand(rope: Mapping[str, Any], **values: float) -> None:
    for name, value in values.items():
        if rope.get(name, value) != value:
            raise ValueError(
                f"config.json: {name} is {rope[name]}, and Megatron has {value} without a flag for it; use a "
                f"model with {value}"
            )


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
