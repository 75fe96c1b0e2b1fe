"""The times of samples and steps, as Chrome traces."""
