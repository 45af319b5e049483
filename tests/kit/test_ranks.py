"""Tests of the rank pool: what a test sees when ranks work, raise, die or hang."""

import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ranks import RankError, RankPool, distributed_examples, run_ranks

PATHS = [Path(__file__).parent, Path(__file__).parents[1] / "support"]


@pytest.fixture
def pool() -> Iterator[RankPool]:
    """A pool of its own, so that its broken ranks cost no other test anything."""
    pool = RankPool(grace=0.5)
    yield pool
    pool.close()


def sum_of_ranks() -> tuple[int, int, float]:
    """Return rank, world size and 1 + 2 + ... + world size."""
    x = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(x)
    return dist.get_rank(), dist.get_world_size(), x.item()


def report_process() -> tuple[int, int, int, float]:
    """Return pid, torch's threads, torch's seed and one random number."""
    return os.getpid(), torch.get_num_threads(), torch.initial_seed(), torch.rand(()).item()


def add(x: torch.Tensor, scale: float) -> dict[str, torch.Tensor]:
    """Return a tensor that depends on the arguments and the rank."""
    return {"sum": x * scale + dist.get_rank()}


def make_subgroups() -> int:
    """Make a 2-D mesh, whose process groups outlive the call; return a sum over its rows."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    x = torch.tensor([dist.get_rank()])
    dist.all_reduce(x, group=mesh.get_group("columns"))
    return int(x.item())


def raise_on(rank: int) -> None:
    """Raise on one rank while the others wait for it."""
    if dist.get_rank() == rank:
        print("printed before the failure")
        raise LookupError(f"no table on rank {rank}")
    dist.barrier()


def die_on(rank: int) -> None:
    """End one rank without a word while the others wait for it."""
    if dist.get_rank() == rank:
        os._exit(7)
    dist.barrier()


def hang_on(rank: int) -> None:
    """Leave one rank asleep while the others wait for it."""
    if dist.get_rank() == rank:
        time.sleep(600)
    dist.barrier()


def return_a_generator() -> object:
    """Return what pickle cannot send."""
    return (i for i in range(3))


def test_ranks_form_a_group_of_any_size_in_any_order() -> None:
    for world_size in [1, 2, 5, 3, 5, 1]:
        total = world_size * (world_size + 1) / 2
        assert run_ranks(sum_of_ranks, world_size) == [
            (rank, world_size, total) for rank in range(world_size)
        ]


def test_distributed_examples_are_few_and_drawn_in_the_parent() -> None:
    drawn = []

    @distributed_examples
    @given(value=st.integers(0, 100))
    def rank_adds(value: int) -> None:
        results = run_ranks(add, 2, torch.tensor(value), 1.0)
        assert [int(result["sum"]) for result in results] == [value, value + 1]
        drawn.append(value)

    rank_adds()
    assert 1 < len(drawn) <= settings.default.max_examples // 4


def test_ranks_are_reused_single_threaded_and_seeded_again() -> None:
    with RankPool() as pool:  # of its own: one that is worn by earlier tests starts anew
        first, second = (pool.run(report_process, 3) for _ in range(2))
    assert first == second
    assert len({pid for pid, *_ in first}) == 3
    assert {(threads, seed) for _, threads, seed, _ in first} == {(1, 0)}
    assert os.getpid() not in {pid for pid, *_ in first}


def test_arguments_and_results_travel_by_value() -> None:
    x = torch.arange(4.0)
    results = run_ranks(add, 2, x, 3.0)
    for rank, result in enumerate(results):
        torch.testing.assert_close(result["sum"], x * 3 + rank, rtol=0, atol=0)
    assert x.tolist() == [0, 1, 2, 3]


def test_subgroups_of_a_call_do_not_pile_up() -> None:
    for _ in range(2):
        assert run_ranks(make_subgroups, 4) == [1, 1, 5, 5]
    assert [total for *_, total in run_ranks(sum_of_ranks, 4)] == [10.0] * 4


def open_files_after_groups(count: int) -> int:
    for _ in range(count):
        mesh = DeviceMesh.from_group(dist.new_group(), "cpu")
        distribute_tensor(torch.ones(2), mesh, [Shard(0)]).full_tensor()
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts files as Linux shows them")
def test_groups_of_meshes_do_not_use_up_the_files_of_a_rank(pool: RankPool) -> None:
    """pytorch#190489: DTensor keeps groups alive beyond destroy_process_group, with their files."""
    pids, most = set(), 0
    for _ in range(8):
        most = max(most, *pool.run(open_files_after_groups, 2, 15))
        pids.add(pool.pids().get((2, 0)))
    assert len(pids) > 1
    assert most < 500  # 650 in a rank that serves all calls; 1024 is a common limit


def test_a_raising_rank_is_reported_with_its_peers_and_replaced(pool: RankPool) -> None:
    before = pool.run(report_process, 2)
    of_three = pool.run(report_process, 3)
    with pytest.raises(RankError, match="rank 1 raised LookupError") as caught:
        pool.run(raise_on, 2, 1)
    assert set(caught.value.reports) == {0, 1}
    assert "no table on rank 1" in caught.value.reports[1]
    assert "in raise_on" in caught.value.reports[1]
    assert "printed before the failure" in caught.value.reports[1]
    # The peer hangs in the barrier: its report shows where.
    assert "still running" in caught.value.reports[0]
    assert "in raise_on" in caught.value.reports[0]
    assert not {pid for pid, *_ in before} & {pid for pid, *_ in pool.run(report_process, 2)}
    assert pool.run(report_process, 3) == of_three


def test_a_dead_rank_is_the_cause_and_the_pool_recovers(pool: RankPool) -> None:
    with pytest.raises(RankError, match="rank 2 died with exit code 7") as caught:
        pool.run(die_on, 3, 2)
    assert 2 in caught.value.reports
    assert pool.run(sum_of_ranks, 3) == [(rank, 3, 6.0) for rank in range(3)]


def test_a_hanging_rank_is_reported_within_the_timeout(pool: RankPool) -> None:
    pool.run(sum_of_ranks, 2)
    with pytest.raises(RankError, match=r"ranks \[0, 1\] did not finish within 1 s") as caught:
        pool.run(hang_on, 2, 0, timeout=1.0)
    assert all("in hang_on" in report for report in caught.value.reports.values())
    assert pool.run(sum_of_ranks, 2) == [(0, 2, 3.0), (1, 2, 3.0)]


def test_a_result_that_cannot_be_pickled_names_its_type(pool: RankPool) -> None:
    with pytest.raises(RankError, match="cannot pickle 'generator' object"):
        pool.run(return_a_generator, 1)


def test_what_cannot_travel_is_refused_before_ranks_start(pool: RankPool) -> None:
    with pytest.raises(TypeError, match=r"lock.*make what cannot be pickled.*inside the function"):
        pool.run(print, 1, threading.Lock())
    with pytest.raises(ValueError, match="positive world_size, got 0"):
        pool.run(sum_of_ranks, 0)
    assert pool.pids() == {}


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_no_rank_outlives_the_process_that_started_it(tmp_path: Path) -> None:
    # The parent is killed while its ranks hang: nobody is left to tell them to stop.
    script = """
        import os, signal, test_ranks, threading
        from vfsdp_optim.testing.pool import RankPool
        pool = RankPool()
        pool.run(test_ranks.sum_of_ranks, 2)
        print(*pool.pids().values(), flush=True)
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
        pool.run(test_ranks.hang_on, 2, 0)
    """
    # The killed parent cannot remove its temporary directory.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, PATHS))}
    environment["TMPDIR"] = str(tmp_path)
    child = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    pids = [int(pid) for pid in child.stdout.split()]
    assert len(pids) == 2
    deadline = time.monotonic() + 10
    while any(_is_running(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(_is_running(pid) for pid in pids)
