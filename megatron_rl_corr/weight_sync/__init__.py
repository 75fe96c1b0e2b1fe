"""Weights from Megatron's shards to rollout servers, and from Hugging Face checkpoints to shards."""
