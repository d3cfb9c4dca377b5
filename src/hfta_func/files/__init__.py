"""States in files, and single models out of an array and into one."""
