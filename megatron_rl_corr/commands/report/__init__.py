"""The page and pictures of a run."""
