"""From a replica's samples to microbatches: taken, dealt out, laid out in tensors, packed."""
