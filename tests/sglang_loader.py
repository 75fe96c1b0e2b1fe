"""SGLang's own models and weight loaders in a worker's process, without a server: what a server's
scheduler makes.
"""

from dataclasses import dataclass

import torch
from sglang.srt.configs.device_config import DeviceConfig
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.update_config import adjust_tp_num_heads_if_necessary
from sglang.srt.distributed import bootstrap
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.model_loader import get_model
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.server_args import prepare_server_args

from megatron_rl_corr.models.architectures import FAMILIES, ends
from tools.cpu import sglang_arguments
from tools.local_server import free_port


@dataclass(frozen=True)
class LoadedModel:
    """A model that has loaded its folder, and what sends it other weights."""

    model: torch.nn.Module
    updater: WeightUpdater

    def state(self):
        """Every tensor that a forward pass may read: parameters, and what SGLang derives from them."""
        derived = {
            f"{path}.{name}": value
            for path, module in self.model.named_modules()
            for name, value in vars(module).items()
            if isinstance(value, torch.Tensor)
        }
        return dict(self.model.named_parameters()) | derived

    def forget(self):
        """Every weight is 7."""
        for tensor in self.state().values():
            tensor.data.fill_(7)

    def load(self, bucket):
        """One request of a push: (name, tensor) pairs."""
        done, why = self.updater.load_weights_from_distributed(bucket)
        assert done, why

    def send(self, requests):
        """A whole push of these requests, over weights that are all 7."""
        self.forget()
        self.updater.begin_weight_update()
        for bucket in requests:
            self.load(bucket)
        self.updater.end_weight_update(run_post_load=False)


def start_rank(path, rank=0, size=1, port=None):
    """This process as tensor-parallel rank `rank` of `size` of a server of the folder; its arguments."""
    flags = ["--model-path", str(path), "--dtype", "float32", "--tp-size", str(size), *sglang_arguments()]
    # as gated delta nets need without a GPU
    flags += ["--mamba-radix-cache-strategy", "no_buffer", "--disable-overlap-schedule"]
    arguments = prepare_server_args(flags)
    # Of sparse attention it asks which GPU there is, to choose kernels, which no loader runs.
    torch.cuda.get_device_capability = lambda *device: (9, 0)
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=rank, dp_rank=None, gpu_id=rank))
    bootstrap.init_parallel_runtime(server_args=arguments, device="cpu", dist_port=port or free_port())
    return arguments


def load_model(arguments, rank=0, *, draft=False):
    """The model of `start_rank`'s arguments, or its draft model."""
    config = ModelConfig.from_server_args(arguments, is_draft_model=draft)
    if hasattr(config.hf_text_config, "linear_num_key_heads"):
        # as a server's model runner does on a CPU
        adjust_tp_num_heads_if_necessary(config.hf_text_config, arguments.tp_size, True)
    model = get_model(
        model_config=config,
        load_config=LoadConfig(load_format="auto"),
        device_config=DeviceConfig(device="cpu", gpu_id=rank),
    )
    updater = WeightUpdater(
        tp_rank=rank,
        device="cpu",
        gpu_id=rank,
        model_config=config,
        custom_weight_loaders={},
        get_model=lambda: model,
        update_model_fields=None,
        recapture_cuda_graph=None,
        get_model_runner=None,
    )
    return LoadedModel(model, updater)


def units_of(weights, config):
    """As an exporter has them: what servers fuse and want in one request stands together."""
    rows = [
        *ends(config, config["vocab_size"]),
        *(r for part in FAMILIES[config["model_type"]] for r in part(config)),
    ]
    left, units = dict(weights), []
    for layer in range(config["num_hidden_layers"]):
        for together in {row.sent_with for row in rows if row.sent_with}:
            names = [name.format(L=layer) for name in together]
            units.append([(name, left.pop(name)) for name in names])
    return units + [[named] for named in left.items()]
