"""DCGAN on images."""
