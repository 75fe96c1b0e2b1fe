"""Replays the keys that the sparse attention of servers took."""
