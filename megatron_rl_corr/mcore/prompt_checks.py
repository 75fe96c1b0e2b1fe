"""What is checked of prompts before the first is sampled: their ids, and that the longest response fits."""

from megatron_rl_corr.data.prompts import PromptDataset


def check_vocabulary(prompts: PromptDataset, flag: str, vocab_size: int) -> None:
    """Raises ValueError for an id that the model does not have: servers would refuse it, but many steps later."""
    for prompt in prompts.prompts:
        largest = max(prompt.input_ids)
        if largest >= vocab_size:
            raise ValueError(
                f"{flag}: row {prompt.index} has token id {largest}; ids must be in [0, {vocab_size}), the vocabulary "
                "of --rollout-hf-checkpoint: were the prompts tokenised for this model?"
            )


def check_they_fit(prompts: PromptDataset, flag: str, max_new_tokens: int, length: int) -> None:
    """Raises ValueError unless a longest response to the longest prompt fits into a row."""
    longest = max(len(prompt.input_ids) for prompt in prompts.prompts)
    needed = longest + max_new_tokens - 1
    if needed > length:
        raise ValueError(
            f"--seq-length {length} is too short for the longest prompt of {flag}, {longest} tokens, and "
            f"--rollout-max-new-tokens {max_new_tokens}; use --seq-length {needed} or more"
        )
