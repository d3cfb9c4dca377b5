"""Worker processes, and the executors that call functions in them."""
