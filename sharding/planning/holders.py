"""What owners are chosen for: a unit's size, its cost, and who holds it. Pure integers."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Grid:
    """The ranks of a group, as `replicas` copies of `shards` pieces each.

    Ranks of a mesh are numbered row by row; one axis of it is that of the shards, all others are
    replicas. Of a (replicas, shards) mesh, as HSDP has, the ranks of one copy follow each other.

    Attributes:
        shards: ranks that hold one copy together.
        replicas: copies.
        stride: distance between the ranks of neighbouring shards.

    Example:
        >>> grid = Grid(shards=3, replicas=2)
        >>> [[grid.rank(replica, shard) for shard in range(3)] for replica in range(2)]
        [[0, 1, 2], [3, 4, 5]]
    """

    shards: int
    replicas: int = 1
    stride: int = 1

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.shards * self.replicas

    def rank(self, replica: int, shard: int) -> int:
        """Return the rank that holds `shard` of copy `replica`."""
        outer, inner = divmod(replica, self.stride)
        return (outer * self.shards + shard) * self.stride + inner

    def coordinates(self, rank: int) -> tuple[int, int]:
        """Return (replica, shard) of a rank."""
        rest, inner = divmod(rank, self.stride)
        outer, shard = divmod(rest, self.shards)
        return outer * self.stride + inner, shard


@dataclass(frozen=True, slots=True)
class HeldUnit:
    """One unit (a matrix or a panel) and where its elements are stored.

    Attributes:
        fqn: name of the parameter the unit belongs to.
        index: number of the unit within that parameter.
        numel: elements of the unit.
        cost: work to compute its update, in multiply-adds.
        holders: (shard, elements held) of one copy, shards ascending; without a grid, shards are
            ranks. Shard after shard holds consecutive elements.
        grid: the ranks of every copy; None where there is one copy.
        state_numel: elements of the states that its owner keeps.
        owner: the rank that has these states already, and so computes it; None where none has.
        period: steps after which it has the same to do again.
        due: (step of the period, work in it) of what is not done in each step; `cost` has the mean
            of it. See [Note: turns] in turns.py.
    """

    fqn: str
    index: int
    numel: int
    cost: int
    holders: tuple[tuple[int, int], ...]
    grid: Grid | None = None
    state_numel: int = 0
    owner: int | None = None
    period: int = 1
    due: tuple[tuple[int, int], ...] = ()

    @property
    def replicas(self) -> int:
        """Copies of the unit."""
        return 1 if self.grid is None else self.grid.replicas

    @property
    def is_resident(self) -> bool:
        """Whether it has one copy, whole on one rank, so that nothing moves for it."""
        return len(self.holders) == 1 and self.replicas == 1

    @property
    def steady_cost(self) -> int:
        """Work that it has in every step."""
        return self.cost - sum(work for _, work in self.due) // self.period

    def stays(self, owner: int) -> bool:
        """Return whether nothing of it travels to this owner, nor back."""
        return not self.holders or (self.is_resident and self.holders[0][0] == owner)

    def replica_of(self, rank: int) -> int:
        """Return the copy that `rank` belongs to."""
        return 0 if self.grid is None else self.grid.coordinates(rank)[0]

    def held_by(self, rank: int) -> int:
        """Return how many elements of the unit `rank` holds."""
        grid = self.grid
        shard = rank if grid is None else rank // grid.stride % grid.shards
        for holder, held in self.holders:  # a loop: this is asked for every unit of a model
            if holder == shard:
                return held
        return 0

    def pieces(self, replica: int = 0) -> tuple[tuple[int, int, int], ...]:
        """Return (rank, start, stop) of what each holder of a copy has, within the unit."""
        result, start = [], 0
        for shard, held in self.holders:
            rank = shard if self.grid is None else self.grid.rank(replica, shard)
            result.append((rank, start, start + held))
            start += held
        return tuple(result)

    def all_pieces(self) -> tuple[tuple[int, int, int], ...]:
        """Return the pieces of every copy, ranks ascending."""
        copies = (self.pieces(replica) for replica in range(self.replicas))
        return tuple(sorted(piece for copy in copies for piece in copy))

    def gathered(self, owner: int) -> int:
        """Return how many elements travel to an owner; they come from its own copy."""
        return self.numel - self.held_by(owner)

    def returned(self, owner: int) -> int:
        """Return how many elements of the update travel to the holders of all copies."""
        return self.replicas * self.numel - self.held_by(owner)

    def least_slot(self, *, two_ways: bool) -> int:
        """Return the elements of the slots of its owner: what arrives, and what returns.

        Args:
            two_ways: as in `slot_use`.
        """
        return self.numel * (1 + self.replicas) if two_ways else self.numel

    def way_pieces(self, owner: int, *, copies: bool) -> tuple[tuple[int, int, int], ...]:
        """Return (rank, start, stop) of what an owner is sent, or of all `copies`, which it returns
        to; its own pieces, which do not travel, among them."""
        return self.all_pieces() if copies else self.pieces(self.replica_of(owner))

    def slot_use(self, owner: int, *, two_ways: bool) -> list[tuple[int, int]]:
        """Return (rank, elements) of the slots that the unit takes up while it travels.

        Args:
            owner: rank that computes it.
            two_ways: whether the way back has slots of its own, as it has where units have copies.
        """
        copy = self.way_pieces(owner, copies=False)
        there = [(rank, stop - start) for rank, start, stop in copy if rank != owner]
        there.append((owner, self.numel))
        if not two_ways:
            return there
        all_copies = self.way_pieces(owner, copies=True)
        back = [(rank, stop - start) for rank, start, stop in all_copies if rank != owner]
        back.append((owner, self.replicas * self.numel))
        return there + back
