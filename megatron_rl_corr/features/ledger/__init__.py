"""The mismatch of a few samples, split into named parts that add up to it."""
