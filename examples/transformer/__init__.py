"""A Transformer language model."""
