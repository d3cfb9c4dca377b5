"""The two studies of HFHT, HFTA's tuner."""
