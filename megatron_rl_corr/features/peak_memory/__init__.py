"""The most memory that each rank has held."""
