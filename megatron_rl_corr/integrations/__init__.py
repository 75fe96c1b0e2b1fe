"""Our correction where another trainer has a place for one: slime and miles, and Megatron's own RL."""
