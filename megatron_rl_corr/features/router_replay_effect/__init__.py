"""How much of the mismatch --router-replay R3 removes."""
