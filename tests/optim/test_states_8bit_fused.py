"""The fused update of 8-bit AdamW, with the CPU operator in the place of the CUDA one; padding."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from vfsdp_optim import AdamW, Precision
from vfsdp_optim import fused_adam as fused_module
from vfsdp_optim.fused_adam import can_fuse, fused_adam
from vfsdp_optim.states.scratch import Scratch
from vfsdp_optim.step.runs import Run


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_8bit_fused_kernel_is_called_as_the_plain_update(dtype):
    """The CPU operator of bitsandbytes has the arguments of the CUDA one, and rounds less well."""
    torch.manual_seed(0)
    start = torch.randn(20, 300).to(dtype)
    start[1, :10] = 0  # padding
    params = [nn.Parameter(start.clone()) for _ in range(2)]
    plain, fused = (AdamW([p], lr=0.01, weight_decay=0.1, states="8bit") for p in params)
    for step in range(1, 6):
        grad = torch.randn(20, 300).to(dtype)
        grad[1, :10] = 0
        params[0].grad = grad.clone()
        plain.step()
        (span,) = fused._current_working_set().spans
        (member,) = span.members
        run = Run(0, [member], member.open(), grad.view(-1), member.states, ((300, 310),), step)
        assert not can_fuse(run)  # on the CPU
        options = dict(lr=0.01, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
        fused_adam(run, Scratch(), **options)
    difference = (params[0] - params[1]).detach().norm() / (params[0] - start).detach().norm()
    assert float(difference) < 0.05
    state = fused.state[params[1]]
    assert int(state["exp_avg_sq.codes"].min()) == 1
    padding = member.states["exp_avg"].codes[6000:]  # of the last block
    assert padding.numel() == 144
    assert bool((padding == 127).all())
    assert bool((state["exp_avg.codes"].view(-1)[300:310] == 127).all())
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setitem(sys.modules, "bitsandbytes", None)  # as where it is not installed
        kept = params[1].clone()
        with pytest.raises(
            ImportError, match=r"^8-bit states of AdamW on CUDA .*install bitsandby"
        ):
            fused_adam(run, Scratch(), **options)
        assert torch.equal(params[1], kept)
    broken = Run(0, [member], member.open(), grad.view(-1)[:-1], member.states, (), 6)
    with pytest.raises(RuntimeError, match=r"expected contiguous tensors .*other gradient"):
        fused_adam(broken, Scratch(), **options)


@pytest.mark.parametrize(("states", "possible"), [("8bit", True), ("32bit", False)])
def test_8bit_fused_kernel_does_runs_on_cuda_with_a_master_copy_or_without(states, possible):
    for master in (False, True):
        param = nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
        optimizer = AdamW([param], states=Precision(states, master_weights=master))
        (span,) = optimizer._current_working_set().spans
        (member,) = span.members
        run = SimpleNamespace(
            device=torch.device("cuda"), states=member.states, skip=None, members=[member],
            param=param,
        )  # fmt: skip
        assert can_fuse(run) is possible


def run_with_padding(optimizer: AdamW, grad: Tensor, step: int) -> Run:
    """A run as of two parameters with padding 300:320 between them, zero as in a flat buffer."""
    (span,) = optimizer._current_working_set().spans
    (member,) = span.members
    for tensor in (grad.view(-1), member.open()):
        tensor[300:320].zero_()
    return Run(0, [member], member.open(), grad.view(-1), member.states, ((300, 320),), step)


def apply_plainly(optimizer: AdamW, run: Run) -> None:
    (group,) = optimizer.param_groups
    optimizer._algorithms["adamw"].update_run(group, run, Scratch())


def apply_fused(optimizer: AdamW, run: Run) -> None:
    (group,) = optimizer.param_groups
    fused_adam(run, Scratch(), **{k: group[k] for k in ("lr", "betas", "eps", "weight_decay")})


@pytest.mark.parametrize("apply", [apply_plainly, apply_fused])
@torch.no_grad()
def test_8bit_padding_stays_zero_beside_a_nan_and_without_eps(apply):
    param = nn.Parameter(torch.ones(64, 64))
    for eps, bad in ((1e-8, torch.nan), (1e-8, torch.inf), (0.0, 1.0)):
        optimizer = AdamW([param], states="8bit", eps=eps)
        for step in (1, 2, 3):
            grad = torch.ones(64, 64)
            grad.view(-1)[290] = bad
            apply(optimizer, run_with_padding(optimizer, grad, step))
        flat, state = param.view(-1), optimizer.state[param]
        assert not flat[300:320].any()
        padding = state["exp_avg.codes"].view(-1)[300:320]
        assert bool((padding == 127).all())
        # The fault is seen, and stays in its block.
        finite = state["exp_avg.absmax"].isfinite()
        assert finite.tolist() == [True, bad == 1.0, *[True] * 14]
        assert bool(flat[:256].isfinite().all() & flat[512:].isfinite().all())
        assert bool(flat[320:512].isfinite().any()) == (bad == 1.0)
        param.fill_(1.0)


@torch.no_grad()
def test_8bit_fused_kernel_is_called_in_pieces_that_it_can_count(monkeypatch):
    results = []
    for longest in (1 << 30, 512):
        monkeypatch.setattr(fused_module, "_LONGEST", longest)
        param = nn.Parameter(torch.ones(50, 97))
        optimizer = AdamW([param], states="8bit")
        for step in (1, 2, 3):
            grad = torch.randn(50, 97, generator=torch.Generator().manual_seed(step))
            apply_fused(optimizer, run_with_padding(optimizer, grad, step))
        results.append([param, *optimizer.state[param].values()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
