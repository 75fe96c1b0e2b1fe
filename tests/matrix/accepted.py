"""Tiny models of every family with their servers and trainers, as `megatron-rl-corr accept` runs them."""

import json
import shutil

import torch
from safetensors.torch import load_file, save_file

from megatron_rl_corr.cli import main
from megatron_rl_corr.models.architectures import TEXT_OF, num_experts, of_text
from tests.mcore.launched import run_command, run_environment, write_data
from tests.mcore.test_runs import SCRIPT
from tests.mcore.tiny_models import (
    DELTA_NETS_SERVED,
    DELTA_NETS_VARIABLES,
    MODELS,
    VOCAB,
    make_model,
    write_processors,
)
from tests.preloaded import PreloadedServer
from tools.cpu import environment, sglang_arguments

TP2 = ["--tensor-model-parallel-size", 2, "--sequence-parallel"]
EP2 = ["--expert-model-parallel-size", 2, "--expert-tensor-parallel-size", 1]
WIDE = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64}
"""SGLang pads what is no multiple of 32 on a CPU, and its checksums are of padded tensors then."""
LATENT = ("deepseek_v3", "kimi_k2", "glm4_moe_lite")
DELTA_NETS = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text")
SERVED = {
    **dict.fromkeys(DELTA_NETS, DELTA_NETS_SERVED),
    # torch reads one pool of keys and values alone
    "gpt_oss": ["--disable-hybrid-swa-memory"],
}
"""Flags of a family's server."""
TRAINED = dict.fromkeys(LATENT, ["--no-rope-fusion"])
"""Flags of a family's trainer beside those of its config.json: the fused kernel needs a GPU."""
NOT_SERVED = {
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), "SGLang's sparse attention needs a GPU"),
    "qwen2_moe": "SGLang makes experts of dense layers (decoder_sparse_step 2) too, and drops their weights",
}
"""Families, or forms of one, that no SGLang server on a CPU has -> the reason."""
ACCEPTED = [name for name in MODELS if name not in NOT_SERVED]


def made_model(name, tokenizer, folder, *, dtype="float32", **more):
    """The folder of a tiny model (more: of `make_model`), with a tokenizer, which servers want."""
    from transformers import AutoTokenizer

    model = folder / "model"
    model.mkdir()
    wide = {key: size for key, size in WIDE.items() if key in MODELS[name]}
    make_model(name, model, **wide, **more)
    for file in tokenizer.glob("*token*"):
        shutil.copy(file, model)
    if name.startswith("qwen3_5"):
        if name in TEXT_OF:
            write_processors(model)
        # transformers cuts text as Qwen3.5 does, whatever the file says, and a server as the file says
        AutoTokenizer.from_pretrained(model).save_pretrained(model)
    for file in model.glob("*.safetensors"):
        tensors = load_file(file)
        # SGLang holds sinks in bfloat16 in a server of float32, too: published ones are
        rounded = {key: one.bfloat16().float() for key, one in tensors.items() if key.endswith("sinks")}
        if rounded:
            save_file(tensors | rounded, file, metadata={"format": "pt"})
    if dtype != "float32":
        _in_number_type(model, dtype)
    return model


def _in_number_type(model, dtype):
    """The folder's weights, as published ones are, in 16 bits."""
    for file in model.glob("*.safetensors"):
        tensors = {key: one.to(getattr(torch, dtype)) for key, one in load_file(file).items()}
        save_file(tensors, file, metadata={"format": "pt"})
    config = (model / "config.json").read_text().replace('"dtype": "float32"', f'"dtype": "{dtype}"')
    (model / "config.json").write_text(config)


def has_experts(model):
    return num_experts(of_text(json.loads((model / "config.json").read_text()))) is not None


def server_of(name, model, folder, *, dtype="float32"):
    more = ["--random-seed", "0", *SERVED.get(name.split()[0], [])]
    return PreloadedServer(
        model,
        dtype=dtype,
        log_path=folder / "server.log",
        extra_arguments=[
            *sglang_arguments(),
            *more,
            *(["--enable-return-routed-experts"] if has_experts(model) else []),
        ],
        environment=environment("sglang") | DELTA_NETS_VARIABLES,
    )


def accept(name, model, url, folder, monkeypatch, *flags, script=SCRIPT, out="out", **variables):
    """(status, accept.json, accept.md) of the family's run on two ranks."""
    if not (folder / "prompts.jsonl").exists():
        write_data(folder)
    for key, value in (run_environment() | variables).items():
        monkeypatch.setenv(key, value)
    given = [*TP2, *(EP2 if has_experts(model) else []), *TRAINED.get(name.split()[0], []), *flags]
    given += ["--tokenizer-type", "NullTokenizer", "--vocab-size", VOCAB]
    command = run_command(folder, "run", model, url, script, *given, processes=2, tokens=16)
    status = main(["accept", "--out", str(folder / out), "--steps", "4", "--", *map(str, command)])
    numbers = json.loads((folder / out / "accept.json").read_text())
    return status, numbers, (folder / out / "accept.md").read_text()
