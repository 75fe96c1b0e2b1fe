"""Shows the samples that a run saved, with what was done to their tokens."""
