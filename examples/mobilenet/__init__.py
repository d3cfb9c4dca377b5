"""MobileNet V2 and V3 on images."""
