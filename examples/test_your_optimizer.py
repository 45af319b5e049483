"""A Muon that is wrong on row shards, and the test that finds it: run pytest on this file."""

import torch

from vfsdp_optim.testing import assert_sharded_equals_unsharded


class RowMuon(torch.optim.Optimizer):
    """Orthogonalizes the rows that this rank holds, as if they were the matrix."""

    @torch.no_grad()
    def step(self):  # noqa: D102
        for p in self.param_groups[0]["params"]:
            x, g = (t.to_local() if hasattr(t, "to_local") else t for t in (p, p.grad))
            g = g / g.norm().clamp(min=1e-7)
            for _ in range(5):
                a = g @ g.T
                g = 3.4445 * g + (-4.7750 * a + 2.0315 * a @ a) @ g
            x.sub_(g, alpha=0.02)


def test_row_muon():  # noqa: D103
    assert_sharded_equals_unsharded(
        lambda module: RowMuon(module.parameters(), {}), shapes=[(16, 8), (5, 12)], layouts="fsdp2"
    )
