"""Federated averaging, and peers that average among each other."""
