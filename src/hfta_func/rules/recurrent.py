"""Recurrent layers of M members.

Dimension letters: M models, T time, N batch, I features in, H features of the state.
"""
