"""A script that fine-tunes as Megatron's pretrain_gpt.py does with --sft: Megatron's own data set, tokenizer
and labels.

It knows nothing of rollouts. JSON lines are read without the library `datasets`, which Megatron reads them
with.
"""

import json
from pathlib import Path

from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.core.enums import ModelType
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.utils import flatten_batch_for_packed_sequences
from megatron.training import arguments, get_args, get_tokenizer, pretrain
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.datasets.sft_dataset import SFTDataset
from megatron.training.utils import get_blend_and_blend_per_split

from tests.matrix.pretrain_any import loss_func, model_provider


class Conversations(SFTDataset):
    @staticmethod
    def build_low_level_dataset(dataset_path, config):
        return [json.loads(line)["messages"] for line in Path(dataset_path).read_text().splitlines()]


def forward_step(data_iterator, model):
    batch = flatten_batch_for_packed_sequences(next(data_iterator))
    bounds, longest = batch["cu_seqlens"][0], int(batch["max_seqlen"])
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    output = model(
        batch["tokens"], batch["position_ids"], None, labels=batch["labels"], packed_seq_params=packed
    )
    return output, lambda made: loss_func(batch["loss_mask"].reshape(-1), made)


def datasets_provider(num_samples, vp_stage=None):
    args = get_args()
    blend, per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=per_split,
        split=args.split,
        tokenizer=get_tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        context_parallel_size=args.context_parallel_size,
    )
    return BlendedMegatronDatasetBuilder(Conversations, num_samples, lambda: True, config).build()


if __name__ == "__main__":
    datasets_provider.is_distributed = True
    pretrain(
        train_valid_test_dataset_provider=datasets_provider,
        model_provider=model_provider,
        model_type=ModelType.encoder_or_decoder,
        forward_step_func=forward_step,
        cfg_container=pretrain_cfg_container_from_args(arguments.parse_and_validate_args()),
    )
