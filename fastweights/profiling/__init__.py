"""Time and memory of generating one more token."""
