"""Uses of arrays that take few lines."""
