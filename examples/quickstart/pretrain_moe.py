"""Pretrain a Mixture-of-Experts GPT model: an ordinary Megatron script, with nothing in it about rollouts.

It runs on its own under torchrun (language modelling on Megatron's mock data), and under the
rollout-correction launcher without a change.
"""

from functools import partial

import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.training import get_args, get_tokenizer, pretrain
from megatron.training.argument_utils import (
    core_transformer_config_from_args,
    pretrain_cfg_container_from_args,
)
from megatron.training.arguments import parse_and_validate_args


def model_provider(pre_process=True, post_process=True, vp_stage=None, config=None, pg_collection=None):
    args = get_args()
    config = config or core_transformer_config_from_args(args)
    shape = {
        "num_experts": args.num_experts,
        "moe_grouped_gemm": args.moe_grouped_gemm,
        "qk_layernorm": args.qk_layernorm,
    }
    if args.transformer_impl == "local":
        spec = get_gpt_layer_local_spec(normalization=args.normalization, **shape)
    else:
        spec = get_gpt_layer_with_transformer_engine_spec(**shape)
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_base=args.rotary_base,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )


def loss_func(loss_mask, output):
    mask = loss_mask.reshape(-1).float()
    loss = torch.sum(output.reshape(-1).float() * mask)
    tokens = mask.sum().to(torch.int)
    return loss, tokens, {"lm loss": torch.stack([loss.detach().clone(), tokens.float()])}


def forward_step(data_iterator, model):
    # Every rank reads its replica's samples itself: the data loader deals them out by data-parallel rank.
    batch = {name: tensor.cuda(non_blocking=True) for name, tensor in next(data_iterator).items()}
    mask = batch.get("attention_mask")
    output = model(batch["tokens"], batch["position_ids"], mask, labels=batch["labels"])
    return output, partial(loss_func, batch["loss_mask"])


def train_valid_test_datasets_provider(num_samples, vp_stage=None):
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
    train_valid_test_datasets_provider.is_distributed = True
    arguments = parse_and_validate_args()
    pretrain(
        pretrain_cfg_container_from_args(arguments),
        train_valid_test_datasets_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        model_provider,
    )
