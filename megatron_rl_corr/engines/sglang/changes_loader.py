"""What SGLang's --custom-weight-loader names, so that a server takes pushes of changes alone."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import chain, islice

from torch import nn

from megatron_rl_corr.engines.types import NamedTensor
from megatron_rl_corr.engines.weight_changes import PREFIX, ChangesReceiver

LOADER = "megatron_rl_corr.engines.sglang.changes_loader.begin"


def begin(model: nn.Module, named: Sequence[NamedTensor]) -> None:
    """Called by SGLang in every rank, as a push of changes begins: from now on the model's `load_weights`
    knows such buckets.

    Args:
        model: SGLang's.
        named: one tensor without meaning; its name is JSON: the arguments of `ChangesReceiver.begin`.
    """
    [(header, _)] = named
    receiver = getattr(model, "rl_corr_changes", None)
    if receiver is None:
        receiver, load_weights = ChangesReceiver(), model.load_weights

        def load(weights: Iterable[NamedTensor], *arguments, **options):
            rest = iter(weights)
            first = list(islice(rest, 1))
            if first and first[0][0].startswith(PREFIX):
                return receiver.load([*first, *rest], load_weights)
            receiver.version = None  # a push of everything
            return load_weights(chain(first, rest), *arguments, **options)

        model.rl_corr_changes, model.load_weights = receiver, load
    receiver.begin(**json.loads(header))
