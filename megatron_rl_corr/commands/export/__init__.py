"""Writes a checkpoint of Megatron as a Hugging Face folder."""
