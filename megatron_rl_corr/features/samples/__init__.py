"""Each batch's samples, in files."""
