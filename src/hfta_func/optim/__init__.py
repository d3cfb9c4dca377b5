"""Functional optimizers over stacked parameters, with one value per member for every scalar.

Optimizers have the names of ``torch.optim`` and compute the same; the other functions wrap or precede them.
"""

from hfta_func.optim._adam import adam as adam
from hfta_func.optim._adam import adamax as adamax
from hfta_func.optim._adam import adamw as adamw
from hfta_func.optim._adam import lion as lion
from hfta_func.optim._adam import nadam as nadam
from hfta_func.optim._adam import radam as radam
from hfta_func.optim._base import GradientTransformation as GradientTransformation
from hfta_func.optim._base import apply_updates as apply_updates
from hfta_func.optim._base import update_ as update_
from hfta_func.optim._elementwise import adadelta as adadelta
from hfta_func.optim._elementwise import adagrad as adagrad
from hfta_func.optim._elementwise import asgd as asgd
from hfta_func.optim._elementwise import rmsprop as rmsprop
from hfta_func.optim._elementwise import rprop as rprop
from hfta_func.optim._elementwise import sgd as sgd
from hfta_func.optim._hyperparams import with_hyperparams as with_hyperparams
from hfta_func.optim._lbfgs import lbfgs as lbfgs
from hfta_func.optim._matrices import adafactor as adafactor
from hfta_func.optim._matrices import lamb as lamb
from hfta_func.optim._matrices import muon as muon
from hfta_func.optim._transforms import accumulate as accumulate
from hfta_func.optim._transforms import add_decayed_weights as add_decayed_weights
from hfta_func.optim._transforms import chain as chain
from hfta_func.optim._transforms import clip_grad_norm as clip_grad_norm
from hfta_func.optim._transforms import clip_grad_value as clip_grad_value
from hfta_func.optim._transforms import ema as ema
from hfta_func.optim._transforms import partition as partition
