"""The README: its code runs as written, its names and files are there."""

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import sharding
import vfsdp_optim
from as_script import EXAMPLES, run_script
from ranks import on_ranks

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
QUICKSTART = next(block for block in BLOCKS if "torchrun" in block)
# What starts ranks of its own, or needs 32 GPUs.
ALONE = ("torchrun", "assert_sharded_equals_unsharded", 'init_device_mesh("cuda"')


class Block(nn.Module):
    """Fused queries, keys and values as wide as the page says, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.norm = nn.Linear(2, 4096 + 1024 + 1024, bias=False), nn.LayerNorm(2)


class Mixture(Block):
    """One parameter for each glob of the page."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Module()
        self.experts.w1, self.experts.w2 = (nn.Parameter(torch.ones(3, 4, 2)) for _ in range(2))
        self.experts.gate_up = nn.Parameter(torch.ones(3, 8, 2))
        self.query_key, self.router = nn.Linear(2, 32 * 2 * 3), nn.Linear(2, 3)
        self.out = nn.Linear(32 * 3, 2)


def model_of(block: type[Block]) -> nn.Module:
    model = nn.Module()
    model.blocks = nn.ModuleList([block(), block()])
    model.embedding = nn.Embedding(5, 2)
    model.forward = lambda x: x
    return model


@on_ranks(2)
def test_blocks_run_as_they_stand():
    names: dict[str, Any] = {
        "torch": torch,
        "hidden_matrices": [nn.Parameter(torch.ones(4, 4))],
        "mesh": init_device_mesh("cpu", (2,)),
        "max_logits": torch.full((32,), 200.0),
    }
    ran = 0
    for block in BLOCKS:
        if any(mark in block for mark in ALONE):
            continue
        if "states=" not in block:  # continues the block before
            names["model"] = model_of(Mixture if "matrices=" in block else Block)
        exec(compile(block, "README.md", "exec"), names)
        ran += 1
    assert ran == 9


def test_property_test_runs_as_it_stands():
    block = next(block for block in BLOCKS if "assert_sharded_equals_unsharded" in block)
    exec(compile(block, "README.md", "exec"), {"vfsdp_optim": vfsdp_optim})


def test_quickstart_is_the_example_and_learns(monkeypatch):
    example = EXAMPLES / "quickstart.py"
    assert example.read_text() == QUICKSTART
    started: list[list[str]] = []
    monkeypatch.setattr(torch.distributed.run, "main", started.append)
    runpy.run_path(str(example), run_name="__main__")
    assert started == [["--nproc-per-node=2", str(example)]]
    code, printed = run_script("quickstart.py", 2)
    assert code == 0, printed
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", printed)]
    assert len(losses) == 8
    assert losses[-1] < 0.2 * losses[0]


@pytest.mark.parametrize("package", [sharding, vfsdp_optim], ids=lambda p: p.__name__)
def test_page_names_everything_public_and_every_folder(package: Any):
    for name in package.__all__:
        assert re.search(rf"\b{name}\b", PAGE), name
    tree = PAGE.partition("## The tree")[2].partition("\n## ")[0]
    folder = Path(package.__file__).parent
    section = tree.partition(f"\n{folder.name}/")[2]
    section = re.split(r"\n\w", section, maxsplit=1)[0]  # to the next folder
    files = {path.name for path in folder.glob("*.py")} - {"__init__.py"}
    folders = {f"{path.parent.name}/" for path in folder.glob("*/__init__.py")}
    assert set(re.findall(r"\b\w+(?:\.py\b|/)", section)) == files | folders


def test_version_is_that_of_the_changelog():
    newest = re.search(r"^## \[(\d.*?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert vfsdp_optim.__version__ == newest[1]
