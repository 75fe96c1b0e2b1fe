"""Megatron's parser, whose help is read from its classes' sources once: a second of each rank's
start otherwise.
"""

import argparse

from megatron.training import arguments
from megatron.training.argument_utils import ArgumentGroupFactory

_read = ArgumentGroupFactory._get_field_docstrings
_found: dict[type, dict[str, str]] = {}


def _read_once(self, source: type) -> dict[str, str]:
    if source not in _found:
        _found[source] = _read(self, source)
    return dict(_found[source])


ArgumentGroupFactory._get_field_docstrings = _read_once
arguments.add_megatron_arguments(argparse.ArgumentParser())
