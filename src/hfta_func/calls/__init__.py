"""What the random and composite calls of a model become while an array runs it."""
