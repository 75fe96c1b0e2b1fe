"""After every push the servers' log-probs are compared with the trainer's own."""
