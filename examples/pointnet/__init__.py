"""PointNet on clouds of points."""
