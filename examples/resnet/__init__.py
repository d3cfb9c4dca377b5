"""ResNet-18 on small images."""
