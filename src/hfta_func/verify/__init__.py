"""The oracle: what an array computes is compared with members that run alone."""

from hfta_func.verify.alone import Case as Case
from hfta_func.verify.alone import assigned as assigned
from hfta_func.verify.alone import autocasting as autocasting
from hfta_func.verify.alone import same as same
from hfta_func.verify.oracle import Oracle as Oracle
from hfta_func.verify.oracle import Trial as Trial
from hfta_func.verify.oracle import Verify as Verify
from hfta_func.verify.reached import Reached as Reached
