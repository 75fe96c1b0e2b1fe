"""Triton kernels, for logits on a GPU."""
