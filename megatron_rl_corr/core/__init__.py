"""The correction's mathematics on packed tokens: torch only, no collectives of its own, no host sync."""
