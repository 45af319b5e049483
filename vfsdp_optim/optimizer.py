"""The optimizer that all algorithms share: groups, state, and one `step()`, sharded or not.

Touches local tensors; communicates once to compare plans, and in the exchange of matrices.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from sharding.fsdp.many_objects import collector_paused
from sharding.fsdp.proofs import record_update
from sharding.fsdp.transforms import uncompiled
from sharding.planning.structure import Demand
from vfsdp_optim.algorithm import PRECISION_KEYS, Algorithm, OnNonfinite, chosen_algorithm, spread
from vfsdp_optim.checkpoint.conversion import converted
from vfsdp_optim.checkpoint.saved import Checkpoint, packed
from vfsdp_optim.checkpoint.values import agreed, recast
from vfsdp_optim.parameters.given import GroupPlaces, check_current, distinct, named
from vfsdp_optim.parameters.group import Group, complete
from vfsdp_optim.parameters.param_shard import Ranks, local_tensor
from vfsdp_optim.plan import OptimizerPlan, make_plan
from vfsdp_optim.states.precision import check_params, check_precision, check_used
from vfsdp_optim.states.scratch import Scratch
from vfsdp_optim.step.admission import admit, demands_of
from vfsdp_optim.step.member import Member
from vfsdp_optim.step.nonfinite import NonfiniteRule, Skip
from vfsdp_optim.step.plan_proof import check_agreement
from vfsdp_optim.step.sharded_units import (
    LocalMatrices,
    ShardedMatrices,
    absent_gradients,
    make_parts,
)
from vfsdp_optim.step.units import jobs_by_ranks
from vfsdp_optim.step.working_set import WorkingSet, make_working_set

# With less, DeepSeek-V3's work on 1024 ranks is out of balance. Only what is needed is reserved.
MAX_EXCHANGE_BYTES = 1 << 31


class StructuredOptimizer(torch.optim.Optimizer):
    """A torch optimizer whose groups may use different algorithms, on plain or sharded parameters.

    A group chooses with the key `algorithm`, by name, or brings one: any `Algorithm` object. Each
    has its own defaults, so a group never inherits the learning rate or weight decay of another.
    `defaults` holds the keys of all algorithms in use, as torch's schedulers expect. A scheduler
    that cycles momentum writes `betas` of every group where a group has them, else `momentum`.

    State exists from the first look at `state` or `state_dict()` on, all zero before the first
    step, with the same keys before and after. Parameters without a gradient are skipped: no decay,
    no count, as in torch.

    Args:
        params: parameters, named parameters, or groups, as in torch.
        algorithm: of groups that name none.
        others: further algorithms that a group may name.
        max_exchange_bytes: memory on a rank for the matrices that travel at a time.
        on_nonfinite: "ignore", "skip" or "raise"; see [Note: skipped steps] in nonfinite.py.
        process_group: of ranks that hold a copy of every plain parameter each, with the same
            gradients, as in DistributedDataParallel. They divide the matrices among them.

    Raises:
        TypeError: `process_group` is no process group, or `params` is a module.
        ValueError: this rank is not in it, or another argument is out of range.
    """

    def __init__(
        self,
        params: ParamsT,
        algorithm: Algorithm,
        *others: Algorithm,
        max_exchange_bytes: int = MAX_EXCHANGE_BYTES,
        on_nonfinite: OnNonfinite = "ignore",
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        if not isinstance(max_exchange_bytes, int) or max_exchange_bytes < 1:
            raise ValueError(
                f"max_exchange_bytes: expected a positive number of bytes, got "
                f"{max_exchange_bytes!r}"
            )
        self._algorithms = {a.name: a for a in (algorithm, *others)}
        self._default_algorithm = algorithm.name
        self._max_exchange_bytes = max_exchange_bytes
        self._nonfinite = NonfiniteRule(on_nonfinite)
        self._replicas = None if process_group is None else Ranks.of_group(process_group)
        self._reset()
        if isinstance(params, nn.Module):
            raise TypeError(
                f"params: expected parameters or groups, got a {type(params).__name__}; pass "
                "model.named_parameters(), or vfsdp_optim.param_groups(model) to Muon"
            )
        super().__init__(params, dict(algorithm.defaults))
        check_used(algorithm.defaults, self.param_groups, type(self).__name__)

    def _reset(self) -> None:
        self._working_set: WorkingSet | None = None
        self._edited = False  # whether users are writing into the state
        self._loading: frozenset[Tensor] = frozenset()  # what gets state whether it trains or not
        self._checked_plans: dict[Ranks, str] = {}
        self._places = GroupPlaces()
        self._scratch = Scratch()

    # ---------------------------------------------------------------- groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; see the class for its keys.

        A parameter that is twice in the group is kept once, with a warning where torch has one.

        Raises:
            TypeError: `param_group` is no dict.
            ValueError: an unknown algorithm or key, a value out of range, or a parameter that the
                algorithm cannot treat.
            NotImplementedError: a request or a kind of DTensor that is not supported.
        """
        where = f"param group {len(self.param_groups)}"
        if not isinstance(param_group, Mapping):
            raise TypeError(
                f"{where}: expected a dict with 'params', got a {type(param_group).__name__}"
            )
        if "params" not in param_group:
            raise ValueError(f"{where}: has no 'params', only {sorted(map(str, param_group))}")
        group = Group(spread(param_group))
        choice = group.get("algorithm", self._default_algorithm)
        algorithm = chosen_algorithm(choice, self._algorithms, where)
        group["algorithm"] = algorithm.name
        own_keys = set(group.keys())
        algorithm.complete(group, where)
        group.follow(algorithm)
        check_precision(group, where)
        if not isinstance(group["params"], Tensor | set):  # for which the base class has rules
            group["params"] = distinct(list(group["params"]), where)
        # The base class would give the group every key of `defaults`, other algorithms' too.
        union, self.defaults = self.defaults, {}
        try:
            super().add_param_group(group)
        finally:
            self.defaults = union
        try:
            check_params(group, own_keys, where)
            limits = self._replicas, self._max_exchange_bytes
            admit(group, where, algorithm, *limits, self._has_state)
        except Exception:
            self.param_groups.pop()
            raise
        for key, value in algorithm.defaults.items():
            self.defaults.setdefault(key, value)
        if "betas" in self.defaults:
            for each in self.param_groups:
                each.setdefault("betas", self.defaults["betas"])

    def demands(self, param: Tensor) -> tuple[Demand, ...]:
        """Return the structure that state and step need of `param`; () if it is in no group.

        No step needs one of what is frozen.
        """
        number = self.group_of(param)
        if number is None:
            return ()
        group = self.param_groups[number]
        structure = self._algorithms[group["algorithm"]].structure(group, param.shape)
        return demands_of(structure, type(self).__name__, trains=self._has_state(param))

    def group_of(self, param: Tensor) -> int | None:
        """Return the number of the group that has this very parameter; None if none has."""
        place = self._places.find(self.param_groups, param)
        return None if place is None else place[0]

    def rebind(self, sharded: Mapping[Tensor, Tensor]) -> None:
        """Put parameters in the place of others, as `fully_shard(optimizer=...)` does.

        Args:
            sharded: parameter of a group -> what takes its place; foreign parameters are ignored.

        Raises:
            RuntimeError: a parameter has been stepped; its state belongs to the old layout.
        """
        found = [
            (old, new, self._places.find(self.param_groups, old)) for old, new in sharded.items()
        ]
        moves = [(old, new, *place) for old, new, place in found if place is not None]
        # Looked up only where there is one: to hash a tensor is Python.
        for param, _, g, i in moves if self._states else ():
            state = self._states.get(param, {})
            if any(bool(local_tensor(value).any()) for value in state.values()):
                _, fqn = list(named(self.param_groups[g], f"group {g}"))[i]
                raise RuntimeError(
                    f"{fqn} has optimizer state already and cannot be replaced; call "
                    "fully_shard before the first step, or build the optimizer after it"
                )
        for param, new, g, i in moves:
            if self._states:
                self._states.pop(param, None)
            self.param_groups[g]["params"][i] = new
            self._places.note(new, (g, i))
        self._working_set = None

    @property
    def algorithms(self) -> Mapping[str, Algorithm]:
        """The algorithms that groups may name; the first is that of groups that name none."""
        return self._algorithms

    @property
    def max_exchange_bytes(self) -> int:
        """Memory on a rank for the matrices that travel at a time."""
        return self._max_exchange_bytes

    @collector_paused()
    def plan(self) -> OptimizerPlan:
        """Return what a step does with each parameter, to print; communicates nothing."""
        working = self._current_working_set()
        members, groups = working.members, self.param_groups
        jobs = jobs_by_ranks(members, groups, self._algorithms, self._scratch)
        algorithms = [self._algorithm(member).name for member in working.members]
        return make_plan(working.members, algorithms, jobs, self._max_exchange_bytes)

    # ---------------------------------------------------------------- state

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """State by parameter, as in torch; the first look makes the zero state.

        What is written there, deleted or assigned holds from the next step or `state_dict()` on,
        which copies it into memory of its own. See [Note: state that users write] in
        standing_state.py.
        """
        if self._working_set is not None and not self._working_set.standing.holds(self._states):
            self._working_set = None  # frees what was replaced
            self._edited = True
        if not self._edited or not self._states:
            self._current_working_set()
        return self._states

    @state.setter
    def state(self, value: defaultdict[Tensor, Any]) -> None:
        self._states = value
        self._working_set = None
        self._edited = True

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy needs; its working set is found again."""
        return {
            **super().__getstate__(),
            "_algorithms": self._algorithms,
            "_default_algorithm": self._default_algorithm,
            "_max_exchange_bytes": self._max_exchange_bytes,
            "_nonfinite": self._nonfinite,
            "_replicas": self._replicas,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy."""
        state = dict(state)
        self._states = state.pop("state")
        self._reset()
        super().__setstate__(state)
        groups = [Group(group) for group in self.param_groups]
        for group in groups:
            group.follow(self._algorithms[group["algorithm"]])
        self.param_groups = list(groups)

    @uncompiled
    def state_dict(self) -> dict[str, Any]:
        """Return state and groups as torch does, of the parameters in groups; dtypes as text.

        Groups have torch's keys, and of others those that differ from what torch.optim does.
        torch's state-dict functions refuse dtypes among hyper-parameters, and torch itself a state
        whose parameter was taken out of its group.
        """
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        self._current_working_set()
        saved = packed(self.param_groups, self._states)
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            saved = post_hook(self, saved) or saved
        return saved

    @torch.no_grad()
    def convert_state_dict(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a saved state in the precision of this optimizer, for `load_state_dict`.

        Moments in 32 bits become 8-bit codes where this optimizer keeps codes, and the reverse;
        what is in its precision already is passed on. A master copy that is missing is made of the
        parameters. Takes state dicts of torch's AdamW and of bitsandbytes' too. A collective where
        tensors are cut in another layout than here.

        Raises:
            ValueError: the state does not fit in another way than by its precision.
        """
        members = self._current_working_set().members
        return converted(state_dict, self.param_groups, self._algorithms, members)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy a `state_dict()` into the state; all checks come before the first write.

        Parameters are matched by name where both sides have `param_names`, else by position as in
        torch; names come with it where the groups have none. States keep the dtype they were saved
        in. A sharded parameter takes full tensors, or pieces in any layout; in another layout than
        the parameter's, this is a collective.

        What is wrong with it on one rank is raised on all ranks that share parameters with it.

        Raises:
            ValueError: groups, names, ids, shapes, dtypes, state keys or values (NaN, out of range)
                do not fit, or a group differs in what its state means (`algorithm`, `matrices`).
            RuntimeError: a parameter or its state is on the meta device, or another rank refuses.
            TypeError: a part of `state_dict` is of another type than `state_dict()` has there.
            NotImplementedError: a DTensor on another mesh, or a group option that is not supported.
        """
        if isinstance(state_dict, Mapping):  # else refused on all ranks
            state_dict = dict(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = pre_hook(self, state_dict) or state_dict
        # Of copies each process may load alone.
        peers = [r for r in self._current_working_set().peers if r is not self._replicas]
        added: list[Tensor] = []
        try:
            with agreed(peers):
                checkpoint = Checkpoint(state_dict, self.param_groups, self._algorithms)
                added = [param for param in checkpoint.states if not self._states.get(param)]
                self._loading = frozenset(checkpoint.states)  # frozen since it was trained, too
                working = self._current_working_set()
                checkpoint.check_states(working)
                checkpoint.check_hyper_parameters(self.param_groups)
            with agreed(peers):
                values = checkpoint.read_states(working)
        except Exception:
            for param in added:
                self._states.pop(param, None)
            self._working_set = None
            raise
        finally:
            self._loading = frozenset()
        for group, loaded in zip(self.param_groups, checkpoint.hyper_parameters, strict=True):
            if "param_names" in loaded:
                self._working_set = None  # which says other names
            group.update(loaded)
        if recast(working.members, values, self._states) or self._working_set is None:
            working = self._current_working_set()
        for member, value in zip(working.members, values, strict=True):
            member.load(value.states)
            working.steps[member.number] = value.step
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    # ---------------------------------------------------------------- step

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @uncompiled
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update the parameters from their gradients; a collective if some are sharded.

        Args:
            closure: called once, with grad enabled, before the update.

        Returns:
            What `closure` returned.

        Raises:
            RuntimeError: a parameter is the original of one that was sharded; a gradient on some
                rank is infinite or NaN, with on_nonfinite="raise".
            TypeError: the gradient of a sharded parameter is not laid out as it is.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        check_current(self.param_groups)
        working = self._current_working_set()
        matrices = self._current_matrices(working)
        record_update(type(self).__name__, self.param_groups, working.logs)
        grads = working.looked_at.gradients()
        skip = self._decide(working, grads)
        if skip is not True:
            absent = absent_gradients(working.members, matrices, grads, working.steps)
            self._update_runs(working, grads, skip)
            for part in matrices:
                part.step(grads, skip, absent)
            # On ranks that hold nothing of them, too: all see that gathered weights are old.
            torch.autograd.graph.increment_version(working.sharded)
        return loss

    @property
    def skipped_steps(self) -> int:
        """How many steps on_nonfinite="skip" has left out, in this process."""
        return self._nonfinite.skipped

    def _decide(self, working: WorkingSet, grads: list[Tensor | None]) -> Skip:
        """Return whether on_nonfinite leaves the step out, or raise."""
        rule = self._nonfinite
        steps = working.steps.tolist() if rule.choice != "ignore" else ()
        pieces = (piece for runs in working.runs for piece in runs.gradients(grads, steps))
        skip = rule.decide(pieces, working.peers, working.failures)
        if rule.choice == "raise" and skip:
            names = [
                member.fqn
                for member, grad in zip(working.members, grads, strict=True)
                if grad is not None and not grad.isfinite().all()
            ]
            raise rule.error(names, working.peers)
        return skip

    def _update_runs(self, working: WorkingSet, grads: list[Tensor | None], skip: Skip) -> None:
        """Do the element-wise part of every group."""
        self._nonfinite.count(skip, working.steps, working.counts(grads))
        steps = working.steps.tolist()
        for runs in working.runs:
            group = self.param_groups[runs.group]
            algorithm = self._algorithms[group["algorithm"]]
            algorithm.update_runs(group, runs.of_step(grads, steps, skip), self._scratch)

    # ----------------------------------------------------------- working set

    def _algorithm(self, member: Member) -> Algorithm:
        return self._algorithms[self.param_groups[member.group]["algorithm"]]

    def _structural_keys(self, group: dict[str, Any]) -> tuple[str, ...]:
        return *PRECISION_KEYS, "keep_32bit", *self._algorithms[group["algorithm"]].structural_keys

    def _has_state(self, param: Tensor) -> bool:
        # torch steps whatever has a gradient, and keeps the state of what was frozen later.
        return (
            param.requires_grad
            or param.grad is not None
            or bool(self._states.get(param))
            or param in self._loading
        )

    def _working_set_key(self) -> object:
        return [
            (
                id(group),  # matrices read it
                [repr(group[key]) for key in self._structural_keys(group)],
                list(map(id, group["params"])),
                [p.requires_grad or self._has_state(p) for p in group["params"]],
            )
            for group in self.param_groups
        ]

    def _current_working_set(self) -> WorkingSet:
        """Return the working set, made again if parameters came, went or moved in memory, or if
        users wrote into the state."""
        self._nonfinite.settle()
        complete(self.param_groups, self._algorithms.values())
        working = self._working_set
        if (
            working is None
            or not working.standing.holds(self._states)
            or working.key != self._working_set_key()
            or working.looked_at.moved()
        ):
            self._working_set, self._edited = None, True  # until it is right
            limits = self._replicas, self._max_exchange_bytes, self._scratch
            working = make_working_set(
                self.param_groups, self._algorithms, *limits, self._states, self._has_state
            )
            working.key = self._working_set_key()  # parameters have state from here on
            self._working_set, self._edited = working, False
        return working

    def _current_matrices(self, working: WorkingSet) -> list[LocalMatrices | ShardedMatrices]:
        """Return the matrix part; the first call for a working set compares it between ranks."""
        if working.matrices is None:
            check_agreement(
                working.members,
                self._structure_of,
                f"max_exchange_bytes={self._max_exchange_bytes} "
                f"on_nonfinite={self._nonfinite.choice}",
                self._replicas,
                self._checked_plans,
            )
            working.matrices = make_parts(
                working.members,
                self.param_groups,
                self._algorithms,
                self._max_exchange_bytes,
                self._scratch,
            )
        return working.matrices

    def _structure_of(self, member: Member) -> str:
        """Return the group keys that a member's matrices and states follow from, as text."""
        group = self.param_groups[member.group]
        texts = [f"{key}={group[key]!r}" for key in self._structural_keys(group)]
        return " ".join([*texts, f"owners={member.owners}"])
