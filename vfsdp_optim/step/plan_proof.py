"""Proves that all ranks of an optimizer plan the same. Communicates once per set of ranks."""

from collections.abc import Callable, Sequence

from sharding.transport.agreement import check_same_on_all_ranks
from vfsdp_optim.parameters.param_shard import Ranks
from vfsdp_optim.step.member import Member


def check_agreement(
    members: Sequence[Member],
    structure_of: Callable[[Member], str],
    settings: str,
    replicas: Ranks | None,
    checked: dict[Ranks, str],
) -> None:
    """Compare what owners and waves follow from, once per set of ranks and after every change.

    A working set that was made again because memory moved, on this rank alone perhaps, has the same
    text and does not communicate.

    Args:
        members: of the optimizer.
        structure_of: returns what the matrices of a member follow from, as text.
        settings: of the optimizer, as text.
        replicas: the ranks of `process_group`.
        checked: by ranks, the text that was compared last; updated.

    Raises:
        RuntimeError: ranks differ, or no parameter is one that `process_group` is for.
    """
    if replicas and members and all(member.shard.ranks is not replicas for member in members):
        raise RuntimeError(
            "process_group is for plain parameters, of which every rank has a copy, and the "
            f"{len(members)} parameters of this optimizer are sharded; leave it out"
        )
    lines: dict[Ranks, list[str]] = {}
    for member in members:
        shard = member.shard
        if shard.ranks is not None:
            text = f"{member.fqn} {shard.text} {structure_of(member)}"
            lines.setdefault(shard.ranks, [settings]).append(text)
    for ranks, texts in lines.items():
        plan = "\n".join(texts)
        if checked.get(ranks) != plan:
            check_same_on_all_ranks(plan, ranks.group(), "the optimizer's plan")
            checked[ranks] = plan
