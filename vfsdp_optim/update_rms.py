"""How much the first steps of an optimizer move the weights of each group, printed."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


def print_update_rms(
    optimizer: torch.optim.Optimizer, steps: int = 3, write: Callable[[str], Any] = print
) -> Callable[[], None]:
    """Print for the next steps the root mean square of what each group's weights move by.

    Of the whole weights, however they are sharded, weight decay included; also divided by the
    group's learning rate, which gives about 0.2 for Muon by `match_rms_adamw`, and for AdamW 1 in
    the first step. A collective for each parameter and a copy of the weights in these steps,
    nothing afterwards. Rank 0 writes.

    Args:
        optimizer: Any of torch's kind, on plain or sharded parameters.
        steps: How many steps are printed.
        write: Takes each line.

    Returns:
        A function that ends it earlier; call it on every rank.

    Raises:
        ValueError: `steps` is less than 1.
    """
    if steps < 1:
        raise ValueError(f"steps: expected at least 1, got {steps}")
    before: list[list[Tensor]] = []
    done = 0

    def remember(*_: Any) -> None:
        before[:] = [
            [param.detach().clone() for param in group["params"]]
            for group in optimizer.param_groups
        ]

    def compare(*_: Any) -> None:
        nonlocal done
        done += 1
        for g, (group, old) in enumerate(zip(optimizer.param_groups, before, strict=True)):
            line = f"step {done}, group {g}{_title(group)}: {_moved(group, old)}"
            if not dist.is_initialized() or dist.get_rank() == 0:
                write(line)
        before.clear()
        if done == steps:
            stop()

    handles = optimizer.register_step_pre_hook(remember), optimizer.register_step_post_hook(compare)

    def stop() -> None:
        before.clear()
        for handle in handles:
            handle.remove()

    return stop


def _title(group: dict[str, Any]) -> str:
    algorithm = f" ({group['algorithm']})" if "algorithm" in group else ""
    names = group.get("param_names") or []
    if not names:
        return algorithm
    shown = names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]}"
    return f"{algorithm}, {shown}"


def _moved(group: dict[str, Any], old: list[Tensor]) -> str:
    numel = sum(param.numel() for param in group["params"])
    if not numel:
        return "no weights"
    squares = sum(
        _whole(torch.linalg.vector_norm(param.detach() - was, dtype=torch.float32)) ** 2
        for param, was in zip(group["params"], old, strict=True)
    )
    rms, lr = (squares / numel) ** 0.5, float(group.get("lr", 0.0))
    over = f", {rms / lr:.3g} of lr {lr:.3g}" if lr else ""
    return f"updates have RMS {rms:.3g}{over}"


def _whole(norm: Tensor) -> float:
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()
