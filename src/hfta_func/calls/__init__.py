"""Replacements for calls of a model that vmap cannot run as they are, above all random ones."""
