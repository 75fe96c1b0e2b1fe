"""Tensors of lower precision, of which there are none."""

import torch


class QuantizedTensor(torch.Tensor):
    """A name to ask isinstance of."""
