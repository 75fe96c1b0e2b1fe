"""What development, examples and tests run beside the package."""
