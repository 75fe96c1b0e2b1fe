"""An HTTP server in front of the rollout servers that agents ask as they ask OpenAI or Anthropic."""
