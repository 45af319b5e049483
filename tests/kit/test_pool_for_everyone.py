"""The public rank pool: what travels, and where it works: plain scripts, xdist, odd imports."""

import functools
import importlib.util
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch.distributed as dist

from vfsdp_optim.testing import RankPool, pool, run_ranks


def run(arguments, cwd, **environment) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_lambdas_closures_and_local_classes_travel_both_ways():
    class Point:
        def __init__(self, x: int) -> None:
            self.x = x

    offset = 10

    def shifted(point: Point) -> Point:
        return Point(point.x + offset + dist.get_rank())

    points = run_ranks(shifted, 2, Point(1))
    assert [type(point) for point in points] == [Point, Point]
    assert [point.x for point in points] == [11, 12]
    assert run_ranks(functools.partial(lambda a, b: a * b, 3), 1, 4) == [12]


def test_functions_of_modules_that_ranks_cannot_import_travel_whole(tmp_path):
    """As test modules under pytest's --import-mode=importlib."""
    path = tmp_path / "module_in_no_path.py"
    path.write_text("FACTOR = 3\ndef helper(x): return x * FACTOR\ndef fn(x): return helper(x) + 1")
    spec = importlib.util.spec_from_file_location("module_in_no_path", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["module_in_no_path"] = module
    try:
        spec.loader.exec_module(module)
        assert run_ranks(module.fn, 2, 5) == [16, 16]
    finally:
        del sys.modules["module_in_no_path"]


def test_without_cloudpickle_the_error_names_the_cure(monkeypatch):
    monkeypatch.setattr(pool, "cloudpickle", None)
    with RankPool() as ranks:
        with pytest.raises(TypeError, match=r"pip install 'vfsdp-optim\[testing\]'.* top level"):
            ranks.run(lambda: 1, 1)
        assert ranks.pids() == {}
        assert ranks.run(os.getppid, 1) != [os.getppid()]


def test_ranks_serve_all_world_sizes_and_end_with_the_context():
    """Started anew for each, a case at several world sizes would take seconds."""
    with RankPool() as ranks:
        first = {size: ranks.run(os.getpid, size) for size in (3, 1, 2)}
        assert {size: ranks.run(os.getpid, size) for size in (2, 3, 1)} == first
        assert list(ranks.pids().values()) == [*first[3], *first[1], *first[2]]
    assert ranks.pids() == {}


SCRIPT = """
    import os
    import sys
    import torch
    import torch.distributed as dist
    import vfsdp_optim
    kit = "vfsdp_optim.testing" in sys.modules
    from vfsdp_optim.testing import RankError, run_ranks

    print("main runs once", kit, "hypothesis" in sys.modules)
    scale = torch.tensor(2.0)

    class Answer:
        def __init__(self, value): self.value = value

    def work(rank_that_dies):
        if dist.get_rank() == rank_that_dies:
            os._exit(3)
        x = scale * (dist.get_rank() + 1)
        dist.all_reduce(x)
        return Answer(x.item())

    print([answer.value for answer in run_ranks(work, 2, None)])
    try:
        run_ranks(work, 2, 1)
    except RankError as error:
        print(str(error).splitlines()[0])
    print([isinstance(answer, Answer) for answer in run_ranks(work, 3, None)])
"""


def test_plain_script_needs_no_guard_and_recovers_and_imports_no_more_than_it_uses(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(SCRIPT))
    result = run([str(path)], tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [
        "main runs once False False",
        "[6.0, 6.0]",
        "__main__.work failed at world size 2: rank 1 died with exit code 3",
        "[True, True, True]",
    ]


SUITE = """
    import torch.distributed as dist
    import pytest
    from vfsdp_optim.testing import RankError, assert_sharded_equals_unsharded

    def fail():
        raise LookupError(dist.get_rank())

    @pytest.mark.parametrize("value", [1, 2])
    def test_ranks(rank_pool, value):
        assert rank_pool.run(lambda: value * dist.get_world_size(), 2) == [2 * value] * 2
        with pytest.raises(RankError, match="LookupError: 1"):
            rank_pool.run(fail, 2)
"""


def test_plugin_serves_ranks_to_a_suite_elsewhere(tmp_path):
    (tmp_path / "test_suite.py").write_text(textwrap.dedent(SUITE))
    plugin = Path(pool.__file__).parent / "pytest_plugin"
    (tmp_path / "pytest_vfsdp").symlink_to(plugin)
    arguments = ["-m", "pytest", "-q", "--import-mode=importlib", "-n", "1"]
    loaded = importlib.util.find_spec("pytest_vfsdp") is not None
    result = run([*arguments, *([] if loaded else ["-p", "pytest_vfsdp"])], tmp_path,
                 PYTHONPATH=str(tmp_path))  # fmt: skip
    assert "2 passed" in result.stdout, result.stdout + result.stderr


def test_plugin_imports_neither_torch_nor_hypothesis_until_used(tmp_path):
    (tmp_path / "pytest_vfsdp").symlink_to(Path(pool.__file__).parent / "pytest_plugin")
    code = """
        import sys, pytest_vfsdp
        print(sorted({"torch", "hypothesis", "numpy", "vfsdp_optim"} & set(sys.modules)))
    """
    result = run(["-c", textwrap.dedent(code)], tmp_path, PYTHONPATH=str(tmp_path))
    assert result.stdout.strip() == "[]", result.stderr
