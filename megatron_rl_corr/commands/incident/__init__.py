"""`megatron-rl-corr incident`: a folder from which a step of a run can be done again."""
