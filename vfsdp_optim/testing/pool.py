"""A pool of reused gloo ranks: functions run on every rank, and every failure becomes one report.

Touches processes, pipes and one temporary directory. ``run_ranks(fn, world_size, *args)`` runs a
function on every rank and returns the results by rank. Each world size has ranks of its own, which
are forked once, from a server that has torch imported, and serve until they have left
`MOST_GROUPS` process groups. Whatever goes wrong on a rank (an exception, a death, a hang) becomes
one `RankError` with what every rank was doing and what it printed; the ranks of that call are then
replaced, because gloo may abort a process whose collectives failed.

Functions, arguments and results travel by cloudpickle: lambdas, closures, functions of a notebook
or of a plain script (no ``if __name__ == "__main__":`` is needed). Without cloudpickle installed,
only what a rank can import by its name.

Measured on 2 cores: a call costs 0.7 ms at 2 ranks and 1.2 ms at 4, also after calls at another
world size; one after a call that left groups of its own 45 ms more; the first call 1.5 s.
"""

import atexit
import contextlib
import faulthandler
import functools
import gc
import multiprocessing
import multiprocessing.connection
import os
import pickle
import queue
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

try:
    import cloudpickle
except ImportError:  # an extra of the package
    cloudpickle = None

# Imported once, in the server that ranks are forked from; what is not installed is left out.
PRELOAD = [
    "hypothesis.strategies",
    "pytest",
    "torch",
    "torch.distributed",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.utils.checkpoint",
    "vfsdp_optim.testing",
]
LOG_TAIL = 8000  # characters of a rank's output that an error shows
# Process groups that a rank may have left. torch's caches keep groups of meshes alive, each with
# three threads and five files; 1024 files are what many systems allow a process.
MOST_GROUPS = 60


class RankError(RuntimeError):
    """A function failed on at least one rank.

    Attributes:
        reports: what each rank that did not finish normally said or was doing, by rank.
    """

    def __init__(self, message: str, reports: dict[int, str]) -> None:
        """Join the summary and the reports of all ranks into one message, equal ones only once."""
        alike: dict[str, list[str]] = {}
        for rank, text in sorted(reports.items()):
            alike.setdefault(text, []).append(str(rank))
        parts = [
            f"--- rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}: {text}"
            for text, ranks in alike.items()
        ]
        super().__init__("\n".join([message, *parts]))
        self.reports = reports


@dataclass(frozen=True, slots=True)
class _Request:
    """One request to a rank; `payload` is the pickled ``(fn, args)``."""

    world_size: int
    store: str  # file that the ranks of this group meet in
    path: list[str]  # the parent's sys.path: test modules must be importable in the rank
    payload: bytes


@dataclass(frozen=True, slots=True)
class _Answer:
    """What a rank sends back: the function's result, or the report of what it raised."""

    ok: bool
    value: Any
    group_is_clean: bool = False  # the next call may use the same process group
    is_worn: bool = False  # the rank has left `MOST_GROUPS` groups


@dataclass(slots=True)
class _Rank:
    """A rank as the parent sees it."""

    process: Any  # multiprocessing's ForkServerProcess
    pipe: multiprocessing.connection.Connection
    log: Path


@dataclass(slots=True)
class _World:
    """The ranks of one world size, and the file that their present process group meets in."""

    ranks: list[_Rank]
    store: str = ""  # none yet, or the last call left groups of its own: form a new one


class RankPool:
    """Ranks that are started when first needed and reused by later calls; also a context manager.

    A rank has gloo, one thread, torch's seed 0 at the start of each call, and the default process
    group of the call's world size. It is reused: leave no global state behind.

    Args:
        grace: seconds that the other ranks get to finish by themselves after one has failed.

    Example:
        >>> with RankPool() as pool:
        ...     pool.run(lambda x: x + 1, 2, 41)
        [42, 42]
    """

    def __init__(self, *, grace: float = 5.0) -> None:
        self._grace = grace
        self._worlds: dict[int, _World] = {}
        self._dir: Path | None = None
        self._files = 0  # names given out in that directory

    def run(
        self, fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60.0
    ) -> list[Any]:
        """Call ``fn(*args)`` on ``world_size`` ranks and return its results by rank.

        Args:
            fn: any callable that cloudpickle takes; without it, a function of a module.
            world_size: number of ranks.
            args: of `fn`, the same on every rank. Tensors are copied.
            timeout: seconds for all ranks to finish.

        Raises:
            ValueError: `world_size` is not positive.
            TypeError: `fn` or an argument cannot travel.
            RankError: a rank raised, died, or had not finished after `timeout` seconds.
        """
        __tracebackhide__ = True
        if world_size < 1:
            raise ValueError(f"expected a positive world_size, got {world_size!r}")
        payload = _packed(fn, args)
        world = self._world(world_size)
        call = pickle.dumps(_Request(world_size, world.store, list(sys.path), payload))
        for rank in world.ranks:
            with contextlib.suppress(BrokenPipeError):  # a dead rank is reported by _collect
                rank.pipe.send_bytes(call)
        try:
            answers, reports, cause = self._collect(world.ranks, timeout)
        except BaseException:  # Ctrl-C, or a result that the parent cannot unpickle
            self._stop(world_size, at_once=True)
            raise
        if reports:
            self._stop(world_size, at_once=True)
            raise RankError(f"{_name(fn)} failed at world size {world_size}: {cause}", reports)
        if any(answer.is_worn for answer in answers.values()):
            self._stop(world_size)
        elif not all(answer.group_is_clean for answer in answers.values()):
            world.store = ""
        return [answers[rank].value for rank in range(world_size)]

    def close(self) -> None:
        """End all ranks and remove the temporary directory; the pool can be used again."""
        for world_size in list(self._worlds):
            self._stop(world_size)
        if self._dir is not None:
            shutil.rmtree(self._dir, ignore_errors=True)
            self._dir = None

    def __enter__(self) -> "RankPool":
        """Return the pool."""
        return self

    def __exit__(self, *exception: object) -> None:
        """End the ranks."""
        self.close()

    def pids(self) -> dict[tuple[int, int], int]:
        """Return the process ids of the ranks in the pool, by world size and rank."""
        return {
            (world_size, rank): member.process.pid
            for world_size, world in self._worlds.items()
            for rank, member in enumerate(world.ranks)
        }

    def _world(self, world_size: int) -> _World:
        """Return the ranks of a world size, started if there are none, and where they meet."""
        if self._dir is None:
            self._dir = Path(tempfile.mkdtemp(prefix="ranks-"))
        if world_size not in self._worlds:
            self._worlds[world_size] = _World([self._start(rank) for rank in range(world_size)])
        world = self._worlds[world_size]
        world.store = world.store or self._new_file("group")
        return world

    def _new_file(self, kind: str) -> str:
        self._files += 1
        return f"{self._dir}/{kind}-{self._files}"

    def _start(self, rank: int) -> _Rank:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when the server imports torch
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        ours, theirs = context.Pipe()
        log = self._new_file("log")
        process = context.Process(target=_serve, args=(theirs, rank, log), daemon=True)
        with _no_main_module():
            process.start()
        theirs.close()  # so that the death of the rank ends our side of the pipe
        return _Rank(process, ours, Path(log))

    def _collect(
        self, ranks: Sequence[_Rank], timeout: float
    ) -> tuple[dict[int, _Answer], dict[int, str], str]:
        """Wait for all ranks. Returns good answers, reports of the others, and the cause."""
        answers: dict[int, _Answer] = {}
        reports: dict[int, str] = {}
        waiting: dict[Any, int] = {member.pipe: rank for rank, member in enumerate(ranks)}
        deadline = time.monotonic() + timeout
        while waiting and (left := deadline - time.monotonic()) > 0:
            ready: list[Any] = multiprocessing.connection.wait(list(waiting), left)
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    answer = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionResetError):
                    answer = _Answer(False, _describe_death(ranks[rank]))
                if answer.ok:
                    answers[rank] = answer
                    continue
                if not reports:
                    deadline = min(deadline, time.monotonic() + self._grace)
                reports[rank] = answer.value
        # A death makes the peers raise, so it is the cause even where their reports came first.
        failed = sorted(reports.items(), key=lambda item: not item[1].startswith("died"))
        causes = [f"rank {rank} {text.splitlines()[0]}" for rank, text in failed]
        hanging = sorted(waiting.values())
        causes.append(f"ranks {hanging} did not finish within {timeout:g} s")
        when = "after another rank failed" if reports else f"after {timeout:g} s"
        for rank in hanging:
            _request_stacks(ranks[rank])
        for rank in hanging:
            reports[rank] = f"still running {when}, at\n{_read_stacks(ranks[rank])}"
        return answers, reports, causes[0]

    def _stop(self, world_size: int, *, at_once: bool = False) -> None:
        ranks = self._worlds.pop(world_size).ranks
        for rank in ranks:
            rank.pipe.close()  # an idle rank leaves by itself
            if at_once:
                rank.process.kill()
        for rank in ranks:
            rank.process.join(2)
            if rank.process.is_alive():
                rank.process.kill()
                rank.process.join()
            rank.process.close()


def _describe_death(rank: _Rank) -> str:
    rank.process.join(5)
    return f"died with exit code {rank.process.exitcode}\nits output:\n{_tail(rank.log)}"


def _request_stacks(rank: _Rank) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(rank.process.pid, signal.SIGUSR1)  # see _serve


def _read_stacks(rank: _Rank) -> str:
    """Return the rank's output once the stacks asked for are in it."""
    for _ in range(40):
        text = _tail(rank.log)
        if "most recent call first" in text:
            time.sleep(0.05)  # the dump is written line by line
            return _tail(rank.log)
        time.sleep(0.05)
    return f"(no stack within 2 s)\n{text}"


# -- what travels ---------------------------------------------------------------------------------


def _dumps(value: object) -> bytes:
    # Not multiprocessing's own pickler: it would share tensors through file descriptors.
    return pickle.dumps(value) if cloudpickle is None else cloudpickle.dumps(value)


def _packed(fn: Callable[..., Any], args: Sequence[Any]) -> bytes:
    """Return ``(fn, args)`` as bytes.

    Raises:
        TypeError: something in it cannot travel, with what to do about it.
    """
    if cloudpickle is None:
        for item in (fn, *args):
            _refuse_unnamed(item)
    else:
        for item in (fn, *args):
            _send_module_by_value(item)
    try:
        return _dumps((fn, args))
    except Exception as error:
        raise TypeError(
            f"{_name(fn)} and its arguments cannot be sent to the ranks: {error}; make what cannot "
            "be pickled (locks, files, process groups, generators) inside the function"
        ) from error


def _refuse_unnamed(item: object) -> None:
    name = getattr(item, "__qualname__", "")
    if getattr(item, "__module__", "") == "__main__" or "<locals>" in name or "<lambda>" in name:
        raise TypeError(
            f"expected functions of a module, got {item!r}, which a rank cannot import by name; "
            "install cloudpickle (pip install 'vfsdp-optim[testing]'), or move it to the top level "
            "of a module"
        )


def _send_module_by_value(item: object) -> None:
    """Let functions travel whole if their module is loaded here and cannot be imported in a rank,
    as test modules under pytest's --import-mode=importlib."""
    while isinstance(item, functools.partial):
        item = item.func
    name = getattr(item, "__module__", None)
    module = sys.modules.get(name) if isinstance(name, str) else None
    if module is None or name == "__main__" or module in _KNOWN_MODULES:
        return
    _KNOWN_MODULES.add(module)
    top = module.__name__.partition(".")[0]
    if top not in sys.builtin_module_names and not _is_importable(top):
        cloudpickle.register_pickle_by_value(module)


def _is_importable(top: str) -> bool:
    finders = (getattr(finder, "find_spec", None) for finder in sys.meta_path)
    return any(find(top, None) is not None for find in finders if find is not None)


_KNOWN_MODULES: set[types.ModuleType] = set()


def _name(fn: Callable[..., Any]) -> str:
    name = getattr(fn, "__qualname__", None)
    return repr(fn) if name is None else f"{fn.__module__}.{name}"


@contextlib.contextmanager
def _no_main_module() -> Iterator[None]:
    """Hide the main module from multiprocessing, which would run it again in the child."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _tail(log: Path) -> str:
    text = log.read_text(errors="replace") if log.exists() else ""
    return text[-LOG_TAIL:]


# -- in the rank ----------------------------------------------------------------------------------


def _serve(pipe: multiprocessing.connection.Connection, rank: int, log: str) -> None:
    """Run in the rank: answer calls until the parent is gone."""
    output = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.enable(output)
    faulthandler.register(signal.SIGUSR1, output)  # the parent asks where this rank hangs
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    torch.set_num_threads(1)
    gc.freeze()  # what the server imported is never garbage: makes gc.collect() cheap
    calls: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(pipe, calls), daemon=True).start()
    store, left = "", 0
    while True:
        call: _Request = pickle.loads(calls.get())
        os.ftruncate(output, 0)
        try:
            if store != call.store:
                left += len(_groups())
                _join_group(call.store, rank, call.world_size)
                store = call.store
            value = _run(call)
            clean = _group_is_clean(call.world_size)
            answer = _dumps(_Answer(True, value, clean, left >= MOST_GROUPS))
        except BaseException as error:  # SystemExit too: the parent waits for an answer
            summary = "raised " + "".join(traceback.format_exception_only(error)).strip()
            text = f"{summary}\n{traceback.format_exc()}{_tail(Path(log))}"
            answer = pickle.dumps(_Answer(False, text))
        value = None
        gc.collect()  # modules and hooks are cycles: the next call finds a clean rank
        pipe.send_bytes(answer)


def _receive(
    pipe: multiprocessing.connection.Connection, calls: "queue.SimpleQueue[bytes]"
) -> None:
    """Hand calls on; leave at once when the parent is gone, even out of a hanging collective."""
    while True:
        try:
            calls.put(pipe.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)  # no destructors: gloo's may wait for peers that are gone too


def _join_group(store: str, rank: int, world_size: int) -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(minutes=5),  # longer than any call: the parent decides
    )


def _group_is_clean(world_size: int) -> bool:
    """Return whether the call left one process group, the default one (no subgroups)."""
    if not dist.is_initialized() or dist.get_world_size() != world_size:
        return False
    return len(_groups()) == 1


def _groups() -> Collection[dist.ProcessGroup]:
    """Return the process groups of this rank that are not destroyed."""
    groups: Collection[dist.ProcessGroup] = dist.distributed_c10d._world.pg_map
    return groups


def _run(call: _Request) -> Any:
    sys.path.extend(entry for entry in call.path if entry not in sys.path)
    fn, args = pickle.loads(call.payload)
    torch.manual_seed(0)  # no draw depends on what ran before on this rank
    return fn(*args)


_POOL = RankPool()
atexit.register(_POOL.close)


def run_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60.0
) -> list[Any]:
    """Call ``fn(*args)`` on ``world_size`` gloo ranks of a pool that all callers share.

    See `RankPool.run` for arguments and errors.
    """
    __tracebackhide__ = True
    return _POOL.run(fn, world_size, *args, timeout=timeout)


def close() -> None:
    """End the shared ranks; without it they end with this process."""
    _POOL.close()
