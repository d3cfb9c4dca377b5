"""Deep ensembles on a table."""
