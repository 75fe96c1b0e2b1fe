"""Rollouts on held-out prompts, every --eval-interval steps."""
