"""What would keep a run from starting, found before or while it starts."""
