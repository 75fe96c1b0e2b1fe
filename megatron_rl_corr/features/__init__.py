"""The optional parts of a run, a folder each: its options, its checks, its metrics, and what
it does in a step.

config/features.py names them; mcore/feature.py says when a run asks them.
"""
