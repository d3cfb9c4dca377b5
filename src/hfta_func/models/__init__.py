"""Conversions between ordinary modules, stacked trees of tensors, and pure functions of these."""

from hfta_func.models.adapters import Adapters as Adapters
from hfta_func.models.adapters import stack_adapters as stack_adapters
from hfta_func.models.features import make_feature_extractor as make_feature_extractor
from hfta_func.models.stack import Stacked as Stacked
