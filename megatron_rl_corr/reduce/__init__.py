"""Process groups and this rank's place in them, exact reductions over them, and failing together."""
