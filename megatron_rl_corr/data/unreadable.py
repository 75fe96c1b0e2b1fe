"""The error of a text that `math` can't read whole."""


class Unreadable(ValueError):
    """A text that can't be read as one answer; the message says what stands in the way."""
