"""Makes the soak's policy, the quickstart's in small: soak_model.py OUT_DIR [--seed 0]"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples/quickstart"))

import make_model as quickstart

LAYERS, EXPERTS = 2, 4
original = quickstart.model_config


def model_config():
    """Two layers of four experts, so that a push, which is most of a step here, is of few parameters."""
    config = original()
    config.num_hidden_layers, config.num_experts, config.layer_types = LAYERS, EXPERTS, None
    return config


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    quickstart.model_config = model_config
    quickstart.make_model(arguments.out_dir, seed=arguments.seed)
