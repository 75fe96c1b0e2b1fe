"""Rollout engines behind one seam: what is asked of a server and what it answers."""
