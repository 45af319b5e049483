"""Calls that come in an order that sharding could be confused by."""

import pytest
import torch
from lifecycle import Case, Layer, on_ranks
from torch import Tensor, nn
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


WAYS = [
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
]
