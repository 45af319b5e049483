"""What an optimizer does about infinite and NaN gradients. Reads gradients; communicates one flag.

[Note: skipped steps]
One flag says whether any gradient on any rank is not finite; it is reduced once for each process
group, so that all ranks take the same decision. On the CPU the host reads it before anything is
written. On other devices `skip` does not wait for it: kernels run, and wherever the flag is set
their results are replaced by the values from before, run by run (`Run.chunks`) and matrix by matrix
(`Job.apply`). Step counts are kept on the host: they advance at once, and are taken back when the
flag, copied to pinned memory meanwhile, is read at the next look at the optimizer. `raise` has to
read the flag in the step on every device. The flag also says whether units have failed, in the step
before: all ranks learn it from the same one, and so raise in the same step, where the host does not
wait one later. Where no parameter is sharded and no group of replicas is given there
is nobody to ask: each process decides for itself, and processes with equal gradients alike.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from sharding.transport.waits import waiting_for
from vfsdp_optim.parameters.param_shard import Ranks

# Whether to leave a step out: known to the host, or a 0-dim bool that only the device knows.
Skip = bool | Tensor
CHOICES = ("ignore", "skip", "raise")
_FAILED = 2.0  # the flag of a rank on which units have failed


@dataclass(frozen=True, slots=True, eq=False)
class Failure:
    """What went wrong for good with a unit, if it did.

    Attributes:
        text: names it.
        happened: True, or 0-d bool on the unit's device.
    """

    text: str
    happened: Tensor | bool = True


class NonfiniteRule:
    """The choice of one optimizer, and the steps it skipped.

    Attributes:
        choice: "ignore", "skip" or "raise".
        host_devices: device types whose flag the host reads in the step.

    Raises:
        ValueError: there is no such choice.
    """

    def __init__(self, choice: str) -> None:
        if choice not in CHOICES:
            raise ValueError(f"on_nonfinite: expected one of {CHOICES}, got {choice!r}")
        self.choice = choice
        self.host_devices = frozenset({"cpu"})
        self._skipped = 0
        self._unread: _Unread | None = None
        self._failed: Sequence[Failure] | None = None  # of which the next step tells all ranks

    @property
    def skipped(self) -> int:
        """How many steps were left out so far; waits for the flag of the last one."""
        self.settle()
        return self._skipped

    def decide(
        self,
        grads: Iterable[Tensor],
        peers: Sequence[Ranks],
        failures: list[Failure] | None = None,
    ) -> Skip:
        """Return whether to leave the step out; a collective of each of `peers`.

        Args:
            grads: all gradients on this rank, in pieces of any shape; padding must be finite.
            peers: the ranks that hold parameters together, the same on each of them.
            failures: of units on this rank, in the step before; they raise on all ranks, and are
                taken out. None where no unit can fail, on any rank.

        Raises:
            RuntimeError: units of some rank have failed.
        """
        if self._failed is not None:
            failed, self._failed = self._failed, None
            raise self.failed(failed, peers)
        if self.choice == "ignore":
            if failures is None:  # nobody is asked
                return False
            grads = ()
        recent = list(failures or ())
        if failures:
            failures.clear()
        flag = _reduced(_verdict(grads, peers, recent), peers)
        if self.choice != "raise" and flag.device.type not in self.host_devices:
            self._unread = _Unread(flag, recent)
            return flag > 0 if self.choice == "skip" else False
        # Read by all ranks: those that know of no failure raise with the rest.
        worst = float(flag)
        if worst >= _FAILED:
            raise self.failed(recent, peers)
        skip = worst > 0
        if skip and self.choice == "skip":
            self._skipped += 1
        return skip

    def count(self, skip: Skip, steps: Tensor, advance: Tensor) -> None:
        """Add `advance` to `steps`, to be taken back if the device knows better."""
        if isinstance(skip, Tensor) and self._unread is not None:
            # And not their difference: a parameter may still leave the step.
            self._unread.steps, self._unread.before = steps, steps.clone()
        steps.add_(advance)

    def settle(self) -> None:
        """Read the flag of the last step, if only the device knew it."""
        if self._unread is None:
            return
        unread, self._unread = self._unread, None
        worst = unread.read()
        if worst >= _FAILED:
            # Raised by the next step: whoever looks at the optimizer may be alone.
            self._failed = unread.failures
        if worst > 0 and unread.steps is not None and unread.before is not None:
            self._skipped += worst < _FAILED
            unread.steps.copy_(unread.before)

    @staticmethod
    def failed(failures: Sequence[Failure], peers: Sequence[Ranks]) -> RuntimeError:
        """Return the error of units that failed, the same on every rank."""
        texts = [failure.text for failure in failures if failure.happened]
        for ranks in peers:
            of_ranks: list[list[str]] = [[]] * ranks.size
            dist.all_gather_object(of_ranks, texts, group=ranks.group())
            texts = list(dict.fromkeys(text for of_rank in of_ranks for text in of_rank))
        return RuntimeError(f"the update of some matrices failed: {'; '.join(texts)}")

    @staticmethod
    def error(names: list[str], peers: Sequence[Ranks]) -> RuntimeError:
        """Return the error of "raise", the same on every rank; `names` are those of this rank."""
        for ranks in peers:
            of_ranks: list[list[str]] = [[]] * ranks.size
            dist.all_gather_object(of_ranks, names, group=ranks.group())
            names = list(dict.fromkeys(name for of_rank in of_ranks for name in of_rank))
        return RuntimeError(
            f"infinite or NaN gradients of {', '.join(names)}; nothing was changed. Lower the "
            'learning rate, clip gradients, or pass on_nonfinite="skip" to leave such steps out'
        )


def undo(skip: Skip, old: Tensor, new: Tensor) -> None:
    """Write `old` over `new` where `skip`, a flag on some device, is set."""
    assert isinstance(skip, Tensor), "else nothing is written that has to be undone"
    torch.where(skip.to(new.device), old, new, out=new)


class _Unread:
    """A flag that the host has not read, on its way.

    Args:
        flag: 0-d, on a device.
        failures: that are in it, those of this rank.

    Attributes:
        steps: counts that advanced; None if they stay anyway.
        before: what they were.
    """

    def __init__(self, flag: Tensor, failures: Sequence[Failure]) -> None:
        self.failures = failures
        self.steps: Tensor | None = None
        self.before: Tensor | None = None
        self._flag, self._event = flag, None
        if flag.device.type != "cpu":
            self._flag = flag.to("cpu", non_blocking=True)  # pinned
            self._event = torch.accelerator.current_stream(flag.device).record_event()

    def read(self) -> float:
        """Return the flag; the event is of a step ago, and passed long since."""
        if self._event is not None:
            self._event.synchronize()
        return float(self._flag)


def _verdict(
    grads: Iterable[Tensor], peers: Sequence[Ranks], failures: Sequence[Failure]
) -> Tensor:
    """Return a 0-dim float32, 1 if some element is not finite, or 2 where units have failed, where
    the ranks can reduce it."""
    verdicts: list[Tensor] = []
    for grad in grads:
        if grad.numel():
            # Both read once and write nothing; a NaN is the largest and the smallest.
            finite = grad.amax().isfinite() & grad.amin().isfinite()
            verdicts.append(~finite)
    home = verdicts[0].device if verdicts else torch.device("cpu")
    if peers:
        home = torch.device(peers[0].device_type)
    flag = _any_of(verdicts, home).float()
    if failures:
        happened = [f.happened for f in failures if isinstance(f.happened, Tensor)]
        certain = any(f.happened is True for f in failures)
        worst = torch.full((), _FAILED, device=home) * (_any_of(happened, home) | certain)
        return torch.maximum(flag, worst)
    return flag


def _any_of(verdicts: Sequence[Tensor], home: torch.device) -> Tensor:
    if not verdicts:
        return torch.zeros((), dtype=torch.bool, device=home)
    return torch.stack([verdict.to(home) for verdict in verdicts]).any()


def _reduced(flag: Tensor, peers: Sequence[Ranks]) -> Tensor:
    """Return the largest flag of all ranks."""
    for ranks in peers:
        if ranks.size > 1:
            with waiting_for("the check of gradients for NaN and infinity", ranks.group()):
                dist.all_reduce(flag, dist.ReduceOp.MAX, group=ranks.group())
    return flag
