"""Agents of the user's, trained as they are: their harnesses ask the policy through a gateway."""
