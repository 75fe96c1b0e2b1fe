"""The doctor's command: questions that only a person asks, about a server, a model, an update."""
