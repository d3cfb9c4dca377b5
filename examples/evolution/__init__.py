"""Evolution strategies: a policy, and a network that has no gradient."""
