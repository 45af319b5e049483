"""Which part of a range each rank holds: every range of small cuts, element by element."""

from itertools import accumulate, product

from sharding.planning.cuts import held_parts, piece_runs


def test_parts_of_a_range_are_what_ranks_hold_of_its_elements() -> None:
    for sizes in product((0, 1, 3), repeat=4):
        stops = list(accumulate(sizes))
        holder = [rank for rank, size in enumerate(sizes) for _ in range(size)]
        for start in range(stops[-1] + 1):
            for stop in range(start, stops[-1] + 3):  # beyond the end, too
                expected = []
                for rank in sorted(set(holder[start:stop])):
                    held = [x for x in range(start, min(stop, stops[-1])) if holder[x] == rank]
                    expected.append((rank, held[0], held[-1] + 1))
                assert held_parts(piece_runs(sizes), start, stop) == expected


def test_runs_are_few_at_any_number_of_ranks() -> None:
    assert piece_runs([5] * 16384 + [2, 0, 0]) == ((5, 16384), (2, 1), (0, 2))
    assert held_parts(((5, 16384), (2, 1)), 81918, 81922) == [
        (16383, 81918, 81920),
        (16384, 81920, 81922),
    ]
