"""A pretrain script for every release that has megatron.training: stock forward step, data and
call, by their names.

It knows nothing of rollouts.
"""

import inspect

from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.training import arguments, get_args, get_tokenizer, pretrain


def hybrid_spec():
    """HybridModel's layers as --spec of pretrain_hybrid.py may name them, with Qwen3's norms of
    queries and keys.
    """
    from megatron.core.extensions.transformer_engine import TENorm
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec

    attention = hybrid_stack_spec.submodules.attention_layer.submodules.self_attention.submodules
    attention.q_layernorm = attention.k_layernorm = TENorm
    return hybrid_stack_spec


def hybrid_model(args, config, **arguments):
    """As pretrain_hybrid.py builds it."""
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    print("a HybridModel", flush=True)
    return HybridModel(
        config=config,
        hybrid_stack_spec=hybrid_spec(),
        hybrid_layer_pattern=args.hybrid_layer_pattern,
        **arguments,
    )


def block_model(config, **arguments):
    """As pretrain_gpt.py builds DeepSeek-V3 and models with dense layers between those with experts, with the
    layer that predicts further tokens if there is one.
    """
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec

    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=True)
    further = (
        get_gpt_mtp_block_spec(config, spec, use_transformer_engine=True) if config.mtp_num_layers else None
    )
    return GPTModel(config=config, transformer_layer_spec=spec, mtp_block_spec=further, **arguments)


def delta_net_model(config, **arguments):
    """As pretrain_gpt.py builds Qwen3-Next."""
    from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
        get_transformer_block_with_experimental_attention_variant_spec as block_spec,
    )

    return GPTModel(config=config, transformer_layer_spec=block_spec(config), **arguments)


def model_provider(pre_process=True, post_process=True, vp_stage=None, config=None, pg_collection=None):
    args = get_args()
    config = config or arguments.core_transformer_config_from_args(args)
    common = {
        "vocab_size": args.padded_vocab_size,
        "max_sequence_length": args.max_position_embeddings,
        "pre_process": pre_process,
        "post_process": post_process,
        "parallel_output": True,
        "share_embeddings_and_output_weights": not args.untie_embeddings_and_output_weights,
        "position_embedding_type": args.position_embedding_type,
        "rotary_base": args.rotary_base,
        "vp_stage": vp_stage,
        "pg_collection": pg_collection,
    }
    if args.rotary_percent != 1:
        common["rotary_percent"] = args.rotary_percent
    if vars(args).get("use_rope_scaling"):
        common |= {"rope_scaling": True, "rope_scaling_factor": args.rope_scaling_factor}
    if vars(args).get("hybrid_layer_pattern") is not None:
        return hybrid_model(args, config, **common)
    shape = {
        "num_experts": args.num_experts,
        "moe_grouped_gemm": args.moe_grouped_gemm,
        "qk_layernorm": args.qk_layernorm,
    }
    if vars(args).get("experimental_attention_variant") == "gated_delta_net":
        return delta_net_model(config, **common)
    dense_layers = not isinstance(vars(args).get("moe_layer_freq", 1), int)
    if args.multi_latent_attention or dense_layers:
        return block_model(config, **common)
    if args.transformer_impl == "local":
        spec = get_gpt_layer_local_spec(normalization=args.normalization, **shape)
    else:
        spec = get_gpt_layer_with_transformer_engine_spec(**shape)
    return GPTModel(config=config, transformer_layer_spec=spec, **common)


def loss_func(mask, output):
    loss, tokens = (output.reshape(-1).float() * mask).sum(), mask.sum().int()
    print("lm loss", float(loss / tokens), flush=True)
    return loss, tokens, {}


def forward_step(data_iterator, model):
    batch = next(data_iterator)
    output = model(
        batch["tokens"], batch["position_ids"], batch.get("attention_mask"), labels=batch["labels"]
    )
    return output, lambda made: loss_func(batch["loss_mask"].reshape(-1).float(), made)


def datasets_provider(num_samples, vp_stage=None):
    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=None,
        blend_per_split=None,
        split=args.split,
        tokenizer=get_tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=args.create_attention_mask_in_dataloader,
    )
    return BlendedMegatronDatasetBuilder(MockGPTDataset, num_samples, lambda: True, config).build()


if __name__ == "__main__":
    datasets_provider.is_distributed = True
    given = {
        "train_valid_test_dataset_provider": datasets_provider,
        "model_provider": model_provider,
        "model_type": ModelType.encoder_or_decoder,
        "forward_step_func": forward_step,
    }
    if "cfg_container" in inspect.signature(pretrain).parameters:  # from 0.18 on the script parses
        from megatron.training.argument_utils import pretrain_cfg_container_from_args

        given["cfg_container"] = pretrain_cfg_container_from_args(arguments.parse_and_validate_args())
    pretrain(**given)
