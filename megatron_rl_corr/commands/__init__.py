"""What a person runs beside a training: `megatron-rl-corr COMMAND`. Nothing of training imports it."""
