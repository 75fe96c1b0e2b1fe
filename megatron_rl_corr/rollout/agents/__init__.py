"""Agents of the user's: harnesses in processes of their own, which ask the policy through the gateway."""
