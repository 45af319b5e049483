"""What the same model takes under torch's FSDP2, each parameter in Shard(0).

[Note: memory of FSDP2]
Every rank holds as many rows of a parameter as the first does. A gather arrives in one buffer and
is copied to one for each parameter, both padded; the buffer of one bucket and the parameters of
another are alive together, as with us. Gradients stay whole, as autograd made them, until backward
leaves the module; then they are copied to the padded input of a reduce-scatter, of which one is
alive at a time (`set_reduce_scatter_max_input_buffers` is 1). As for us, the largest full gradient
of a bucket is not counted: autograd hands it over either way.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from vfsdp_optim.capacity.parallelism import DividedBucket, DividedModel
from vfsdp_optim.capacity.shapes import ITEMSIZE, TensorShape
from vfsdp_optim.capacity.step_buffers import StepDtypes, unsharded_peak
from vfsdp_optim.capacity.training_setup import Setup


@dataclass(frozen=True, slots=True)
class TorchShards:
    """See [Note: memory of FSDP2].

    Attributes:
        padding: Elements of padding as a share of the model's.
        at_rest: Bytes of parameters, gradients and unquantized states on rank 0.
        unsharded: Bytes of gathered parameters at the worst moment.
        communication: Bytes of full gradients and inputs of reductions at the worst moment.
    """

    padding: float
    at_rest: int
    unsharded: int
    communication: int

    @property
    def total(self) -> int:
        """All bytes."""
        return self.at_rest + self.unsharded + self.communication


def torch_shards(model: DividedModel, setup: Setup, numel: int) -> TorchShards:
    """Count for rank 0, whose pieces are never smaller than another rank's; of what owners keep of
    units it has an even share.

    Args:
        model: To lay out.
        setup: What it is trained with; states are unquantized.
        numel: Elements of one group of shard ranks.
    """
    padded = at_rest = 0
    for bucket in model.buckets:
        ranks, per = bucket.world_size, bucket.per_position
        optimizer = setup.block_optimizer(bucket.shapes, states="32bit")
        for i, tensor in enumerate(bucket.shapes.tensors):
            piece = _piece(tensor, ranks)
            padded += bucket.shapes.count * per * ranks * piece
            states = optimizer.state_bytes(i, piece)
            tensors = 1 + tensor.trainable  # itself, and its gradient
            at_rest += bucket.shapes.count * (tensors * piece * ITEMSIZE[tensor.dtype] + states)
        holders = ranks * model.parallelism.replicate
        at_rest += bucket.shapes.count * optimizer.unit_state_bytes // holders
    layers = [layer for layer in model.layers if layer[0].shapes.name != "root"]
    root = next((b for b in model.buckets if b.shapes.name == "root"), None)
    unsharded = unsharded_peak(
        0 if root is None else _gathered(root, setup.precision),
        [
            (layer[0].shapes.count, [_gathered(b, setup.precision) for b in layer])
            for layer in layers
        ],
    )
    blocks = [bucket for layer in layers for bucket in layer]
    communication = _communication(root, blocks, setup.precision)
    return TorchShards(padded / numel - 1, at_rest, unsharded, communication)


def _piece(tensor: TensorShape, ranks: int) -> int:
    """Return elements of the first rank's rows."""
    rows = -(-(tensor.shape or (1,))[0] // ranks)
    return rows * prod(tensor.shape[1:])


def _gathered(bucket: DividedBucket, precision: StepDtypes) -> int:
    ranks = bucket.world_size
    return sum(
        ranks * _piece(tensor, ranks) * precision.compute(tensor.dtype)
        for tensor in bucket.shapes.tensors
    )


def _reduced(bucket: DividedBucket, precision: StepDtypes) -> int:
    """Return bytes of the input of its reduce-scatter."""
    ranks = bucket.world_size
    return sum(
        ranks * _piece(tensor, ranks) * precision.reduce(tensor.dtype).itemsize
        for tensor in bucket.shapes.tensors
        if tensor.trainable
    )


def _full_gradients(tensors: Iterable[TensorShape], precision: StepDtypes) -> int:
    """Return bytes of the gradients that autograd made, but for the largest."""
    sizes = [t.numel * precision.compute(t.dtype) for t in tensors if t.trainable]
    return sum(sizes) - max(sizes, default=0)


def _communication(
    root: DividedBucket | None, blocks: Sequence[DividedBucket], precision: StepDtypes
) -> int:
    """Return the worst moment of backward; the root's last gradient is that of its first tensor."""
    most = waiting = 0
    if root is not None:
        most = _full_gradients(root.shapes.tensors, precision) + _reduced(root, precision)
        waiting = sum(
            t.numel * precision.compute(t.dtype) for t in root.shapes.tensors[1:] if t.trainable
        )
    for bucket in blocks:
        own = _full_gradients(bucket.shapes.tensors, precision) + _reduced(bucket, precision)
        most = max(most, waiting + own)
    return most
