"""A stand-in for flash-linear-attention, which needs a GPU: what Megatron imports for gated delta nets."""
