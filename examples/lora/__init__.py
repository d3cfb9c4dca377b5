"""Adapters over one language model."""
