"""How servers stack Hugging Face tensors into their parameters, and what a rank may hold of one.

q, k, v; gate, up; latent attention's two down projections; and the projections of a gated delta net are
stacked along dimension 0, and a layer's experts into one tensor of three dimensions. SGLang and vLLM do so
under the same names.

A server's worker imports this module too: standard library and torch only.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping

import torch
from torch import Tensor

Part = tuple[int, int]
"""A tensor's place in a parameter: (expert, place within the stack); expert is -1 where there are none."""

_EXPERT = re.compile(
    r"(?P<layer>.*\.experts)\.(?P<expert>\d+)\.(?P<kind>gate_proj|up_proj|down_proj|w[123])\.weight"
)
_STACK = re.compile(
    r"(?P<layer>.*\.experts)(?:\.(?P<expert>\d+))?\.(?P<kind>gate_up_proj|down_proj)(?P<bias>_bias)?"
)
"""A tensor for all experts of a layer: inputs x outputs in gpt-oss, outputs x inputs in Qwen3.5, a model of
images and text. With a number: `single_experts`' own.
"""
_OF_TEXT = "model.language_model."
"""What the names of a model of images and text begin with, of its part for text."""
_LATENT = re.compile(r"(?P<module>.*)\.(?P<kind>q_a_proj|kv_a_proj_with_mqa)\.weight")
_DELTA_NET = re.compile(r"(?P<module>.*\.linear_attn)\.in_proj_(?P<kind>qkv|z|b|a)\.weight")
_DELTA_PLACE = {"qkv": ("qkvz", 0), "z": ("qkvz", 1), "b": ("ba", 0), "a": ("ba", 1)}
_STACKED = re.compile(r"(?P<module>.*)\.(?P<kind>q|k|v|gate|up)_proj\.(?P<what>weight|bias)")
_PLACE = {"q": 0, "k": 1, "v": 2, "gate": 0, "up": 1}
_EXPERT_STACK = {
    "gate_proj": ("w13_weight", 0),
    "up_proj": ("w13_weight", 1),
    "down_proj": ("w2_weight", 0),
    "w1": ("w13_weight", 0),
    "w3": ("w13_weight", 1),
    "w2": ("w2_weight", 0),
}
"""w1, w2, w3: Mixtral's names."""
_SHARED = re.compile(r"(?P<mlp>.*\.mlp)\.shared_experts\.(?P<kind>gate_up|down)_proj\.weight")
_LATENT_PLACE = {"q_a_proj": 0, "kv_a_proj_with_mqa": 1}
_SCALE = "_scale_inv"
"""What the scales of a weight in FP8 are called by, behind its own name: stacked and cut as the weight is."""
_VOCABULARY_ROWS = 64  # vocabularies are padded with zeros to a multiple of it


def server_parameter(name: str) -> tuple[str, Part]:
    """The server's name of the parameter that this tensor is a part of, and which part; others
    keep their names.
    """
    if name.endswith(_SCALE):
        parameter, part = server_parameter(name.removesuffix(_SCALE))
        return parameter + _SCALE, part
    if match := _EXPERT.fullmatch(name):
        stack, place = _EXPERT_STACK[match["kind"]]
        return f"{match['layer']}.{stack}", (int(match["expert"]), place)
    if match := _STACK.fullmatch(name):
        stack = "w13" if match["kind"] == "gate_up_proj" else "w2"
        return f"{match['layer']}.{stack}_weight{match['bias'] or ''}", (int(match["expert"] or 0), 0)
    if match := _LATENT.fullmatch(name):
        return f"{match['module']}.fused_qkv_a_proj_with_mqa.weight", (-1, _LATENT_PLACE[match["kind"]])
    if match := _DELTA_NET.fullmatch(name):
        stack, place = _DELTA_PLACE[match["kind"]]
        return f"{match['module']}.in_proj_{stack}.weight", (-1, place)
    if match := _STACKED.fullmatch(name):
        stack = "qkv_proj" if match["kind"] in "qkv" else "gate_up_proj"
        return f"{match['module']}.{stack}.{match['what']}", (-1, _PLACE[match["kind"]])
    return name, (-1, 0)


def single_experts(name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """A tensor that stacks the experts of a layer as servers hold each of them, outputs x inputs; any other
    tensor as it is.
    """
    match = _STACK.fullmatch(name)
    if match is None:
        return [(name, tensor)]
    of_expert = f"{match['layer']}.{{}}.{match['kind']}{match['bias'] or ''}"
    inputs_first = _OF_TEXT not in name
    return [
        (of_expert.format(number), row.movedim(0, -1) if inputs_first else row)
        for number, row in enumerate(tensor)
    ]


def held_in(parameter: str, held: Container[str]) -> str:
    """The parameter that a server with the parameters `held` has this one in: SGLang may make DeepSeek's
    shared expert the last of the experts.
    """
    if parameter.endswith(_SCALE):
        return held_in(parameter.removesuffix(_SCALE), held) + _SCALE
    match = _SHARED.fullmatch(parameter)
    if match is None or parameter in held:
        return held_as(parameter, held)
    return f"{match['mlp']}.experts.{'w13' if match['kind'] == 'gate_up' else 'w2'}_weight"


def held_as(parameter: str, held: Container[str]) -> str:
    """The name by which a server with the parameters `held` has this one: without the module of attention or
    of the part for text, or that in another place.
    """
    shown = parameter.replace(_OF_TEXT, "model.", 1), parameter.replace(_OF_TEXT, "language_model.model.", 1)
    names = [name for one in (parameter, *shown) for name in (one, one.replace(".self_attn.", ".", 1))]
    return next((name for name in names if name in held), parameter)


def possible_layouts(parts: Mapping[Part, Tensor], *, rank: int, size: int) -> Iterator[Tensor]:
    """What tensor-parallel rank `rank` of `size` may hold of a parameter: whole, or its share of
    rows or columns.

    Which of them it does depends on the module; a checksum that fits one of them tells.
    """
    whole = _stacked(parts)
    yield whole
    if size == 1 and whole.dim() == 2 and len(parts) == 1 and whole.shape[0] % _VOCABULARY_ROWS:
        yield torch.cat([whole, whole.new_zeros(-whole.shape[0] % _VOCABULARY_ROWS, whole.shape[1])])
    if size > 1:
        if rank > 0 and whole.dim() == 2 and min(parts)[0] >= 0:  # the experts' output bias, added once
            yield torch.zeros_like(whole)
        for dim in (0, 1):
            if all(part.dim() > dim and part.shape[dim] % size == 0 for part in parts.values()):
                yield _stacked({key: part.chunk(size, dim)[rank] for key, part in parts.items()})


def _stacked(parts: Mapping[Part, Tensor]) -> Tensor:
    experts = sorted({expert for expert, _ in parts})
    rows = [torch.cat([parts[key] for key in sorted(parts) if key[0] == expert]) for expert in experts]
    return torch.stack(rows) if experts[0] >= 0 else rows[0]
