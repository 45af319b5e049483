"""What a model takes on a number of ranks, predicted from shapes before anyone rents them.

On top of everything in `sharding`, whose planners it calls; nothing in `sharding` but the command
line imports it. Runs on one process and allocates nothing of the model.
"""

from sharding.capacity.advice import advise
from sharding.capacity.model_sources import read_model
from sharding.capacity.prediction import Capacity, measure

__all__ = ["Capacity", "advise", "measure", "read_model"]
