"""What the mismatch of a finished run comes from."""
