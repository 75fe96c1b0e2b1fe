"""Answers of servers are received and parsed beside the trainer, in a process of its own."""
