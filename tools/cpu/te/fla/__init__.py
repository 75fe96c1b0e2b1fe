"""A stand-in for flash-linear-attention, whose kernels need a GPU: what Megatron's gated delta nets import."""
