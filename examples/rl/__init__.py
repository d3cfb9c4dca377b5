"""Reinforcement learning: single files on the parts of ``hfta_func.rl``."""
