"""Data of the examples: embedded, generated, or read from the original archives."""
