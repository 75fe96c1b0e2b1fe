"""Runs inside the workers of a vLLM server: takes new weights, checks them, and tells their checksums.

The server is started with

    --worker-extension-cls megatron_rl_corr.engines.vllm.worker.Extension
    --weight-transfer-config '{"backend": "rl_corr"}'

and VLLM_SERVER_DEV_MODE=1. Importing this package needs vLLM, torch and the standard library, so that it
can be installed with `pip install --no-deps` into the environment of a vLLM. It registers the backend;
vLLM is not changed.
"""

from megatron_rl_corr.engines.vllm.worker.extension import Extension

__all__ = ["Extension"]
