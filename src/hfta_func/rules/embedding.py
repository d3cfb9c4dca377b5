"""Look-up tables of M members as one table.

Dimension letters: M models, N any batch, V rows of a table, D features.
"""
