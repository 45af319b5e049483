"""What an optimizer does about infinite and NaN gradients. Reads gradients; communicates one flag.

[Note: skipped steps]
One flag says whether any gradient on any rank is not finite; it is reduced once for each process
group, so that all ranks take the same decision. On the CPU the host reads it before anything is
written. On other devices `skip` does not wait for it: kernels run, and wherever the flag is set
their results are replaced by the values from before, run by run (`Run.chunks`) and matrix by matrix
(`Job.apply`). Step counts are kept on the host: they advance at once, and are taken back when the
flag, copied to pinned memory meanwhile, is read at the next look at the optimizer. `raise` has to
read the flag in the step on every device, and so has every choice where units have states and can
fail: the flag says that too. Where no parameter is sharded and no group of replicas is given there
is nobody to ask: each process decides for itself, and processes with equal gradients alike.
"""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from vfsdp_optim.parameters.param_shard import Ranks

# Whether to leave a step out: known to the host, or a 0-dim bool that only the device knows.
Skip = bool | Tensor
CHOICES = ("ignore", "skip", "raise")
_FAILED = 2.0  # the flag of a rank on which units have failed


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
        self._unread: tuple[Tensor, torch.Event | None, Tensor, Tensor] | None = None

    @property
    def skipped(self) -> int:
        """How many steps were left out so far; waits for the flag of the last one."""
        self.settle()
        return self._skipped

    def decide(
        self, grads: Iterable[Tensor], peers: Sequence[Ranks], failures: Sequence[str] | None = None
    ) -> Skip:
        """Return whether to leave the step out; a collective of each of `peers`.

        Args:
            grads: all gradients on this rank, in pieces of any shape; padding must be finite.
            peers: the ranks that hold parameters together, the same on each of them.
            failures: of units on this rank, in the step before; they raise on all ranks. None where
                no unit can fail, on any rank.

        Raises:
            RuntimeError: units of some rank have failed.
        """
        if self.choice == "ignore":
            if failures is None:  # nobody is asked
                return False
            grads = ()
        flag = _reduced(_any_nonfinite(grads, peers, failed=bool(failures)), peers)
        # Read by all ranks or by none: those that know of no failure would not raise with the rest.
        if failures is not None and float(flag) >= _FAILED:
            raise self.failed(failures, peers)
        if self.choice == "ignore":
            return False
        flag = flag > 0
        if self.choice == "skip" and flag.device.type not in self.host_devices:
            return flag
        skip = bool(flag)
        if skip and self.choice == "skip":
            self._skipped += 1
        return skip

    def count(self, skip: Skip, steps: Tensor, advance: Tensor) -> None:
        """Add `advance` to `steps`, to be taken back if the device knows better."""
        before = steps.clone()  # and not their difference: a parameter may still leave the step
        steps.add_(advance)
        if isinstance(skip, Tensor):
            event = None
            if skip.device.type != "cpu":
                host_flag = skip.to("cpu", non_blocking=True)  # pinned
                event = torch.accelerator.current_stream(skip.device).record_event()
            else:
                host_flag = skip
            self._unread = host_flag, event, steps, before

    def settle(self) -> None:
        """Read the flag of the last step, if only the device knew it."""
        if self._unread is None:
            return
        host_flag, event, steps, before = self._unread
        self._unread = None
        if event is not None:
            event.synchronize()  # of a step ago: passed long since
        if host_flag:
            self._skipped += 1
            steps.copy_(before)

    @staticmethod
    def failed(failures: Sequence[str], peers: Sequence[Ranks]) -> RuntimeError:
        """Return the error of units that failed, the same on every rank."""
        texts = list(failures)
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


def _any_nonfinite(
    grads: Iterable[Tensor], peers: Sequence[Ranks], *, failed: bool = False
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
    on_home = [verdict.to(home) for verdict in verdicts]
    if failed:
        return torch.full((), _FAILED, device=home)
    return (torch.stack(on_home).any() if on_home else torch.zeros((), device=home)).float()


def _reduced(flag: Tensor, peers: Sequence[Ranks]) -> Tensor:
    """Return the largest flag of all ranks."""
    for ranks in peers:
        if ranks.size > 1:
            dist.all_reduce(flag, dist.ReduceOp.MAX, group=ranks.group())
    return flag
