"""Weights from Megatron's shards to rollout servers, and the verification that they arrived."""
