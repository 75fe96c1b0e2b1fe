"""Reads a YAML file of correction settings. Imported where one is read, so that the command's help
needs no package.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml


def read_yaml(path: str) -> Mapping[str, Any]:
    """The settings in a file, at the top level or under the key `rollout_correction`; {} if it is empty.

    Raises:
        ValueError: it is not YAML, or holds no mapping.
        OSError: it can't be read.
    """
    what = f"`rollout_correction_config` {path}"
    with open(path, encoding="utf-8") as file:
        try:
            # A subclass of SafeLoader: as safe as yaml.safe_load.
            content = yaml.load(file, Loader=_SettingsLoader)
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ValueError(f"{what} is not YAML: {error}") from error
    if isinstance(content, Mapping) and set(content) == {"rollout_correction"}:
        content = content["rollout_correction"]
    if content is None:
        return {}
    if not isinstance(content, Mapping):
        raise ValueError(f"{what} must hold a mapping of settings, got {type(content).__name__}")
    return content


class _SettingsLoader(yaml.SafeLoader):
    """Reads numbers as YAML 1.2 writes them: 1.1, PyYAML's, reads 0.5_5 as 0.55 and 1e-4 as text."""


_NUMBER_TAG = "tag:yaml.org,2002:float"
_SettingsLoader.yaml_implicit_resolvers = {
    first: [pair for pair in pairs if pair[0] not in (_NUMBER_TAG, "tag:yaml.org,2002:int")]
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_SettingsLoader.add_implicit_resolver(
    _NUMBER_TAG,
    re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$|[-+]?\.inf$|\.nan$"),
    list("-+.0123456789"),
)
