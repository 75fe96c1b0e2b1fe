"""Which parameter of an SGLang server a Hugging Face tensor ends up in, and what a rank's part of it looks like.

SGLang stacks q, k, v and gate, up along dimension 0, and a layer's experts into one tensor of three dimensions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

Part = tuple[int, int]
"""(expert, place within the stack); expert is -1 where there are none."""

_EXPERT = re.compile(r"(?P<layer>.*\.experts)\.(?P<expert>\d+)\.(?P<kind>gate|up|down)_proj\.weight")
_STACKED = re.compile(r"(?P<module>.*)\.(?P<kind>q|k|v|gate|up)_proj\.(?P<what>weight|bias)")
_PLACE = {"q": 0, "k": 1, "v": 2, "gate": 0, "up": 1, "down": 0}
_VOCABULARY_ROWS = 64  # SGLang's vocabularies are padded with zeros to a multiple of it (0.5.23)


def server_parameter(name: str) -> tuple[str, Part]:
    """The server's name of the parameter that this tensor is a part of, and which part; others keep their names."""
    if match := _EXPERT.fullmatch(name):
        stack = "w2_weight" if match["kind"] == "down" else "w13_weight"
        return f"{match['layer']}.{stack}", (int(match["expert"]), _PLACE[match["kind"]])
    if match := _STACKED.fullmatch(name):
        stack = "qkv_proj" if match["kind"] in "qkv" else "gate_up_proj"
        return f"{match['module']}.{stack}.{match['what']}", (-1, _PLACE[match["kind"]])
    return name, (-1, 0)


def possible_layouts(parts: Mapping[Part, Tensor], *, rank: int, size: int) -> Iterator[Tensor]:
    """What tensor-parallel rank `rank` of `size` may hold of a parameter: whole, or its share of rows or columns.

    Which of them it does depends on the module; a checksum that fits one of them tells.
    """
    whole = _stacked(parts)
    yield whole
    if size == 1 and whole.dim() == 2 and len(parts) == 1 and whole.shape[0] % _VOCABULARY_ROWS:
        yield torch.cat([whole, whole.new_zeros(-whole.shape[0] % _VOCABULARY_ROWS, whole.shape[1])])
    if size > 1:
        for dim in (0, 1):
            if all(part.dim() > dim and part.shape[dim] % size == 0 for part in parts.values()):
                yield _stacked({key: part.chunk(size, dim)[rank] for key, part in parts.items()})


def _stacked(parts: Mapping[Part, Tensor]) -> Tensor:
    experts = sorted({expert for expert, _ in parts})
    rows = [torch.cat([parts[key] for key in sorted(parts) if key[0] == expert]) for expert in experts]
    return torch.stack(rows) if experts[0] >= 0 else rows[0]
