"""Training code of other packages, run as an array."""

from hfta_func.integrations.lightning_arrays import LightningArray as LightningArray
from hfta_func.integrations.lightning_arrays import lightning as lightning
from hfta_func.integrations.transformers import train_trainers as train_trainers
