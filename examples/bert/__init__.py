"""BERT on text."""
