"""Everything that touches Megatron: arguments, batches, the corrected step and its hooks."""
