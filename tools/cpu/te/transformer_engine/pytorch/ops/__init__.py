"""The operation fuser: names that Megatron 0.14 to 0.17 reads while it is imported, none of
which can be made.
"""

import torch


class Sequential(torch.nn.Module):
    """Base of every name here."""

    def __init__(self, *args, **kwargs):
        super().__init__()
        raise NotImplementedError(
            "the operation fuser needs a GPU; train without --use-transformer-engine-op-fuser"
        )


def __getattr__(name):
    if not name[0].isupper():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return type(name, (Sequential,), {"__module__": __name__})
