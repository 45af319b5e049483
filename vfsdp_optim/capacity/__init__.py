"""What a model takes on a number of ranks, predicted from shapes before anyone rents them.

On top of the planners of `sharding` and of the optimizers, of which nothing but the command line
imports it. Runs on one process and allocates nothing of the model.
"""

from vfsdp_optim.capacity.advice import advise
from vfsdp_optim.capacity.model_sources import read_model
from vfsdp_optim.capacity.prediction import Capacity, measure

__all__ = ["Capacity", "advise", "measure", "read_model"]
