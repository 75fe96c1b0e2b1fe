"""What Megatron's offloading does to its optimizers, on a CPU: prints JSON, case -> what was seen.

On a GPU `offload_to_cpu` gives each of the optimizer's parameters new memory; here a copy on the CPU
stands for that.
"""

import json

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

from megatron_rl_corr.mcore.colocation import TrainerMemory


def trained(bf16: bool, distributed: bool, frees: str):
    """(whether weights would leave with the state, gradients in bytes while free, weights
    after two updates).
    """
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    torch.manual_seed(1)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=16,
        num_attention_heads=2,
        use_cpu_initialization=True,
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
    )
    model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=32, max_sequence_length=8)
    model = Float16Module(config, model) if bf16 else model
    given = DistributedDataParallelConfig(use_distributed_optimizer=distributed)
    model = DistributedDataParallel(config, given, model)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=0.1,
            bf16=bf16,
            params_dtype=config.params_dtype,
            use_distributed_optimizer=distributed,
        ),
        [model],
    )
    memory, left, before = TrainerMemory([model], optimizer), None, flat(model)
    leave = memory.moves_weights()
    for _ in range(2):
        if frees:
            memory.free()
            memory.free()
            left = sum(buffer.grad_data.untyped_storage().nbytes() for buffer in model.buffers)
            if frees == "as a GPU":
                for group in optimizer.param_groups:
                    for parameter in group["params"]:
                        parameter.data = parameter.data.clone()
            memory.take_back()
            memory.take_back()
        optimizer.zero_grad()
        model.zero_grad_buffer()
        for number, weight in enumerate(model.parameters()):
            weight.main_grad.fill_(1.0 + number)
        optimizer.step()
    assert not torch.equal(before, flat(model))
    return leave, left, flat(model)


def flat(model):
    return torch.cat([weight.detach().float().flatten() for weight in model.parameters()])


def main():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    found = {}
    for bf16 in (False, True):
        for distributed in (False, True):
            leave, _, plain = trained(bf16, distributed, "")
            _, left, freed = trained(bf16, distributed, "as here")
            _, _, moved = trained(bf16, distributed, "as a GPU")
            found[f"{'bf16' if bf16 else 'fp32'}{' distributed' * distributed}"] = {
                "leave": leave,
                "left": left,
                "same": torch.equal(plain, freed),
                "same_as_a_gpu": torch.equal(plain, moved),
            }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
