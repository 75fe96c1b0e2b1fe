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
    None: "float32", "float": "float32", "float32": "float32", "ue8m0": "ue8m0",
}  # fmt: skip
"""By `scale_fmt`, which transformers writes as float."""
_TAKEN = (
    "a push quantises only as quant_method fp8 with weight_block_size [128, 128], fmt e4m3 and activation_scheme "
    "dynamic; serve such a checkpoint, or the model in 16 bits"
)


def is_linear_weight(name: str) -> bool:
    """Whether a tensor is a linear layer's weight of those that quantised checkpoints quantise.

    Embeddings, the output layer, norms, biases and the gates of routers and shared experts are spared, as slime's
    tools/convert_hf_to_fp8.py and the published FP8 checkpoints of Qwen3 and DeepSeek-V3 do, and as SGLang has it
    (layers without a quantisation of their own).

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
        # SGLang and vLLM take the first of these keys that is there.
        key = "ignored_layers" if "ignored_layers" in found else "modules_to_not_convert"
        spared = frozenset(path.strip(".").removeprefix("model.") for path in found.get(key) or ())
        return cls(_SCALE_FORMATS[found.get("scale_fmt")], spared, found)

    def quantises(self, name: str) -> bool:
        """Whether a tensor of this name is quantised, by its kind and by what the configuration spares.

        A spared path stands for all modules below it, wherever its parts follow each other in the module's path. Of
        routed experts all of a layer are spared if one is, because servers hold them as one module. As SGLang 0.5.23
        does (is_layer_skipped of layers/quantization/utils.py).

        Args:
            name: Hugging Face's.
        """
        if not is_linear_weight(name):
            return False
        expert = _EXPERT.fullmatch(name)
        module = f".{expert[1] if expert else name.removesuffix('.weight')}.".replace(".model.", ".", 1)
        if any(f".{path}." in module for path in self.spared):
            return False
        return not (expert and any(f".{path}.".startswith(module) for path in self.spared))


def _other_than_block_fp8(found: Mapping[str, Any]) -> str:
    """The first key of a quantization_config, with its value, that is not as in block-wise FP8; "" if all are."""
    taken: dict[str, tuple] = {
        "quant_method": ("fp8",), "weight_block_size": ([BLOCK, BLOCK],), "fmt": (None, "e4m3"),
        "activation_scheme": (None, "dynamic"), "scale_fmt": tuple(_SCALE_FORMATS),
    }  # fmt: skip
    for key, values in taken.items():
        value = found.get(key)
        if value not in values and not (key == "weight_block_size" and list(value or ()) in values):
            return f"{key} {value!r}" if value is not None else f"no {key}"
    return ""
