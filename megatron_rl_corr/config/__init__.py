"""What a user sets: dataclasses that check themselves, read from flags, YAML and the dialects of peers."""
