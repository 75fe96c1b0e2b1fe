"""Package metadata. The exact versions that are developed and tested against are in requirements/*.lock."""

import re
from pathlib import Path

from setuptools import find_packages, setup

VERSION = re.search(r'__version__ = "(.+)"', Path("megatron_rl_corr/__init__.py").read_text()).group(1)

setup(
    name="megatron_rl_corr",
    version=VERSION,
    description="Measure and correct the train-rollout mismatch of RL on Megatron-LM with SGLang servers",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.12",  # megatron-core asks for it from 0.17 on
    packages=find_packages(include=["megatron_rl_corr", "megatron_rl_corr.*"]),
    package_data={"megatron_rl_corr.commands.report": ["*.j2"]},
    install_requires=[
        "torch>=2.6",
        "megatron-core>=0.14,<0.21",
        "pyyaml>=6",
        "tensorboard>=2.14",
        "aiohttp>=3.9",
        "transformers>=4.51",
        "orjson>=3.9",
        "pybase64>=1.3",
        "jinja2>=3.1",
        "pyarrow>=15",
        "safetensors>=0.4",
    ],
    extras_require={
        "report": ["matplotlib>=3.8"],
        "math": ["math-verify[antlr4_13_2]>=0.8"],
        "dev": [
            "pytest>=8",
            "pytest-xdist>=3.5",
            "hypothesis>=6",
            "psutil>=5.9",
            "ruff>=0.6",
            "matplotlib>=3.8",
            "math-verify[antlr4_13_2]>=0.8",
        ],
        "gpu": ["transformer-engine[pytorch]>=2"],
        "sglang": ["sglang==0.5.23"],
    },
    entry_points={"console_scripts": ["megatron-rl-corr = megatron_rl_corr.cli:main"]},
)
