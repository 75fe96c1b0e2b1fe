"""spared_worker.py IN OUT: which modules SGLang leaves unquantised; IN: [lists of spared paths,
paths of modules].

OUT: for each list whether each module is, by SGLang's own reading of a configuration; null where it
refuses to start.
"""

import json
import sys
from pathlib import Path

from sglang.srt.layers.quantization.fp8 import Fp8Config
from sglang.srt.layers.quantization.utils import is_layer_skipped

CONFIG = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def skipped(paths, modules):
    ignored = Fp8Config.from_config(CONFIG | {"modules_to_not_convert": paths}).ignored_layers
    try:
        return [is_layer_skipped(module, ignored) for module in modules]
    except ValueError:
        return None


lists, modules = json.loads(Path(sys.argv[1]).read_text())
Path(sys.argv[2]).write_text(json.dumps([skipped(paths, modules) for paths in lists]))
