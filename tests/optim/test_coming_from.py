"""docs/coming-from.md: what other Muons do by default, written out, and the page's call."""

import math
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from vfsdp_optim import Muon, param_groups

PAGE = (Path(__file__).parents[2] / "docs" / "coming-from.md").read_text()
_ROWS = [[cell.strip() for cell in line.split("|")] for line in PAGE.splitlines()]
MUONS = {row[1]: row for row in _ROWS if "`Muon(" in " ".join(row[6:])}
DION = eval(re.findall(r"```python\n  DION = (.*?)```", PAGE, re.DOTALL)[0].strip())
KELLER = [(3.4445, -4.7750, 2.0315)] * 5
QUINTIC = [(4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037),
           (2.8769, -3.1427, 1.2046), (2.8366, -3.0525, 1.2012)]  # fmt: skip
POLAR = [(8.1566, -22.4833, 15.8788), (4.0429, -2.8089, 0.5), (3.8917, -2.7725, 0.5061),
         (3.2858, -2.3681, 0.4645), (2.3465, -1.7098, 0.4232)]  # fmt: skip

# Of the way that a weight moves: without the 1.02 of Polar Express it is off by 5e-3, while its
# coefficients, rounded to 4 digits, bring 7e-4, and fp32 in Newton-Schulz 3e-5.
NEAR = 1e-3


def floored(m: int, n: int) -> float:
    return max(1.0, m / n) ** 0.5


def rms(m: int, n: int) -> float:
    return 0.2 * max(m, n) ** 0.5


# lr, decay, whether momentum is a sum, Nesterov, what lr is multiplied by, the steps of
# Newton-Schulz, what the norm is multiplied by; and lr, betas, eps and decay of AdamW.
KELLERS_ADAM = (3e-4, (0.9, 0.95), 1e-10, 0.0)
PEERS = {
    "`torch.optim.Muon`": (1e-3, 0.1, False, True, floored, KELLER, 1.0, None),
    "Keller Jordan's Muon": (0.02, 0.0, False, True, floored, KELLER, 1.0, KELLERS_ADAM),
    "Moonlight": (1e-3, 0.1, True, True, rms, KELLER, 1.0, (1e-3, (0.9, 0.95), 1e-8, 0.1)),
    "muon_fsdp2": (0.02, 0.0, False, True, rms, KELLER, 1.0, KELLERS_ADAM),
    "dion's Muon": (0.01, 0.01, True, False, lambda m, n: (m / n) ** 0.5, POLAR, 1.02,
                    (0.01, (0.9, 0.95), 1e-8, 0.01)),
    "Megatron's Muon, lr 3e-4": (3e-4, 0.01, False, False, lambda m, n: max(m, n) ** 0.5, QUINTIC,
                                 1.0, (3e-4, (0.9, 0.999), 1e-8, 0.01)),
}  # fmt: skip


def orthogonal(x: Tensor, steps: list[tuple[float, float, float]], safety: float) -> Tensor:
    if x.shape[0] > x.shape[1]:
        return orthogonal(x.T, steps, safety).T
    x = x / (safety * x.norm())
    for a, b, c in steps:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def muon_steps(weight: Tensor, grads: list[Tensor], buffer: Tensor, peer: tuple) -> Tensor:
    """Return the weight after some steps of a peer; `buffer` is changed."""
    lr, decay, is_sum, nesterov, scale, steps, safety, _ = peer
    for grad in grads:
        buffer.mul_(0.95).add_(grad, alpha=1.0 if is_sum else 0.05)
        ahead = 0.95 * buffer + grad * (1.0 if is_sum else 0.05) if nesterov else buffer
        update = orthogonal(ahead, steps, safety)
        weight = weight * (1 - lr * decay) - lr * scale(*weight.shape) * update
    return weight


def adam_steps(bias: Tensor, grads: list[Tensor], peer: tuple) -> Tensor:
    lr, (first, second), eps, decay = peer[-1] or (1e-3, (0.9, 0.999), 1e-8, 0.01)
    mean = square = torch.zeros_like(bias)
    for step, grad in enumerate(grads, 1):
        mean, square = first * mean + (1 - first) * grad, second * square + (1 - second) * grad**2
        root = (square / (1 - second**step)).sqrt() + eps
        bias = bias * (1 - lr * decay) - lr * mean / (1 - first**step) / root
    return bias


def options_of(name: str) -> dict:
    """Return what the page passes as adamw= for a peer."""
    of_adam = PAGE.partition("And what they do with")[2]
    line = next(each for each in of_adam.splitlines() if each.startswith("|") and name in each)
    return eval(re.findall(r"`(dict\(.*?\))`", line)[0])


@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize("shape", [(6, 24), (24, 6)])
def test_call_of_the_page_does_what_the_peer_does(name: str, shape: tuple[int, int]):
    torch.manual_seed(0)
    peer, layer = PEERS[name], nn.Linear(shape[1], shape[0])
    call = re.findall(r"`(Muon\(.*?\))`", " ".join(MUONS[name]))[0]
    weight, bias = (p.detach().double() for p in (layer.weight, layer.bias))
    grads = [(torch.randn(shape), torch.randn(shape[0])) for _ in range(5)]
    groups = param_groups(nn.ModuleDict({"x": layer}), adamw=options_of(name))
    optimizer = eval(call, {"Muon": Muon, "groups": groups, "DION": DION})

    buffer = torch.zeros(shape, dtype=torch.float64)
    early = muon_steps(weight, [g.double() for g, _ in grads[:3]], buffer, peer)
    for of_weight, of_bias in grads[:3]:
        layer.weight.grad, layer.bias.grad = of_weight, of_bias
        optimizer.step()
    moved = (early - weight).norm()
    assert (layer.weight - early).norm() < NEAR * moved
    expected = adam_steps(bias, [g.double() for _, g in grads[:3]], peer)
    torch.testing.assert_close(layer.bias.double(), expected, rtol=0, atol=1e-6)

    # The peer's own buffer, as the page says that it is loaded.
    optimizer.state[layer.weight]["momentum_buffer"].copy_(buffer * (0.05 if peer[2] else 1.0))
    late = muon_steps(early, [g.double() for g, _ in grads[3:]], buffer, peer)
    for of_weight, _ in grads[3:]:
        layer.weight.grad = of_weight
        optimizer.step()
    assert (layer.weight - late).norm() < NEAR * (late - weight).norm()


def test_page_says_of_each_peer_what_its_reference_does():
    assert list(MUONS) == list(PEERS)
    for name, (_, _, is_sum, nesterov, scale, steps, _, _) in PEERS.items():
        _, _, momentum, looks_ahead, factor, coefficients, *_ = MUONS[name]
        assert momentum == ("sum" if is_sum else "average")
        assert looks_ahead == ("yes" if nesterov else "no")
        python = re.sub(r"(\d) s", r"\1 * s", factor).replace("sqrt", "math.sqrt")
        value = eval(python, {"math": math, "m": 3, "n": 7})
        assert value == pytest.approx(scale(3, 7))
        assert coefficients == {3.4445: "keller", 4.0848: "quintic"}.get(
            steps[0][0], "Polar Express"
        )
