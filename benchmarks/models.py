"""Two models that HFTA was published with, at their published sizes, as plain modules."""

from examples.resnet.model import BasicBlock, ResNet18
from examples.transformer.model import TransformerLM

__all__ = ["BasicBlock", "ResNet18", "TransformerLM"]
