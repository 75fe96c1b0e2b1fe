"""Exact reductions and log-probs over parallel groups, which are always passed in."""
