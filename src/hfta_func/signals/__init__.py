"""Periodic signals with gaps, one or several a person, to windows for arrays with one member per person.

Functions take a :class:`Signal`, or a list of them for all persons at once, and return the same.
"""

from hfta_func.signals.cutting import Windows as Windows
from hfta_func.signals.cutting import windows as windows
from hfta_func.signals.processing import bandpass as bandpass
from hfta_func.signals.processing import chop as chop
from hfta_func.signals.processing import fill as fill
from hfta_func.signals.processing import join as join
from hfta_func.signals.processing import normalise as normalise
from hfta_func.signals.processing import resample as resample
from hfta_func.signals.signal import Signal as Signal
from hfta_func.signals.signal import from_timestamps as from_timestamps
