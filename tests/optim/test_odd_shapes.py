"""Parameters that are smaller than the ranks, of many dimensions, or neither matrix nor vector."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import vfsdp_optim
from ranks import assert_as_one_process, run_ranks
from sharding import fully_shard
from small_models import full, full_gradients, set_gradients
from vfsdp_optim import AdamW, Muon


class Holder(nn.Module):
    """Parameters of given shapes."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.p = nn.ParameterList(
            nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes
        )

    def forward(self) -> None:
        raise NotImplementedError


def step_and_resume(shapes: list[tuple[int, ...]]) -> tuple[list[Tensor], list[int]]:
    """Three steps, of which the last by a second optimizer that loads the first one's state."""
    model = Holder(shapes)
    if dist.is_initialized():
        fully_shard(model)
    parameters = list(model.parameters())

    def build() -> Muon:
        matrices = [p for p in parameters if p.dim() == 2]
        vectors = [p for p in parameters if p.dim() != 2]
        adamw = {"params": vectors, "algorithm": "adamw", "lr": 0.1, "weight_decay": 0.5}
        return Muon([{"params": matrices}, adamw], lr=0.1, weight_decay=0.5)

    optimizer = build()
    for step in range(3):
        set_gradients(parameters, full_gradients(parameters, step))
        if step == 2:
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer = build()
            optimizer.load_state_dict(saved)
        optimizer.step()
        if dist.is_initialized():
            nn.utils.clip_grad_norm_(parameters, 1.0)
    states = [v for p in parameters for v in optimizer.state[p].values()]
    held = [p.to_local().numel() if dist.is_initialized() else p.numel() for p in parameters]
    return [full(value) for value in (*parameters, *states)], held


@pytest.mark.parametrize(
    ("world_size", "shapes"),
    [
        (5, [(18, 6), (1, 6), (9,), ()]),
        (3, [(1, 64), (64, 1), (72, 16), (1, 1)]),
        (4, [(13, 8), (3, 8), (1, 600), (600, 1), (600,)]),
    ],
)
def test_fewer_rows_than_ranks_and_dimensions_that_do_not_divide(world_size, shapes):
    """dion#74, dion#83, AReno#512, Automodel#2997, optimizers#23; speculators#821, prime-rl#3437.

    Empty pieces crashed or left the other ranks waiting; [1, N] crashed only when sharded.
    """
    expected, _ = step_and_resume(shapes)
    results = run_ranks(step_and_resume, world_size, shapes)
    for actual, _ in results:
        assert len(actual) == len(expected)
        for a, b in zip(actual, expected, strict=True):
            assert a.shape == b.shape
            assert torch.equal(a, b)
    totals = [sum(held) for _, held in results]
    assert sum(totals) == sum(torch.Size(shape).numel() for shape in shapes)
    assert any(0 in held for _, held in results), "no piece is empty"
    assert min(totals) == 0 or world_size < 5, "no rank holds nothing at all"


def step_of_a_row() -> Tensor:
    model = Holder([(1, 700)])
    fully_shard(model)
    (p,) = model.parameters()
    before = full(p)
    set_gradients([p], [torch.arange(700.0).view(1, 700)])
    Muon([p], lr=1.0, weight_decay=0.0).step()
    return full(p) - before


def test_update_of_one_row_is_the_normalized_gradient_times_the_polynomial():
    """cosmos-rl#11: pieces of a row were normalized each for itself."""
    gradient = torch.arange(700.0).view(1, 700)
    factor = 1.0
    for _ in range(5):
        factor = 3.4445 * factor - 4.7750 * factor**3 + 2.0315 * factor**5
    expected = -factor * gradient / gradient.norm()
    for moved in run_ranks(step_of_a_row, 3):
        torch.testing.assert_close(moved, expected, atol=1e-5, rtol=1e-4)


class Convolutions(nn.Module):
    """Weights of 3 to 5 dimensions, in channels_last, grouped; a bias and a gain."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Conv2d(3, 16, 3)
        self.grouped = nn.Conv2d(6, 8, 3, groups=2)
        self.line = nn.Conv1d(5, 7, 6, bias=False)
        self.depthwise = nn.Conv2d(4, 4, 3, groups=4, bias=False)
        self.gain = nn.Parameter(torch.ones(16, 1, 1))

    def forward(self) -> None:
        raise NotImplementedError


def step_convolutions(memory: str, world: bool) -> tuple[list[Tensor], list[str]]:
    torch.manual_seed(0)
    model = Convolutions()
    if memory == "channels_last":
        model = model.to(memory_format=torch.channels_last)
    strides = [p.stride() for p in model.parameters()]
    if world:
        fully_shard(model)
    groups = vfsdp_optim.param_groups(model, adamw={"lr": 0.1})
    routes = [route.algorithm for route in groups.routes]
    optimizer = Muon(groups, lr=0.1)
    for step in range(2):
        gradients = full_gradients(model.parameters(), step)
        set_gradients(model.parameters(), gradients)
        if memory == "gradients":  # the same values in other strides
            for p in model.parameters():
                if not world and p.dim() > 1:
                    p.grad = p.grad.mT.contiguous().mT
        optimizer.step()
    if not world:
        assert [p.stride() for p in model.parameters()] == strides
    return [full(p) for p in model.parameters()], routes


@pytest.mark.parametrize("memory", ["contiguous", "channels_last", "gradients"])
def test_convolutions_in_any_memory_format_are_updated_as_matrices(memory):
    """Moonlight#37, pytorch#166209, ultralytics#25447, ultralytics#26013: view errors."""
    expected, routes = step_convolutions("contiguous", False)
    assert routes == ["adamw", "muon", "adamw", "muon", "adamw", "muon", "adamw"]
    here, _ = step_convolutions(memory, False)
    ranks = [weights for weights, _ in run_ranks(step_convolutions, 3, memory, True)]
    for weights in (here, *ranks):
        for weight, value in zip(weights, expected, strict=True):
            assert torch.equal(weight.contiguous(), value)


def step_mixed_kinds(foreach: bool | None) -> list[Tensor]:
    """One AdamW group of a sharded weight, a plain bias and a sharded scale."""
    torch.manual_seed(0)
    model = nn.Linear(30, 20)
    model.scale = nn.Parameter(torch.ones(20))
    if dist.is_initialized():
        fully_shard(model, ignored_params={model.bias})
        assert not isinstance(model.bias, type(model.weight))
    parameters = [model.weight, model.bias, model.scale]
    optimizer = AdamW(parameters, lr=0.1, foreach=foreach)
    for step in range(3):
        set_gradients(parameters, full_gradients(parameters, step))
        nn.utils.clip_grad_norm_(parameters, 1e9)
        optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    assert not any(full(p.grad).any() for p in parameters)
    return [full(p) for p in parameters]


@pytest.mark.parametrize("foreach", [True, False, None])
def test_plain_and_sharded_parameters_step_in_one_group(foreach):
    """pytorch#183207, optimizers#79, NeMo-RL#151: foreach of mixed kinds of tensors."""
    assert_as_one_process(step_mixed_kinds, [3], foreach, atol=0, rtol=0)


def momentum_after_a_step(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    model = Holder([(8, 5), (30, 40)]).to(dtype)
    fully_shard(model)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    optimizer = Muon(model.parameters(), lr=0.0, weight_decay=0.0, momentum=0.9, nesterov=False,
                     ns_dtype=dtype)  # fmt: skip
    set_gradients(model.parameters(), [torch.ones(p.shape) for p in model.parameters()])
    optimizer.step()
    assert all((full(p.grad) == 1).all() for p in model.parameters())
    return [full(optimizer.state[p]["momentum_buffer"]) for p in model.parameters()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_momentum_without_nesterov_is_not_orthogonalized_in_place(dtype):
    """pytorch#194664, pytorch#190597: the cast to the same dtype was an alias of the momentum."""
    expected = torch.zeros(1, dtype=dtype).lerp(torch.ones(1, dtype=dtype), 1 - 0.9)
    for momenta in run_ranks(momentum_after_a_step, 2, dtype):
        for momentum in momenta:
            assert torch.equal(momentum, expected.expand(momentum.shape))
