"""What the user brings: prompts and rewards."""
