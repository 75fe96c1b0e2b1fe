"""What fits on which GPUs: arithmetic on a config.json, without weights, for training and for
rollout servers.
"""
