"""Ways for weights to reach a server."""
