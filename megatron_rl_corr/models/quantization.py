"""What config.json tells of a quantised checkpoint, and which of its tensors are quantised."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_rl_corr.models.block_fp8 import BLOCK, ScaleFormat

SCALE = "_scale_inv"
"""What a checkpoint's name of a weight ends with for its scales."""

_KEPT = re.compile(r"embed|lm_head|norm|bias|router|(^|\.)gate\.weight$|shared_expert_gate")
"""Names of tensors that quantised checkpoints keep in 16 bits, and that servers therefore do not quantise."""
_EXPERT = re.compile(r"(.*\.experts)\.\d+\..*")
_SCALE_FORMATS: dict[str | None, ScaleFormat] = {
    None: "float32",
    "float": "float32",
    "float32": "float32",
    "ue8m0": "ue8m0",
}
"""By `scale_fmt`, which transformers writes as float."""
_LISTS = ("ignored_layers", "modules_to_not_convert")
"""Keys of the modules that are spared."""
_TAKEN = (
    "a push quantises only as quant_method fp8 with weight_block_size [128, 128], fmt e4m3 and "
    "activation_scheme dynamic, and spares what ignored_layers or modules_to_not_convert names; serve such "
    "a checkpoint, or the model in 16 bits"
)
_PATH = re.compile(r"[\w-]+(\.[\w-]+)*\.?")
_ONE_EXPERT = re.compile(r"(?!layers\.\d+\.)(.*\.)?experts\.\d+(\..*)?")
_QKV, _GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
_LATENT = ("q_a_proj", "kv_a_proj_with_mqa")
_FUSED = {"qkv_proj": _QKV, "gate_up_proj": _GATE_UP, "fused_qkv_a_proj_with_mqa": _LATENT}
"""Servers' names of linear layers that they make of several of the checkpoint's."""
_FUSED_IN = (
    ("self_attn", _QKV),
    ("self_attn", _LATENT),
    ("mlp", _GATE_UP),
    ("mlp.shared_expert", _GATE_UP),
    ("mlp.shared_experts", _GATE_UP),
)
"""(path within a layer, linear layers that servers fuse there)."""


def is_linear_weight(name: str) -> bool:
    """True if a tensor is a linear layer's weight of those that quantised checkpoints quantise.

    Embeddings, the output layer, norms, biases and the gates of routers and shared experts are spared, as
    slime's tools/convert_hf_to_fp8.py and the published FP8 checkpoints of Qwen3 and DeepSeek-V3 do, and as
    SGLang has it (layers without a quantisation of their own).

    Args:
        name: Hugging Face's.
    """
    return _KEPT.search(name) is None


@dataclass(frozen=True)
class BlockFP8:
    """Linear layers in float8 e4m3, in blocks of 128 x 128 with a scale each.

    Example: BlockFP8("float32", frozenset({"layers.0.self_attn"}), {"quant_method": "fp8", ...}).
    """

    scale_format: ScaleFormat
    spared: frozenset[str] = frozenset()
    """Paths of modules that are not quantised, as `modules_to_not_convert` names them, without "model."."""
    config: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """The quantization_config that says so."""

    @classmethod
    def from_config(cls, hf_config: Mapping[str, Any]) -> BlockFP8 | None:
        """That of a config.json; None for a model in 16 bits.

        Raises:
            ValueError: the checkpoint is quantised in another way.
        """
        found = hf_config.get("quantization_config") or hf_config.get("compression_config")
        if not found:
            return None
        other = _other_than_block_fp8(found)
        if other:
            raise ValueError(f"config.json: quantization_config has {other}, and {_TAKEN}")
        quantization = cls(_SCALE_FORMATS[found.get("scale_fmt")], _spared(found), found)
        half = quantization._half_spared()
        if half:
            raise ValueError(f"config.json: quantization_config spares {half}; spare all of them, or none")
        return quantization

    def quantises(self, name: str) -> bool:
        """True if a tensor of this name is quantised, by its kind and by what the configuration spares.

        A spared path stands for all modules below it, wherever its parts follow each other in the module's
        path: "mlp.gate" is no part of "mlp.gate_proj". Of routed experts all of a layer are spared if one is,
        because servers hold them as one module. So does SGLang 0.5.23 (is_layer_skipped of
        layers/quantization/utils.py, to which Fp8Config gives each path with and without "model."). vLLM 0.32
        (is_layer_skipped of layers/quantization/utils/quant_utils.py) takes whole paths alone, fused ones
        too, and any part of a path for experts; where both would read an entry otherwise, and no push to
        SGLang has proven it, `_spared` refuses it.

        Args:
            name: Hugging Face's.
        """
        if not is_linear_weight(name):
            return False
        expert = _EXPERT.fullmatch(name)
        module = f".{expert[1] if expert else name.removesuffix('.weight')}."
        if any(f".{path}." in module for path in self.spared):
            return False
        return not (expert and any(f".model.{path}.".startswith(module) for path in self.spared))

    def _half_spared(self) -> str:
        """The linear layers that are spared of some that servers hold as one; "" where there are none."""
        found = (re.findall(r"(?:^|\.)layers\.(\d+)(?=\.|$)", path) for path in self.spared)
        numbers = {int(number) for each in found for number in each}
        # All layers that no path names are alike.
        for layer in (*sorted(numbers), max(numbers, default=-1) + 1):
            for parent, parts in _FUSED_IN:
                inside = f"model.layers.{layer}.{parent}."
                kept = [part for part in parts if not self.quantises(f"{inside}{part}.weight")]
                if kept and len(kept) < len(parts):
                    others = " and ".join(part for part in parts if part not in kept)
                    return f"{inside}{' and '.join(kept)} without {others}, which servers hold as one layer"
        return ""


def _spared(found: Mapping[str, Any]) -> frozenset[str]:
    """The paths of modules that a quantization_config spares, without "model.".

    Raises:
        ValueError: servers would not all read them alike, or not as they are meant.
    """
    # SGLang 0.5.23 takes the first of these keys that is there, vLLM 0.32 the first that names something.
    key = next((key for key in _LISTS if key in found), _LISTS[0])
    if not found.get(key) and any(found.get(other) for other in _LISTS):
        raise ValueError(
            f"config.json: quantization_config has {key} {found[key]!r} beside {_LISTS[1]}, which some "
            f"servers take then and others do not; take {key} out"
        )
    paths = found.get(key) or []
    if not isinstance(paths, list | tuple) or not all(isinstance(path, str) for path in paths):
        raise ValueError(
            f"config.json: quantization_config has {key} {paths!r}, and must have a list of names; correct it"
        )
    for path in paths:
        why = _unread(path)
        if why:
            raise ValueError(
                f"config.json: quantization_config has {path!r} in {key}: {why}; name each linear layer as "
                "the checkpoint does, such as model.layers.0.mlp.down_proj"
            )
    return frozenset(path.rstrip(".").removeprefix("model.") for path in paths)


def _unread(path: str) -> str:
    """Why servers would not spare what a path is meant to name; "" where they do."""
    if path.startswith("re:"):
        return "servers of FP8 read no regular expressions, and would quantise what it matches"
    base = path.rstrip(".").removeprefix("model.")
    if not _PATH.fullmatch(path) or base in ("", "model"):
        return "it is no path of a module"
    parts = base.split(".")
    if parts[-1] in _FUSED and parts[-2:-1] != ["experts"]:
        return (
            f"some servers look for {', '.join(_FUSED[parts[-1]])} of the checkpoint, and would quantise "
            "this layer, which others would spare"
        )
    if parts[-1] in ("weight", "bias") and is_linear_weight(base):
        return "it is a tensor's name, and servers look for modules'"
    if _ONE_EXPERT.fullmatch(base):
        return "servers look for experts by their layer too, and would quantise these"
    return ""


def _other_than_block_fp8(found: Mapping[str, Any]) -> str:
    """The first key of a quantization_config, with its value, that is not as in block-wise
    FP8; "" if all are.
    """
    taken: dict[str, tuple] = {
        "quant_method": ("fp8",),
        "weight_block_size": ([BLOCK, BLOCK],),
        "fmt": (None, "e4m3"),
        "activation_scheme": (None, "dynamic"),
        "scale_fmt": tuple(_SCALE_FORMATS),
    }
    # What is not known here may spare more, or other numbers; what says nothing may stand there.
    taken |= {key: (None, False, [], {}) for key in found if key not in (*taken, *_LISTS)}
    for key, values in taken.items():
        value = found.get(key)
        if value not in values and not (key == "weight_block_size" and list(value or ()) in values):
            return f"{key} {value!r}" if value is not None else f"no {key}"
    return ""
