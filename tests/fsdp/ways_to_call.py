"""Calls that come in an order that sharding could be confused by."""

import pytest
import torch
from lifecycle import WIDTH, Case, Layer, on_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.utils.checkpoint import checkpoint

from sharding import fully_shard


class Penalty(Case):
    """A penalty on the gradient of inputs (WGAN-GP), with another forward after it."""

    def step(self, model: nn.Module, x: Tensor, step: int) -> Tensor:
        x = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        loss = grad.square().mean()
        if step % 2:
            loss = loss + model(x * 2).square().mean()
        loss.backward()
        return loss


class Checkpointed(nn.Module):
    """Two layers, recomputed in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Layer(), Layer()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda y: self.b(self.a(y)), x, use_reentrant=False)


class PenaltyOfCheckpointed(Penalty):
    """The same, with activation checkpointing over sharded layers in sharded modules."""

    def build(self) -> nn.Module:
        return nn.Sequential(Checkpointed(), Checkpointed())

    def shard(self, model: nn.Module) -> None:
        for part in model:
            fully_shard(part.a)
            fully_shard(part.b)
        super().shard(model)


class SyncOfSome(Case):
    """Three micro-batches; which buckets average their gradients changes from one to the next."""

    def step(self, model: nn.Module, x: Tensor, step: int) -> Tensor:
        if on_ranks():
            model.set_requires_gradient_sync(False, recurse=False)
            model[1].set_requires_gradient_sync(False)
        total = torch.zeros(())
        for i in range(3):
            if on_ranks() and i == 2:
                model.set_requires_gradient_sync(True)
            y = model[2](model[0](x)) if i == 1 else model(x * (i + 1))
            loss = y.square().mean()
            loss.backward()
            total += loss.detach()
        return total


class KeepsGathered(Case):
    """Accumulation over two micro-batches without a gather between them."""

    def step(self, model: nn.Module, x: Tensor, step: int) -> Tensor:
        total = torch.zeros(())
        for i in range(2):
            if on_ranks():
                model.set_reshard_after_backward(i == 1)
                model.set_requires_gradient_sync(i == 1 or step % 2 == 1)
            loss = model(x * (i + 1)).square().mean()
            loss.backward()
            total += loss.detach()
        return total


class UnshardsByHand(Case):
    """Gathers that the script starts, some of which it never waits for."""

    def step(self, model: nn.Module, x: Tensor, step: int) -> Tensor:
        if on_ranks():
            handles = [model.unshard(async_op=True), model[1].unshard(async_op=True)]
            model[2].unshard()
            if step % 2:
                for handle in handles:
                    handle.wait()
        loss = model(x).square().mean()
        if on_ranks():
            model[0].unshard(async_op=True)
            model[1].unshard()
        loss.backward()
        return loss


class TwoRoots(Case):
    """A generator and a discriminator; each is a root, and one backward crosses both."""

    def build(self) -> nn.Module:
        return nn.ModuleList([nn.Sequential(Layer(), Layer()), nn.Sequential(Layer(), Layer())])

    def shard(self, model: nn.Module) -> None:
        super().shard(model[0])
        super().shard(model[1])

    def step(self, model: nn.Module, x: Tensor, step: int) -> Tensor:
        generator, discriminator = model
        fake = generator(x)
        discriminator.requires_grad_(step % 2 == 0)
        of_generator = discriminator(fake).square().mean()
        of_generator.backward()
        discriminator.requires_grad_(True)
        loss = discriminator(x).square().mean() - 0.1 * discriminator(fake.detach()).mean()
        loss.backward()
        return loss + of_generator


class ChildrenByThemselves(Case):
    """Layers called before their root ever was, and between its forwards."""

    def step(self, model: nn.Module, x: Tensor, step: int) -> Tensor:
        if step == 0:
            y = model[1](model[0](x)) + model(x)
        elif step == 1:
            y = model[2](x)
        else:
            y = model(model[1](x))
        loss = y.square().mean()
        loss.backward()
        return loss


class WeightsChangeBetweenCalls(Case):
    """What a call gathered is old after a step, also where the call or the forward raised."""

    ends_in_backward = False

    def shard(self, model: nn.Module) -> None:
        for i, part in enumerate(model):
            fully_shard(part, reshard_after_forward=False if i == 1 else None)
        fully_shard(model)

    def step(self, model: nn.Module, x: Tensor, step: int) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        failing = model[0].register_forward_hook(self.fail)
        with pytest.raises(ZeroDivisionError):
            model(x)
        failing.remove()
        with pytest.raises(RuntimeError, match="shape"):
            model[0](x[:, 1:])
        model[2](x)  # under autograd, without a backward
        with torch.no_grad():
            model[1](x)
            for p in self.parameters:
                p.mul_(1.1)
        for layer in model:
            loss = loss + layer(x).square().mean()
        return loss.detach()

    @staticmethod
    def fail(*_: object) -> None:
        raise ZeroDivisionError


class BackwardRaises(Case):
    """A backward that raises in the middle, and then again over the same graph, or a new one."""

    def step(self, model: nn.Module, x: Tensor, step: int) -> Tensor:
        hidden: list[Tensor] = []
        handle = model[0].register_forward_hook(lambda module, args, y: hidden.append(y))
        y = model(x)
        handle.remove()
        failing = hidden[0].register_hook(WeightsChangeBetweenCalls.fail)
        with pytest.raises(ZeroDivisionError):
            y.sum().backward(retain_graph=True)
        failing.remove()
        for p in self.parameters:
            p.grad = None
        loss = y.square().mean() if step % 2 else model(x).square().mean()
        loss.backward()
        return loss


class BetweenForwardAndBackward(Case):
    """While gathered weights are in place: an evaluation, zero_grad, freezing."""

    def shard(self, model: nn.Module) -> None:
        fully_shard(model[0])
        fully_shard(model)

    def step(self, model: nn.Module, x: Tensor, step: int) -> Tensor:
        model(x).sum().backward()
        loss = model(x).square().mean()
        with torch.no_grad():
            model(x * 2)
        loss2 = model(x * 3).square().mean()
        model.zero_grad(set_to_none=step % 2 == 0)
        if step == 2:
            model[1].requires_grad_(False)  # takes effect in the next forward
        (loss + loss2).backward()
        if step == 2:
            for p in model[1].parameters():
                p.grad = None
        return loss + loss2


class ReturnsView(Layer):
    """A layer that returns a view of what it computed."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).unsqueeze(1).squeeze(1)


class ViewChangedInPlace(Case):
    """The caller changes a returned view: its hook is not in the graph (pytorch#181832, #181850).

    One layer only, so that the next one has prefetched its weights when backward gets there.
    """

    def build(self) -> nn.Module:
        return nn.Sequential(Layer(), ReturnsView(), Layer())

    def step(self, model: nn.Module, x: Tensor, step: int) -> Tensor:
        y = model[1](model[0](x))
        y += x
        y[:, :3].mul_(2.0)
        loss = model[2](y).square().mean()
        loss.backward()
        return loss


class Keeps(Layer):
    """A layer that keeps what is inside of it, for the losses of `KeptTensor`."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(23))
        self.listed: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.kept = torch.tanh(self.inner(x) * self.scale)
        self.listed, self.named = [self.kept * 2], {"kept": self.kept * self.scale}
        self.inner.noted = self.kept * 3
        return x + self.outer(self.kept)


class KeptTensor(Case):
    """Losses of what a layer kept, with and without its output (pytorch#173709, #174829)."""

    frozen = False

    def build(self) -> nn.Module:
        model = nn.Sequential(Layer(), Keeps(), Layer())
        model[1].requires_grad_(not self.frozen)
        self.features: list[Tensor] = []
        model[1].inner.register_forward_hook(lambda _, args, output: self.features.append(output))
        return model

    def step(self, model: nn.Module, x: Tensor, step: int) -> Tensor:
        y, keeps = model(x), model[1]
        losses = [
            keeps.kept,
            keeps.listed[-1],
            keeps.named["kept"],
            self.features[-1],
            keeps.inner.noted,
        ]
        total = torch.zeros(())
        for i, kept in enumerate(losses):  # one after another, each over the same graph
            loss = kept.square().mean() + (y.square().mean() if i % 2 == step % 2 else 0.0)
            loss.backward(retain_graph=i < len(losses) - 1)
            total = total + loss.detach()
        return total


class KeptByFrozen(KeptTensor):
    """The same of a frozen layer, whose weights get no gradient that would tell (timm#2766)."""

    frozen = True


class CallsItself(Layer):
    """A layer with a method that calls it again, one call inside of the other."""

    def twice(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(torch.tanh(self(x)))) + self(x * 0.5)


class Nested(nn.Module):
    """Two such layers, in a model with such a method."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out = CallsItself(), CallsItself(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.b.twice(self.a.twice(x))

    def whole(self, x: Tensor) -> Tensor:
        return self.out(self(x))


class CallInCall(Case):
    """Registered methods that call their module again: the memory is there (pytorch#125394)."""

    def build(self) -> nn.Module:
        return Nested()

    def shard(self, model: nn.Module) -> None:
        for layer in (model.a, model.b):
            fully_shard(layer, reshard_after_forward=True)
            register_fsdp_forward_method(layer, "twice")
        fully_shard(model, reshard_after_forward=True)
        register_fsdp_forward_method(model, "whole")

    def step(self, model: nn.Module, x: Tensor, step: int) -> Tensor:
        loss = model.whole(x).square().mean()
        loss.backward()
        return loss


class Energy(nn.Module):
    """Forces as gradients of an energy, inside of forward, and layers of the root after it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Layer(), Layer())
        self.scale, self.after = nn.Parameter(torch.ones(WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, create_graph: bool) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (force,) = torch.autograd.grad(
                self.blocks(x).square().sum(), x, create_graph=create_graph
            )
        return self.after(force * self.scale)


class Forces(Case):
    """The root's weights stay while its forward runs (torchebm#246, agedi#87)."""

    def build(self) -> nn.Module:
        return Energy()

    def shard(self, model: nn.Module) -> None:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)

    def step(self, model: nn.Module, x: Tensor, step: int) -> Tensor:
        with torch.no_grad():
            evaluated = model(x, False).square().mean()
        loss = model(x, True).square().mean()
        loss.backward()
        return loss + evaluated


class WritesInForward(nn.Module):
    """A code book that forward averages into, and weights that it clips."""

    def __init__(self) -> None:
        super().__init__()
        self.book = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)
        self.clipped = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.book.mul_(0.9).add_(0.1)
            self.clipped.weight.data.clamp_(-0.2, 0.2)
        return self.clipped(x + self.book)


class WrittenInForward(Case):
    """What forward writes into weights is there after it (pytorch#137129, #129229)."""

    def build(self) -> nn.Module:
        return nn.Sequential(WritesInForward(), Layer(), WritesInForward())


class Reentrant(Case):
    """Checkpoints that run forward again inside of backward; one of a checkpoint's output."""

    def step(self, model: nn.Module, x: Tensor, step: int) -> Tensor:
        x = checkpoint(model[0], x.clone().requires_grad_(), use_reentrant=True)
        for _ in range(2):
            x = checkpoint(model[1], x, use_reentrant=True)
        loss = model[2](x).square().mean()
        loss.backward()
        return loss


class AllReentrant(Case):
    """The same, called by the root."""

    def build(self) -> nn.Module:
        class Reentrant(nn.Sequential):
            def forward(self, x: Tensor) -> Tensor:
                for layer in self:
                    x = checkpoint(layer, x, use_reentrant=True)
                return x

        return Reentrant(Layer(), Layer(), Layer())

    def step(self, model: nn.Module, x: Tensor, step: int) -> Tensor:
        return super().step(model, x.clone().requires_grad_(), step)


class OtherOrders(nn.ModuleList):
    """A layer that runs twice, one that is left out at times, and a tied pair in the root."""

    def __init__(self) -> None:
        super().__init__([Layer(), Layer(), Layer()])
        self.head, self.forwards = nn.Linear(WIDTH, WIDTH), 0
        self.second_head = nn.Linear(WIDTH, WIDTH)
        self.second_head.weight = self.head.weight

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        x = self[1](self[1](self[0](x)))
        x = x if self.forwards % 2 else self[2](x)
        return self.head(torch.relu(self.second_head(x)))


class CalledInOtherOrders(Case):
    """What the first forward says of the order is not true of all."""

    def build(self) -> nn.Module:
        return OtherOrders()

    def shard(self, model: nn.Module) -> None:
        for layer in (model[0], model[1], model[2], model):
            fully_shard(layer, **self.options)


class WholeCheckpointed(Case):
    """One checkpoint over all sharded layers; parts are frozen for a step or two."""

    def step(self, model: nn.Module, x: Tensor, step: int) -> Tensor:
        model[1].inner.weight.requires_grad_(step not in (1, 2))
        model[2].requires_grad_(step != 3)
        loss = checkpoint(model, x, use_reentrant=False).square().mean()
        loss.backward()
        return loss


class EvaluatesBetween(Case):
    """Forwards without a backward, and two backwards over one graph."""

    def step(self, model: nn.Module, x: Tensor, step: int) -> Tensor:
        with torch.no_grad():
            model(x)
        model(x)
        with torch.inference_mode():
            model(x)
        y = model(x)
        y.square().mean().backward(retain_graph=True)
        y.mean().backward()
        return y.square().mean() + y.mean()


WAYS = [
    Case,
    Penalty,
    PenaltyOfCheckpointed,
    SyncOfSome,
    KeepsGathered,
    UnshardsByHand,
    TwoRoots,
    ChildrenByThemselves,
    WeightsChangeBetweenCalls,
    BackwardRaises,
    BetweenForwardAndBackward,
    ViewChangedInPlace,
    KeptTensor,
    KeptByFrozen,
    CallInCall,
    Forces,
    WrittenInForward,
    Reentrant,
    AllReentrant,
    CalledInOtherOrders,
    WholeCheckpointed,
    EvaluatesBetween,
]
