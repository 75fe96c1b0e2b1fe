"""Hugging Face models as Megatron holds them: names, layouts, shards and the flags that describe them."""
