"""Python's garbage collector while a model is set up. Touches nothing else.

A model of 45,000 parameters is some millions of objects that stay. The collector looks at the young
ones again and again while they are made, which was about a third of the time of set-up, and once
more when it may run again, which was a sixth of the rest.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_MANY = 10_000  # young objects; to collect fewer takes a millisecond


@contextmanager
def collector_paused() -> Iterator[None]:
    """Collect no garbage inside, where many objects are made that stay; as a decorator, too.

    What nothing refers to is freed at once as ever; cycles wait for the next full collection where
    many objects were made, since all count as old ones afterwards. A collector that a user has
    switched off stays off, and what a user has frozen stays frozen.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        # The second question walks over all that is frozen.
        if gc.get_count()[0] > _MANY and not gc.get_freeze_count():
            gc.freeze()  # moves all objects, and the next line moves them to the oldest generation
            gc.unfreeze()
        gc.enable()
