"""Property tests for sharded optimizers: any optimizer against its unsharded self."""

from vfsdp_optim.testing.equality import (
    assert_program_is_exact,
    assert_resume_is_exact,
    assert_sharded_equals_unsharded,
)
from vfsdp_optim.testing.ops import assert_op_cut_invariant
from vfsdp_optim.testing.pool import RankError, RankPool, run_ranks
from vfsdp_optim.testing.strategies import (
    gradient_streams,
    layouts,
    parameter_sets,
    step_programs,
)
from vfsdp_optim.testing.training import assert_training_matches

__all__ = [
    "RankError",
    "RankPool",
    "assert_op_cut_invariant",
    "assert_program_is_exact",
    "assert_resume_is_exact",
    "assert_sharded_equals_unsharded",
    "assert_training_matches",
    "gradient_streams",
    "layouts",
    "parameter_sets",
    "run_ranks",
    "step_programs",
]
