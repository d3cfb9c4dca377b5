"""Replacements for calls of a model that vmap cannot run as they are, above all random ones."""

from hfta_func.calls.routing import routed as routed
from hfta_func.calls.scan import scan as scan
