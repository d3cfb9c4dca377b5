"""Reinforcement learning with an ensemble of critics."""
