"""Sparse autoencoders over the activations of one frozen transformer."""
