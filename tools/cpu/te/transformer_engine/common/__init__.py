"""What both frameworks share: recipes of lower precision."""

from transformer_engine.common import recipe  # noqa: F401
