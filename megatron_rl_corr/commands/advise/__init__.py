"""Which weights a run or its samples ask for."""
