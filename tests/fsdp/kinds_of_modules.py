"""Modules that hold, take or return what sharding could miss."""

import dataclasses
from functools import partial

import torch
import torch.nn.functional as F
from lifecycle import WIDTH, Case, Layer, on_ranks
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from sharding import fully_shard
from sharding.fsdp.bucket import ShardedState
from sharding.fsdp.module_state import state_of


class ThreeLevels(Case):
    """A sharded module in a sharded module in a sharded module, with parameters on each level."""

    flags: tuple[bool | None, ...] = (None, None, None, None)

    def build(self) -> nn.Module:
        inner = nn.Sequential(Layer(), nn.Linear(WIDTH, WIDTH))
        return nn.Sequential(nn.Sequential(inner, nn.Linear(WIDTH, WIDTH)), Layer())

    def shard(self, model: nn.Module) -> None:
        parts = (model[0][0][0], model[0][0], model[0], model)
        for part, flag in zip(parts, self.flags, strict=True):
            fully_shard(part, reshard_after_forward=flag)


class ThreeLevelsOtherFlags(ThreeLevels):
    """The innermost keeps its weights, the root does not."""

    flags = (False, None, False, True)


@dataclasses.dataclass
class Output:
    """An output that torch's pytrees do not look into."""

    y: Tensor
    extra: object = None


class Opaque:
    """An output that nobody looks into."""

    def __init__(self, y: Tensor) -> None:
        self.y = y


class ReturnsDataclass(Layer):
    """Takes and returns a dataclass, with tensors in a mapping too."""

    def forward(self, x: Tensor | Output) -> Output:
        x = x.y if isinstance(x, Output) else x
        return Output(super().forward(x), ({"x": x}, 3))


class ReturnsOpaque(Layer):
    """Takes and returns an object."""

    def forward(self, x: Tensor | Opaque) -> Opaque:
        return Opaque(super().forward(x.y if isinstance(x, Opaque) else x))


class Dataclasses(Case):
    """Outputs whose tensors only a look into a dataclass finds."""

    layer: type[nn.Module] = ReturnsDataclass

    def build(self) -> nn.Module:
        return nn.Sequential(self.layer(), self.layer(), self.layer())

    def step(self, model: nn.Module, x: Tensor, step: int) -> Tensor:
        loss = model(x).y.square().mean()
        loss.backward()
        return loss


class Objects(Dataclasses):
    """Outputs whose tensors nobody finds."""

    layer = ReturnsOpaque


class KeywordsOnly(nn.Module):
    """Nested inputs and outputs; nothing is positional."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Layer(), Layer()

    def forward(self, *, batch: dict[str, object]) -> dict[str, object]:
        x = batch["x"][0]
        return {"y": [self.b(x=self.a(x=x))], "batch": batch}


class Keywords(Case):
    """Modules called with keywords only, and inputs that come back among the outputs."""

    def build(self) -> nn.Module:
        return KeywordsOnly()

    def step(self, model: nn.Module, x: Tensor, step: int) -> Tensor:
        loss = model(batch={"x": (x, None)})["y"][0].square().mean()
        loss.backward()
        return loss


class Fork(nn.Module):
    """Returns its input as it is, beside what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, self.linear(x)


class Join(nn.Module):
    """Adds the outputs of a `Fork`."""

    def forward(self, both: tuple[Tensor, Tensor]) -> Tensor:
        return both[0] + both[1]


class OutputIsInput(Case):
    """An output that is an input, and a sharded module without parameters."""

    def build(self) -> nn.Module:
        return nn.Sequential(Layer(), Fork(), Join(), nn.Identity(), Layer())


class FrozenRoot(Case):
    """The root's own parameters are frozen; below it, one layer is, and one is not."""

    def build(self) -> nn.Module:
        model = nn.Sequential(Layer(), nn.Linear(WIDTH, WIDTH), Layer())
        model[1].requires_grad_(False)
        model[2].requires_grad_(False)
        return model

    def shard(self, model: nn.Module) -> None:
        fully_shard(model[0])
        fully_shard(model[2])
        fully_shard(model)


class Recurrent(nn.Module):
    """nn.LSTM keeps a list of its weights beside its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH // 2, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x.view(-1, 2, WIDTH // 2))[0][:, 1]


class Mirror(nn.Module):
    """Computes with what it was assigned, not with its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if isinstance(value, nn.Parameter):
            self.__dict__["assigned"] = value

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.assigned


class OwnLists(Case):
    """Modules that keep their weights in a second place."""

    def build(self) -> nn.Module:
        return nn.Sequential(Layer(), Recurrent(), Mirror(), Recurrent())


class OddSizes(nn.Module):
    """Parameters without elements and without dimensions, and a frozen one of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.scalar, self.one = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.ones(1))
        self.codes = nn.Parameter(torch.arange(WIDTH), requires_grad=False)
        self.wide = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.scalar + self.one + self.empty.sum() + self.codes / WIDTH
        return (y * self.wide).to(x.dtype)


class Empty(nn.Module):
    """A bucket without any element."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.zeros(3, 0))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.empty.sum()


class SmallBuckets(Case):
    """Buckets with fewer elements than ranks, of several dtypes."""

    def build(self) -> nn.Module:
        return nn.Sequential(OddSizes(), Layer(), Empty(), OddSizes())


class ReturnsWeight(nn.Module):
    """Hands its weight out, as tied heads are made at times."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), self.linear.weight


class WeightsOutside(Case):
    """A weight that is used after its module has returned."""

    def build(self) -> nn.Module:
        return ReturnsWeight()

    def shard(self, model: nn.Module) -> None:
        fully_shard(model, reshard_after_forward=True)

    def step(self, model: nn.Module, x: Tensor, step: int) -> Tensor:
        y, weight = model(x)
        loss = (y @ weight).square().mean()
        loss.backward()
        return loss


class NestedInOneCall(Case):
    """One bucket for a module, a module inside of it, and another; parametrized weights."""

    def build(self) -> nn.Module:
        pair = nn.Sequential(Layer(), weight_norm(nn.Linear(WIDTH, WIDTH)))
        return nn.Sequential(pair, Layer())

    def shard(self, model: nn.Module) -> None:
        fully_shard([model[0], model[0][1], model[1]])
        fully_shard(model)


class SharedLayer(Case):
    """One sharded layer below two sharded modules."""

    def build(self) -> nn.Module:
        layer = Layer()
        return nn.Sequential(
            nn.Sequential(layer, nn.Linear(WIDTH, WIDTH)), nn.Sequential(nn.ReLU(), layer)
        )

    def shard(self, model: nn.Module) -> None:
        fully_shard(model[0][0])
        super().shard(model)


class CompiledLayers(Case):
    """torch.compile around layers that are sharded then; eager in one process."""

    def build(self) -> nn.Module:
        layers = [Layer(), Layer()]
        if on_ranks():
            layers[0].compile(backend="aot_eager")
            layers[1] = torch.compile(layers[1], backend="aot_eager")
        return nn.Sequential(*layers)


class ChangesInput(Layer):
    """Changes what it is given in place, in one of the ways that modules have."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = super().forward(x.tanh())
        if self.way == "relu":
            x = F.relu(x, inplace=True)
        elif self.way == "part":
            x[:, 0] = 0
        elif self.way == "view":
            x.view(-1).mul_(2)
        elif self.way == "data":
            x.detach().clamp_(-1, 1)
        elif self.way == "adds":
            x += y
        return super().forward(x.tanh()) * mask


class BlocksThatChangeInputs(nn.Module):
    """The caller goes on with what a block has changed, and gives all blocks one mask."""

    def __init__(self) -> None:
        super().__init__()
        self.mask = Layer()
        ways = ("relu", "part", "view", "data", "adds")
        self.blocks = nn.ModuleList(ChangesInput(way) for way in ways)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.sigmoid(self.mask(x))
        for block in self.blocks:
            if on_ranks() and x.requires_grad:
                x.register_hook(partial(self.has_left, block))
            h = x * 1
            x = (block(h, mask=mask) + h).tanh()
        return x

    def has_left(self, block: nn.Module, _: Tensor) -> None:
        """Backward of a block ends where its input begins, not at the end of all."""
        assert state_of(block).bucket.state is ShardedState.SHARDED


class InPlace(Case):
    """pytorch#124017, accelerate#1700: a block changes its input in place."""

    def build(self) -> nn.Module:
        return BlocksThatChangeInputs()

    def shard(self, model: nn.Module) -> None:
        for part in (model.mask, *model.blocks, model):
            fully_shard(part, **self.options)


KINDS = [
    ThreeLevels,
    ThreeLevelsOtherFlags,
    Dataclasses,
    Objects,
    Keywords,
    OutputIsInput,
    FrozenRoot,
    OwnLists,
    SmallBuckets,
    WeightsOutside,
    NestedInOneCall,
    SharedLayer,
    CompiledLayers,
    InPlace,
]
