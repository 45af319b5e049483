"""Optimizers with one planted fault each: right on full tensors, wrong on shards."""

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sharding.planning.structure import Elementwise, Structure
from sharding.tensor.placement import RaggedShard
from sharding.tensor.ragged_tensor import RaggedDTensor
from vfsdp_optim.adamw import AdamWAlgorithm
from vfsdp_optim.algorithm import Algorithm
from vfsdp_optim.muon import MuonAlgorithm
from vfsdp_optim.newton_schulz import orthogonalize
from vfsdp_optim.optimizer import StructuredOptimizer
from vfsdp_optim.shampoo import ShampooAlgorithm
from vfsdp_optim.states.scratch import Scratch
from vfsdp_optim.step.nonfinite import Skip
from vfsdp_optim.step.runs import Run
from vfsdp_optim.step.sharded_units import ShardedMatrices


def make_groups(module: nn.Module, matrices: str) -> list[dict[str, Any]]:
    """Matrices to the algorithm that is named, the rest to AdamW."""
    groups: dict[str, list[Any]] = {matrices: [], "adamw": []}
    for name, param in module.named_parameters():
        groups[matrices if param.dim() == 2 else "adamw"].append((name, param))
    options = dict(lr=0.1, weight_decay=0.5)
    return [{"params": p, "algorithm": a, **options} for a, p in groups.items() if p]


MUTANTS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {}


def make_mutant(name: str, module: nn.Module) -> torch.optim.Optimizer:
    """Build the optimizer with the fault `name`."""
    return MUTANTS[name](module)


def plant(cls: type) -> type:
    """Register a mutant: an optimizer, or an algorithm in the place of the one it derives from."""

    def make(module: nn.Module) -> torch.optim.Optimizer:
        if issubclass(cls, torch.optim.AdamW):
            return cls(module.named_parameters(), lr=0.1, weight_decay=0.5)
        kind = cls if issubclass(cls, StructuredOptimizer) else StructuredOptimizer
        algorithms: list[Algorithm] = [MuonAlgorithm(), AdamWAlgorithm()]
        if issubclass(cls, KeepsFactors):
            algorithms[0] = ShampooAlgorithm(block_size=(4, 8), precondition_frequency=2)
        if issubclass(cls, Algorithm):
            algorithms = [cls() if isinstance(cls(), type(a)) else a for a in algorithms]
        alone = issubclass(cls, AdamWAlgorithm | OnlyAdamW)
        groups = make_groups(module, "adamw" if alone else algorithms[0].name)
        return kind(groups, *algorithms, **getattr(cls, "options", {}))

    MUTANTS[cls.__name__] = make
    return cls


class OnlyAdamW(StructuredOptimizer):
    """Is not tried with matrices that travel: ranks that decide differently would hang."""


class KeepsFactors(StructuredOptimizer):
    """Has Shampoo for matrices, and so states of units, each on one rank."""

    def factors(self) -> Iterator[tuple[dict[str, Any], str, RaggedDTensor]]:
        """Yield those that there are on shards: the state they stand in, their key, themselves."""
        for state in self._states.values():
            for key, value in list(state.items()):
                if key.startswith("left.") and isinstance(value, RaggedDTensor):
                    yield state, key, value


@plant
class NewtonSchulzOnTheLocalShard(MuonAlgorithm):
    """Each rank orthogonalizes the rows it holds: DeepSpeed#7807, Moonlight#27."""

    def structure(self, group: dict[str, Any], shape: torch.Size) -> Structure:
        return Elementwise()

    def update_run(self, group: dict[str, Any], run: Run, scratch: Scratch) -> None:
        super().update_run(group, run, scratch)
        for member in run.members:
            cols = member.param.shape[1]
            start = member.start - run.members[0].start
            rows = slice(start, start + member.numel // cols * cols)
            update = orthogonalize(run.states["momentum_buffer"].tensor[rows].view(-1, cols))
            run.param[rows].sub_(update.reshape(-1), alpha=group["lr"])


@plant
class ScaleFromTheLocalShape(MuonAlgorithm):
    """lr * sqrt(rows / cols) with the rows of a shard: Muon on FSDP1 with flattened shards."""

    def factor(self, group: dict[str, Any], rows: int, cols: int) -> float:
        return super().factor(group, -(-rows // dist.get_world_size()), cols)


@plant
class MomentumNormalisedInPlace(MuonAlgorithm):
    """The input of Newton-Schulz is divided by its norm in the memory of the momentum:
    pytorch#190597; here by the norm of the piece."""

    def write_input(self, group, grad: Tensor, states: dict[str, Tensor], out: Tensor) -> None:
        buffer = states["momentum_buffer"]
        buffer.div_(buffer.norm().clamp(min=1e-7))
        out.copy_(buffer)


@plant
class DecayOncePerParameterOfTheRun(MuonAlgorithm):
    """Weight decay is applied to the whole run for each parameter in it."""

    def update_run(self, group: dict[str, Any], run: Run, scratch: Scratch) -> None:
        super().update_run(group, run, scratch)
        for _ in run.members[1:]:
            run.param.mul_(1 - group["lr"] * group["weight_decay"])


@plant
class QuantizationBlocksFromTheShardsStart(MuonAlgorithm):
    """Momentum is rounded in blocks of 64 that are counted from where the shard starts."""

    def update_run(self, group: dict[str, Any], run: Run, scratch: Scratch) -> None:
        super().update_run(group, run, scratch)
        for block in run.states["momentum_buffer"].tensor.split(64):
            scale = block.abs().max().clamp(min=1e-20) / 127
            block.copy_((block / scale).round() * scale)


class MutantMatrices(StructuredOptimizer):
    """Puts `matrices` in the place of the part that exchanges matrices."""

    matrices: type[ShardedMatrices]

    def _current_matrices(self, layout: Any) -> Any:
        parts = super()._current_matrices(layout)
        for part in parts:
            if isinstance(part, ShardedMatrices):
                part.__class__ = self.matrices
        return parts


class _Forgets(ShardedMatrices):
    def _compute(self, unit: int, grads: Any, skip: Skip) -> None:
        if unit != max(max(wave) for wave in self.plan.waves):
            super()._compute(unit, grads, skip)


@plant
class OwnerForgetsOneMatrix(MutantMatrices):
    """The last owned matrix returns as it came."""

    matrices = _Forgets


class _Reversed(ShardedMatrices):
    def _compute(self, unit: int, grads: Any, skip: Skip) -> None:
        job = self._jobs[unit]
        if grads[job.member.number] is None:
            return
        parts = [part for _, part in self._exchange.parts(unit)]
        update = job.update(torch.cat(parts[::-1]), self._scratch, skip)
        for start, result in self._exchange.results(unit):
            result.copy_(update[start : start + result.numel()])


@plant
class PiecesInTheOrderOfArrival(MutantMatrices):
    """The owner puts the pieces of a matrix together in another order than they are cut."""

    matrices = _Reversed


class _Stale(ShardedMatrices):
    def step(self, grads: Any, skip: Skip, absent: Any) -> None:
        last = getattr(self, "last", grads)
        self.last = [None if grad is None else grad.clone() for grad in grads]
        use = [old if new is not None and old is not None else new
               for old, new in zip(last, grads, strict=True)]  # fmt: skip
        super().step(use, skip, absent)


@plant
class GradientsOfTheStepBefore(MutantMatrices):
    """The buffers of the exchange are filled one step too early."""

    matrices = _Stale


class _KeepsOwnPart(ShardedMatrices):
    def _apply(self, wave: int, grads: Any, skip: Skip) -> None:
        self._exchange.wait_return(wave)
        mine = set(self._exchange.owned_units(wave))
        for unit in self._exchange.held_units(wave):
            job = self._jobs[unit]
            if unit not in mine and grads[job.member.number] is not None:
                job.apply(job.member.open(), self._exchange.update(unit), skip)


@plant
class OwnerDoesNotUpdateItsOwnPiece(MutantMatrices):
    """What an owner holds itself of a matrix is left as it was."""

    matrices = _KeepsOwnPart


@plant
class StepPerRun(AdamWAlgorithm):
    """Steps are counted by calls of the update, and there is one for each run, not parameter."""

    def update_run(self, group: dict[str, Any], run: Run, scratch: Scratch) -> None:
        self.count = getattr(self, "count", 0) + 1
        kept = Run(run.group, run.members, run.param, run.grad, run.states, run.gaps, self.count)
        super().update_run(group, kept, scratch)


@plant
class DividedByTheLocalMean(AdamWAlgorithm):
    """The gradient is scaled by the root mean square of what this rank holds of it: the wrong
    divisor of relative-step optimizers such as Adafactor."""

    def update_run(self, group: dict[str, Any], run: Run, scratch: Scratch) -> None:
        for member in run.members:
            start = member.start - run.members[0].start
            piece = run.grad[start : start + member.numel]
            piece.div_(piece.square().mean().sqrt().clamp(min=1e-3))
        super().update_run(group, run, scratch)


@plant
class TrustRatioOfTheShard(AdamWAlgorithm):
    """LAMB's ratio of norms, of the pieces on one rank."""

    def update_run(self, group: dict[str, Any], run: Run, scratch: Scratch) -> None:
        ratio = run.param.norm() / run.grad.norm().clamp(min=1e-6)
        run.grad.mul_(ratio.clamp(0.1, 10))
        super().update_run(group, run, scratch)


@plant
class FusedKernelOnOddCuts(AdamWAlgorithm):
    """torch's fused AdamW rounds otherwise in the last elements of a tensor than inside."""

    def update_run(self, group: dict[str, Any], run: Run, scratch: Scratch) -> None:
        beta1, beta2 = group["betas"]
        torch._fused_adamw_(
            [run.param], [run.grad], *[[s.tensor] for s in run.states.values()], [],
            [torch.tensor(run.step)], lr=group["lr"], beta1=beta1, beta2=beta2,
            weight_decay=group["weight_decay"], eps=group["eps"], amsgrad=False, maximize=False,
        )  # fmt: skip


@plant
class PaddingNotZero(AdamWAlgorithm):
    """A floor under the second moment is written to the padding too."""

    def update_run(self, group: dict[str, Any], run: Run, scratch: Scratch) -> None:
        super().update_run(group, run, scratch)
        run.states["exp_avg_sq"].tensor.clamp_(min=1e-12)


@plant
class NoiseOfTheRank(AdamWAlgorithm):
    """Stochastic rounding draws from a generator that each rank seeds for itself."""

    def update_run(self, group: dict[str, Any], run: Run, scratch: Scratch) -> None:
        super().update_run(group, run, scratch)
        generator = torch.Generator().manual_seed(dist.get_rank())
        run.param.add_(torch.rand(run.param.shape, generator=generator), alpha=1e-6)
        run.clear_gaps()


@plant
class SkipOnOneRank(OnlyAdamW):
    """Only the rank that has the infinite gradient leaves the step out: pytorch's GradScaler on
    shards before found_inf was reduced."""

    options: ClassVar[dict[str, Any]] = dict(on_nonfinite="skip")

    def _decide(self, layout: Any, grads: Any) -> Skip:
        steps = layout.steps.tolist()
        pieces = (piece for runs in layout.runs for piece in runs.gradients(grads, steps))
        return self._nonfinite.decide(pieces, [])


@plant
class MissingGradientIsZero(StructuredOptimizer):
    """The reduced buffer has zeros where a parameter had no gradient; decay and momentum go on."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None and param.requires_grad and isinstance(param, RaggedDTensor):
                    param.grad = torch.zeros_like(param)
        return super().step(closure)


class LoadsWrongly(StructuredOptimizer):
    """Changes a checkpoint before it is loaded."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state = {
            index: {key: self.changed(key, value) for key, value in of_param.items()}
            for index, of_param in state_dict["state"].items()
        }
        super().load_state_dict({**state_dict, "state": state})

    def changed(self, key: str, value: Any) -> Any:
        """Return the wrong value."""
        raise NotImplementedError


@plant
class StateByPosition(LoadsWrongly):
    """A piece takes the elements of the saved state that lie one further."""

    def changed(self, key: str, value: Any) -> Any:
        if not isinstance(value, RaggedDTensor):
            return value
        local = value.to_local().roll(1)
        return RaggedDTensor.from_local(local, value.device_mesh, value.placement, value.shape)


@plant
class StepCountStartsAgain(LoadsWrongly):
    """Bias correction begins at 1 after a load."""

    def changed(self, key: str, value: Any) -> Any:
        return torch.zeros(()) if key == "step" else value


class KeepsAnOption(StructuredOptimizer):
    """A loaded optimizer keeps an option it was built with."""

    option: ClassVar[str]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        built_with = [group[self.option] for group in self.param_groups]
        super().load_state_dict(state_dict)
        for group, value in zip(self.param_groups, built_with, strict=True):
            group[self.option] = value


@plant
class LearningRateOfTheConstructor(KeepsAnOption):
    """The learning rate, which schedules change."""

    option = "lr"


@plant
class WeightDecayOfTheConstructor(KeepsAnOption):
    """A load brings the learning rate back and not what was built with another value."""

    option = "weight_decay"


class Keeps(torch.optim.AdamW):
    """Updates rightly and keeps something wrong on shards, which a later step would read."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    grad, ranked = param.grad, isinstance(param, RaggedDTensor)
                    self.keep(group, param, grad.to_local() if ranked else grad, ranked)
        return loss

    def keep(self, group: dict[str, Any], param: Tensor, grad: Tensor, ranked: bool) -> None:
        """Keep it; `grad` is what this rank has, `ranked` whether that is a piece."""
        raise NotImplementedError


@plant
class NormsOfPiecesInAList(Keeps):
    """A history of gradient norms, as ZClip and AdaGC keep one, of the pieces on one rank."""

    def keep(self, group, param: Tensor, grad: Tensor, ranked: bool) -> None:
        old = self.state[param].get("norms", [])
        self.state[param]["norms"] = [*old, float(grad.norm())][-2:]


@plant
class CountBesideParameters(Keeps):
    """Counts updates for all parameters, of those of which this rank has a piece."""

    def keep(self, group, param: Tensor, grad: Tensor, ranked: bool) -> None:
        count = self.state["all"].get("count", 0)
        self.state["all"] = {"count": count + (grad.numel() > 0)}


@plant
class FlagOfTheRank(Keeps):
    """A parameter counts as seen where a piece of its gradient is not zero."""

    def keep(self, group, param: Tensor, grad: Tensor, ranked: bool) -> None:
        self.state[param]["seen"] = bool(grad.any())


@plant
class SeedOfTheRank(Keeps):
    """A seed of 64 bits, in which ranks differ by less than a float can tell."""

    def keep(self, group, param: Tensor, grad: Tensor, ranked: bool) -> None:
        self.state[param]["seed"] = 2**60 + (dist.get_rank() if ranked else 0)


@plant
class CountInTheGroup(Keeps):
    """Steps are counted in the group, as schedule-free optimizers do, once for each piece."""

    def keep(self, group, param: Tensor, grad: Tensor, ranked: bool) -> None:
        group["k"] = group.get("k", 0) + (grad.numel() > 0)


@plant
class FactorsAreLostOnResume(KeepsFactors):
    """torchtitan#811: keys that name other ranks are passed over in silence."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for _, _, factor in self.factors():
            factor.zero_()


@plant
class FactorsStartAnewWhenAGroupComes(KeepsFactors):
    """What computes units is made again for the new group, and allocates their states again."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for _, _, factor in self.factors():
            factor.zero_()


@plant
class OwnerMovesWithoutItsFactors(KeepsFactors):
    """Owners are dealt again when a group comes; the next rank finds zeros where factors were."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for state, key, factor in self.factors():
            mesh, numel = factor.device_mesh, factor.numel()
            held = [stop - start for start, stop in factor.placement.ranges(numel)]
            after = held[-1:] + held[:-1]
            placement = RaggedShard(range(factor.dim()), after, 1)
            zeros = torch.zeros(after[mesh.get_local_rank()])
            state[key] = RaggedDTensor.from_local(zeros, mesh, placement, factor.shape)


@plant
class SkippedStepsResetFactors(KeepsFactors):
    """A step that is left out undoes parameters, and gives back factors as they were made."""

    options: ClassVar[dict[str, Any]] = dict(on_nonfinite="skip")

    def step(self, closure: Any = None) -> Any:
        before = self.skipped_steps
        loss = super().step(closure)
        if self.skipped_steps > before:
            for _, _, factor in self.factors():
                factor.zero_()
        return loss
