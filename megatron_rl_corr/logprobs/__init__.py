"""Log-probs and entropy of a sharded vocabulary."""
