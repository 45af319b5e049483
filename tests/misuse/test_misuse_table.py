"""Misuses: each raises on every rank, names what is wrong and the cure, and changes nothing."""

from dataclasses import dataclass

import pytest
import torch
from misuses_of_sharding import MISUSES_OF_SHARDING
from misuses_of_training import MISUSES_OF_TRAINING
from rows import Misuse, Scene
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ranks import run_ranks
from sharding import FSDPModule, RaggedDTensor, fully_shard
from small_models import loss_of, shard

ROWS = [
    (error, Misuse(*row))
    for table in (MISUSES_OF_SHARDING, MISUSES_OF_TRAINING)
    for error, rows in table.items()
    for row in rows
]
ERRORS = {row.words: error for error, row in ROWS}
MISUSES = {row.words: row for _, row in ROWS}
TIMEOUT = 30.0


@dataclass(frozen=True)
class Report:
    """What one rank saw of one misuse."""

    error: str
    message: str
    changed: list[str]
    goes_on: dict[str, list[Tensor]]  # this rank's results of training both models afterwards


def local(tensor: Tensor) -> Tensor:
    """A copy of this rank's elements; none of a parameter without a shape."""
    if is_lazy(tensor):
        return torch.empty(0)
    data = tensor._local_tensor if isinstance(tensor, RaggedDTensor) else tensor
    return data.detach().clone()


def facts_of(scene: Scene) -> dict[str, object]:
    """Everything a misuse must leave alone: classes, parameters, values, gradients, groups."""
    facts: dict[str, object] = {}
    for which in ("model", "plain"):
        for path, module in getattr(scene, which).named_modules():
            facts[f"class of {which}.{path}"] = type(module)
            for name, p in module._parameters.items():
                facts[f"parameter {which}.{path}.{name}"] = p
                facts[f"values of {which}.{path}.{name}"] = local(p) if p is not None else None
                grad = None if p is None else p.grad
                facts[f"gradient of {which}.{path}.{name}"] = None if grad is None else local(grad)
    for which, optimizer in (("optimizer", scene.optimizer), ("other", scene.other)):
        for g, group in enumerate(optimizer.param_groups):
            facts[f"group {g} of {which}"] = [id(p) for p in group["params"]]
            facts[f"options {g} of {which}"] = {
                k: repr(v) for k, v in group.items() if k != "params"
            }
    for i, state in enumerate(scene.optimizer.state.values()):
        facts[f"state {i}"] = [local(value) for value in state.values()]
    return facts


def is_same(a: object, b: object) -> bool:
    """Whether two facts are the same: modules' parameters by identity, copies by their bits."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(is_same, a, b))
    if isinstance(a, Tensor) and isinstance(b, Tensor) and not isinstance(a, nn.Parameter):
        return a.is_meta or torch.equal(a.nan_to_num(), b.nan_to_num())
    return a is b or (not isinstance(a, Tensor) and a == b)


def go_on(scene: Scene, spoiled: str) -> dict[str, list[Tensor]]:
    """Trains both models a step, as if nothing had been."""
    results: dict[str, list[Tensor]] = {}
    if spoiled != "model":
        scene.model.zero_grad()
        scene.train()
        results["model"] = [local(p) for p in scene.model.parameters()]
    if spoiled != "plain":
        if not any(isinstance(module, FSDPModule) for module in scene.plain.modules()):
            shard(scene.plain)
        elif not isinstance(scene.plain, FSDPModule):
            fully_shard(scene.plain)
        loss = loss_of(scene.plain, 2)
        results["plain"] = [loss.detach()]
    return results


def try_misuses(names: list[str]) -> list[Report]:
    """Tries rows on this rank; none of them may keep the next one from running."""
    reports = []
    for name in names:
        row = MISUSES[name]
        scene = Scene()
        row.before(scene)
        before = facts_of(scene)
        try:
            row.misuse(scene)
            error: Exception | None = None
        except Exception as raised:
            error = raised
        scene.model.reset_iter_state()  # what is documented for exceptions in backward
        after = facts_of(scene)
        changed = [fact for fact in before if not is_same(before[fact], after.get(fact))]
        changed += sorted(after.keys() - before.keys())
        reports.append(Report(type(error).__name__, str(error), changed, go_on(scene, row.spoils)))
    return reports


def go_on_without_misuse() -> dict[str, list[Tensor]]:
    return go_on(Scene(), "")


TOGETHER = [name for name, row in MISUSES.items() if not row.alone]


@pytest.fixture(scope="module")
def together() -> list[list[Report]]:
    """By rank, the reports of all rows that share one call."""
    return run_ranks(try_misuses, 2, TOGETHER, timeout=TIMEOUT)


@pytest.fixture(scope="module")
def right() -> list[dict[str, list[Tensor]]]:
    """By rank, how both models go on where nothing went wrong."""
    return run_ranks(go_on_without_misuse, 2)


@pytest.mark.parametrize("name", MISUSES)
def test_misuse_raises_on_every_rank_and_changes_nothing(name, together, right):
    row = MISUSES[name]
    if row.alone:
        reports = [alone for (alone,) in run_ranks(try_misuses, 2, [name], timeout=TIMEOUT)]
    else:
        reports = [rank[TOGETHER.index(name)] for rank in together]
    for report, expected in zip(reports, right, strict=True):
        assert report.error == ERRORS[name].__name__, report.message
        for word in row.words.split("|"):
            assert word in report.message
        assert not report.changed
        assert report.goes_on.keys() == {"model", "plain"} - {row.spoils}
        for which, results in report.goes_on.items():
            assert is_same(results, expected[which]), f"{which} trains otherwise afterwards"


def test_misuse_table_is_long_and_names_each_row_once() -> None:
    assert len(MISUSES) == len(ROWS)
    assert len(MISUSES) >= 90


def test_misuse_without_a_process_group_says_how_to_get_one() -> None:
    model = nn.Linear(3, 3)
    with pytest.raises(RuntimeError, match=r"process group.*torchrun.*init_process_group"):
        fully_shard(model)
    assert type(model) is nn.Linear


def refused_twice() -> None:
    scene = Scene()
    MISUSES["ranks 0 and 1|the same arguments"].before(scene)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="ranks 0 and 1"):
            loss_of(scene.plain, 1)


def test_root_that_was_refused_is_refused_again() -> None:
    run_ranks(refused_twice, 2, timeout=TIMEOUT)
