"""One rank of thousands in one process: Megatron's own groups and model, nothing of which has memory.

torch's fake backend stands for the network, so that a collective returns at once, and the model's
parameters are on the meta device. What runs beside them is the package's own code; `Counts` notes what it
asked of the network, and `HeldBytes` how much it held at once.
"""

import math
import time
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True)
class Parallel:
    """Sizes of a job's groups, in Megatron's words."""

    world: int
    tensor: int
    pipeline: int
    context: int
    expert: int


@dataclass
class Counts:
    """What this rank asked of its process groups, by (operation, group)."""

    calls: Counter = field(default_factory=Counter)
    received: Counter = field(default_factory=Counter)
    """Bytes that came to this rank."""
    sent: Counter = field(default_factory=Counter)
    """Bytes that left it for other ranks; of a reduction its share, once."""
    largest: Counter = field(default_factory=Counter)
    """Bytes of the largest tensor that one operation filled."""

    def note(self, operation: str, group: str, *, received: int = 0, sent: int = 0) -> None:
        """Count one call."""
        place = (operation, group)
        self.calls[place] += 1
        self.received[place] += received
        self.sent[place] += sent
        self.largest[place] = max(self.largest[place], received)

    def table(self) -> dict[str, dict[str, int]]:
        """ "operation over group" -> its numbers."""
        return {
            " over ".join(place): {
                "calls": self.calls[place],
                "received": self.received[place],
                "sent": self.sent[place],
                "largest": self.largest[place],
            }
            for place in sorted(self.calls)
        }


def start(parallel: Parallel, rank: int) -> None:
    """Make this process that rank, with Megatron's groups of that job."""
    from megatron.core import parallel_state

    torch.set_num_threads(1)
    torch.cuda.current_device = lambda: "meta"  # rotary embeddings of latent attention ask for it
    dist.init_process_group("fake", rank=rank, world_size=parallel.world, store=FakeStore())
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=1,
        create_gloo_process_groups=False,  # they would want a store that is no fake
    )


def meta_model(hf: dict[str, Any], parallel: Parallel) -> torch.nn.Module:
    """This rank's chunk of a published model, by its config.json: Qwen3 with experts, or DeepSeek's kind."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_layer_local_spec,
    )
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    layers, latent = hf["num_hidden_layers"], "kv_lora_rank" in hf
    given = {
        "num_layers": layers,
        "hidden_size": hf["hidden_size"],
        "num_attention_heads": hf["num_attention_heads"],
        "ffn_hidden_size": hf["intermediate_size"],
        "num_moe_experts": hf.get("num_experts") or hf["n_routed_experts"],
        "moe_router_topk": hf["num_experts_per_tok"],
        "moe_ffn_hidden_size": hf["moe_intermediate_size"],
        "moe_token_dispatcher_type": "allgather",  # another makes a CUDA stream
        "moe_router_load_balancing_type": "none",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "qk_layernorm": True,
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "pipeline_dtype": torch.bfloat16,
        "tensor_model_parallel_size": parallel.tensor,
        "pipeline_model_parallel_size": parallel.pipeline,
        "expert_model_parallel_size": parallel.expert,
        "expert_tensor_parallel_size": 1,
        "use_cpu_initialization": True,
        "perform_initialization": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "init_model_with_meta_device": True,
        **_uneven_stages(layers, parallel.pipeline),
    }
    if latent:
        init = DotProductAttention.__init__

        def without_widths(self, *args, k_channels=None, v_channels=None, **named):
            # Megatron's own attention lacks these two; it has no parameters.
            init(self, *args, **named)

        DotProductAttention.__init__ = without_widths
        dense = hf["first_k_dense_replace"]
        config = MLATransformerConfig(
            **given,
            multi_latent_attention=True,
            q_lora_rank=hf["q_lora_rank"],
            kv_lora_rank=hf["kv_lora_rank"],
            qk_head_dim=hf["qk_nope_head_dim"],
            qk_pos_emb_head_dim=hf["qk_rope_head_dim"],
            v_head_dim=hf["v_head_dim"],
            moe_shared_expert_intermediate_size=hf["moe_intermediate_size"] * hf["n_shared_experts"],
            moe_router_score_function="sigmoid",
            moe_router_enable_expert_bias=True,
            moe_layer_freq=[0] * dense + [1] * (layers - dense),
            rope_type="rope",
            apply_rope_fusion=False,
        )
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    else:
        config = TransformerConfig(
            **given, num_query_groups=hf["num_key_value_heads"], kv_channels=hf["head_dim"]
        )
        spec = get_gpt_layer_local_spec(
            num_experts=hf["num_experts"],
            moe_grouped_gemm=False,
            qk_layernorm=True,
            normalization="RMSNorm",
        )
    with torch.device("meta"):
        return GPTModel(
            config,
            spec,
            vocab_size=hf["vocab_size"],
            max_sequence_length=32768,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=False,
            position_embedding_type="rope",
            rotary_base=1_000_000,
        )


def _uneven_stages(layers: int, stages: int) -> dict[str, int]:
    """Megatron's flags for a number of layers that the stages do not divide: fewer on the first and last."""
    if layers % stages == 0:
        return {}
    left = layers - math.ceil(layers / stages) * (stages - 2)
    return {
        "num_layers_in_first_pipeline_stage": left - left // 2,
        "num_layers_in_last_pipeline_stage": left // 2,
    }


@contextmanager
def counted(
    names: dict[Any, str],
    objects: dict[Any, list],
    values: dict[tuple[torch.dtype, tuple[int, ...]], torch.Tensor] | None = None,
) -> Iterator[Counts]:
    """Within, whatever is asked of torch.distributed is counted and returns at once, as if all others came.

    A tensor on the meta device needs no backend then; one in memory keeps what it holds, or becomes ones
    where another rank broadcasts it.

    Args:
        names: process group -> what it is called; None is the world.
        objects: process group -> what comes of its members where objects are gathered or broadcast; of any
            other this rank's own.
        values: (type, shape) -> what a tensor like this holds when another rank has broadcast it.
    """
    from megatron_rl_corr.reduce import collectives

    counts, rank, values = Counts(), dist.get_rank(), values or {}
    ones = torch.ones(())  # made here, where nothing counts what is held

    def name(group: Any) -> str:
        return names.get(group, "others") if group is not None else "world"

    def all_gather(out, tensor, group=None, **_):
        counts.note("all-gather", name(group), received=out.nbytes - tensor.nbytes, sent=tensor.nbytes)
        if out.device.type != "meta":
            out.view(-1, *tensor.shape).copy_(tensor)

    def all_reduce(tensor, op=None, group=None, **_):
        counts.note("all-reduce", name(group), received=tensor.nbytes, sent=tensor.nbytes)

    def broadcast(tensor, src=None, group=None, **_):
        own = src == rank
        counts.note(
            "broadcast", name(group), received=0 if own else tensor.nbytes, sent=tensor.nbytes if own else 0
        )
        if not own:
            tensor.copy_(values.get((tensor.dtype, tuple(tensor.shape)), ones))

    def send(tensor, dst=None, group=None, **_):
        counts.note("send", name(group), sent=tensor.nbytes)

    def receive(tensor, src=None, group=None, **_):
        counts.note("receive", name(group), received=tensor.nbytes)

    def scatter(tensor, parts=None, src=None, group=None, **_):
        if parts is None:
            counts.note("scatter", name(group), received=tensor.nbytes)
        else:
            counts.note("scatter", name(group), sent=sum(part.nbytes for part in parts[1:]))
            tensor.copy_(parts[0])

    def batch(operations):
        for one in operations:
            receives = one.op is dist.irecv
            moved = {"received" if receives else "sent": one.tensor.nbytes}
            counts.note("receive" if receives else "send", name(one.group), **moved)
        return []

    def all_gather_object(out, own, group=None):
        counts.note("all-gather of objects", name(group))
        out[:] = objects.get(group, [own] * dist.get_world_size(group))

    def gather_object(own, out=None, dst=0, group=None, **_):
        counts.note("gather of objects", name(group))
        if out is not None:
            out[:] = [own] * dist.get_world_size(group)

    def broadcast_objects(out, src=0, group=None, **_):
        counts.note("broadcast of objects", name(group))
        out[:] = objects.get(group, out) if src != rank else out

    replaced = {
        (dist, "all_reduce"): all_reduce,
        (dist, "broadcast"): broadcast,
        (dist, "send"): send,
        (dist, "recv"): receive,
        (dist, "scatter"): scatter,
        (dist, "batch_isend_irecv"): batch,
        (dist, "all_gather_object"): all_gather_object,
        (dist, "gather_object"): gather_object,
        (dist, "broadcast_object_list"): broadcast_objects,
        (collectives, "all_gather_single"): all_gather,
    }
    kept = {place: getattr(*place) for place in replaced}
    try:
        for (module, attribute), function in replaced.items():
            setattr(module, attribute, function)
        yield counts
    finally:
        for (module, attribute), function in kept.items():
            setattr(module, attribute, function)


class HeldBytes(TorchDispatchMode):
    """The bytes of all tensors that were made within and are still there: the most at any moment.

    `spent_s` is the processor's time of the operations themselves, which a rank's device would do.
    """

    def __init__(self):
        super().__init__()
        self.now = self.most = 0
        self.spent_s = 0.0
        self._seen: dict[int, weakref.finalize] = {}

    def __enter__(self):
        self._from_numpy, torch.from_numpy = torch.from_numpy, self._counted_from_numpy
        return super().__enter__()

    def __exit__(self, *exception):
        torch.from_numpy = self._from_numpy
        return super().__exit__(*exception)

    def _counted_from_numpy(self, array: Any) -> torch.Tensor:
        # No operation of torch's, and yet a tensor that a rank would have on its device.
        tensor = self._from_numpy(array)
        self._add(tensor.untyped_storage(), set())
        return tensor

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = time.thread_time()
        found = self._counted(func, args, kwargs)
        self.spent_s += time.thread_time() - before
        return found

    def _counted(self, func, args, kwargs):
        found = func(*args, **(kwargs or {}))
        made = found if isinstance(found, list | tuple) else [found]
        given = {id(x.untyped_storage()) for x in args if isinstance(x, torch.Tensor)}
        for tensor in made:
            if isinstance(tensor, torch.Tensor):
                self._add(tensor.untyped_storage(), given)
        return found

    def _add(self, storage: torch.UntypedStorage, given: set[int]) -> None:
        if id(storage) in self._seen or id(storage) in given:  # a view of something older
            return
        size = storage.nbytes()
        self.now += size
        self.most = max(self.most, self.now)
        self._seen[id(storage)] = weakref.finalize(storage, self._forget, id(storage), size)

    def _forget(self, place: int, size: int) -> None:
        self._seen.pop(place, None)
        self.now -= size
