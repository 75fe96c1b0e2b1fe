"""Programs for development, examples and tests; not installed with the package."""
