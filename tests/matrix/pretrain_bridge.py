"""pretrain_any.py with the model that Megatron-Bridge builds, as a user's script has it."""

from megatron.core.enums import ModelType
from megatron.training import arguments, pretrain
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from pretrain_any import datasets_provider, forward_step

from megatron_rl_corr.mcore.bridge_model import bridge_model

if __name__ == "__main__":
    datasets_provider.is_distributed = True
    pretrain(
        cfg_container=pretrain_cfg_container_from_args(arguments.parse_and_validate_args()),
        train_valid_test_dataset_provider=datasets_provider,
        model_provider=bridge_model,
        model_type=ModelType.encoder_or_decoder,
        forward_step_func=forward_step,
    )
