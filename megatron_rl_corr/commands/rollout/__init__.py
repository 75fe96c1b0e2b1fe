"""Samples prompts without training."""
