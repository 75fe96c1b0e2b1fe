"""The gateway of agents by itself, to try a harness."""
