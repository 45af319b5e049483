"""States on disk and from elsewhere: checkpoints, full state dicts, checks before a load.

`save`, `load` and `latest` keep the checkpoints of a run: whole or not there, verified before they
are read, for any number of ranks. Modules here may import `tensor` and what lies below. Nothing is
written into a model or an optimizer before everything was checked on all ranks; buckets and hooks
are not known here.

Example:
    >>> import tempfile, torch
    >>> from sharding import checkpoint
    >>> model = torch.nn.Linear(3, 2)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = checkpoint.save(folder, 7, model=model, optimizer=optimizer).result()
    ...     print(path.name, checkpoint.latest(folder))
    ...     checkpoint.load(folder, model=model, optimizer=optimizer)
    step-00000007 7
    7
"""

from sharding.checkpoint.loading import latest, load
from sharding.checkpoint.saving import save

__all__ = ["latest", "load", "save"]
