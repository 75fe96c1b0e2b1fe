"""The policy as Hugging Face folders, while it is trained."""
