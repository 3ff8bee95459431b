"""The training state: everything that a resumed run needs, as one pytree; and the leaves that no loss has used."""

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import attrs
import optree
import torch
from torch import Tensor

from functional_ds.base import tree
from functional_ds.base.device import arriving
from functional_ds.base.marks import like_marked
from functional_ds.base.prng import Key
from functional_ds.base.torch_private import has_values
from functional_ds.comm.worlds.current import recorder
from functional_ds.sharding.leaf_map import LeafMap
from functional_ds.sharding.leaf_selection import Unused


class DonatedStateError(RuntimeError):
    """Raised when a state is used after a step has taken its memory."""


class UpdateError(RuntimeError):
    """Raised when an update failed and changed nothing: the state passed to the step stays valid, donated or not."""


@attrs.define(eq=False)
class SeenGraphs:
    """Which autograd graphs were inspected for lost gradients; it changes no value, and is not saved.

    Attributes:
        kinds: of each: its number of nodes, or which leaves it leaves without a gradient.
        passes: those that custom loops have opened.
        metrics: the names of the metrics of each step, in training and in evaluations.
    """

    kinds: set[Any] = attrs.field(factory=set)
    passes: "weakref.WeakSet[Any]" = attrs.field(factory=weakref.WeakSet, repr=False)
    metrics: "weakref.WeakKeyDictionary[Any, dict[str, list[str]]]" = attrs.field(factory=weakref.WeakKeyDictionary, repr=False)

    def is_new(self, graph: Any) -> bool:
        """Whether no such graph was seen so far; records it."""
        if graph in self.kinds:
            return False
        self.kinds.add(graph)
        return True

    def __eq__(self, other: object) -> bool:
        """Always true: states of one structure may differ in it."""
        return isinstance(other, SeenGraphs)

    def __hash__(self) -> int:
        return 0

    def __deepcopy__(self, memo: Any) -> "SeenGraphs":
        return SeenGraphs({*self.kinds})

    def __reduce__(self) -> Any:
        return SeenGraphs, ()


@tree.record
class State:
    """A step's state.

    Attributes:
        params: the stored params: the user's tree, or what a transform stores instead.
        optimizer: the optimizer's state.
        step: the number of updates so far, an int64 scalar.
        key: the source of random draws; None while evaluating.
        slots: what each transform keeps, by the name of its slot, and ``"buffers"``: module buffers.
        skip: within a step, after ``reduce``: a bool scalar, whether the update leaves params, optimizer and step unchanged.
            None for never.
        finite: within a step, after ``reduce``: whether the gradients were finite; None without a loss scale.
        idle: for each leaf that some losses did not use: how many updates skipped it, by path; int64, on the host.
        reduced: within a step: False in ``gradients``, whose sums may be this rank's only, and True once ``reduce`` has run.
        unused: within a step: the paths of the trained leaves that the loss has not used so far, after ``reduce`` on no rank.
            None before any gradient, and if all were used.
        batch: the structure of the batches so far; None before the first.
        graphs: the graphs of losses that were inspected.

    >>> import torch, functional_ds as fds
    >>> step = fds.train_step(lambda params, x: (params["w"] * x).sum(), fds.sgd(0.5))
    >>> state, _ = step(step.init({"w": torch.ones(2)}), torch.ones(2))
    >>> state.step.item(), state.params["w"].tolist(), dict(state.slots)
    (1, [0.5, 0.5], {})
    """

    params: Any
    optimizer: Any
    step: Tensor
    key: Key | None
    slots: dict[str, Any]
    skip: Tensor | None = None
    finite: Tensor | None = None
    idle: dict[str, Tensor] = attrs.field(factory=dict)
    reduced: bool | None = tree.static(default=None)
    unused: frozenset[str] | None = tree.static(default=None)
    batch: optree.PyTreeSpec | None = tree.static(default=None)
    graphs: SeenGraphs = tree.static(default=attrs.Factory(SeenGraphs))

    def donate(self, after: "State | None" = None) -> "State":
        """The same state, or ``after``, which may share tensors with it, as a new value; the originals cannot be used any more.

        This and ``restore`` are the only methods that change a record.
        """
        heir = tree.replace(self if after is None else after)
        for spent in (self, after):
            if spent is not None:
                spent.__dict__.clear()
        return heir

    def restore(self, before: "State") -> None:
        """Undoes a donation: ``before`` is what this state was."""
        self.__dict__.update(before.__dict__)

    def clone(self, *, keeps_graph: bool = False) -> "State":
        """A copy that shares no memory; with ``keeps_graph`` gradients flow through it."""

        def copied(leaf: Any) -> Any:
            return like_marked((leaf if keeps_graph else leaf.detach()).clone(), leaf) if isinstance(leaf, Tensor) else leaf

        return tree.map(copied, self)  # type: ignore[no-any-return]

    def put(self, **slots: Any) -> "State":
        """A copy with these slots set."""
        return tree.replace(self, slots={**self.slots, **slots})

    def begins(self) -> bool:
        """Whether this is the first training pass on values, which is inspected for writes of the loss into params."""
        return has_values(self.step) and self.graphs.is_new("writes of the loss")

    def __repr__(self) -> str:
        if not self.__dict__:
            return "State(donated)"
        leaves = [leaf for leaf in tree.leaves(self) if isinstance(leaf, Tensor)]
        size = sum(leaf.numel() * leaf.element_size() for leaf in leaves)
        count = len(tree.leaves(self.params))
        done = int(self.step) if has_values(self.step) else "?"
        return f"State(step={done}, {count} stored params, {size:,} bytes in all, slots: {', '.join(self.slots) or 'none'})"

    def _repr_html_(self) -> str:
        from functional_ds.comm.record.notebook import html_table, html_text

        if not self.__dict__:
            return html_text(repr(self))
        kinds = {"params": self.params, "optimizer": self.optimizer, **{f"slots[{k!r}]": v for k, v in self.slots.items()}}
        return html_table(["", "tensors", "dtypes", "bytes"], [(k, *_row(v)) for k, v in kinds.items()], caption=repr(self))

    def __getattr__(self, name: str) -> Any:
        # Called only for missing attributes: a missing field means that the state was donated.
        if name in State.__annotations__:
            raise DonatedStateError(
                f"state.{name}: this state was donated to a step, which reuses its memory; continue with the state that the "
                "step returned, or call step(state, batch, donate=False) to keep both"
            )
        raise AttributeError(name)

    @staticmethod
    def fresh(params: Any, optimizer: Any, seed: int | Tensor) -> "State":
        """The state before the first update."""
        tensors = [x for x in tree.leaves(params) if isinstance(x, Tensor)]
        device = tensors[0].device if tensors else torch.device("cpu")
        return State(params, optimizer, torch.zeros((), dtype=torch.int64, device=device), Key.of(seed), {})


_DONATED = "_fds_donated"


def mark_donated(state: State) -> None:
    """Marks the count of updates, which only aliases of the state share, with a tensor that is gone."""
    first = _first_param(state)
    if first is not None:
        setattr(state.step, _DONATED, weakref.ref(first))


def _first_param(state: State) -> Tensor | None:
    return next((leaf for leaf in tree.leaves(state.params) if isinstance(leaf, Tensor)), None)


def refuse_donated(state: State) -> None:
    """Raises an error for an alias of a donated state, as ``copy.copy`` and ``state.put`` make them.

    Raises:
        DonatedStateError: it is one.
    """
    donated = getattr(state.step, _DONATED, None)
    if donated is not None and (first := _first_param(state)) is not None and donated() is first:
        raise DonatedStateError(
            "state: it shares its tensors with a state that was donated to a step, which has reused their memory; continue "
            "with the state that the step returned, or call step(state, batch, donate=False), or state.clone() before the step"
        )


def refuse_open(state: State) -> None:
    """Raises an error if a state with an open pass would be donated, whose backward would then use other params.

    Raises:
        ValueError: there is such a pass.
    """
    if any(one.runs_on(state) for one in state.graphs.passes):
        raise ValueError(
            "state: another pass of it is still open, and its backward would find the params that the update writes into their "
            "memory; close it, run its backward first, or keep the state: finish(state, grads, donate=False)"
        )


def _row(held: Any) -> tuple[int, str, str]:
    leaves = [leaf for leaf in tree.leaves(held) if isinstance(leaf, Tensor)]
    dtypes = ", ".join(sorted({str(leaf.dtype).removeprefix("torch.") for leaf in leaves}))
    size = sum(leaf.numel() * leaf.element_size() for leaf in leaves)
    return len(leaves), dtypes, f"{size:,}"


# -- trained leaves that no rank's loss has used: detected, agreed on, and counted, so that optimizers skip them -------------


class Summing(Protocol):
    """The part of a step by which ranks agree."""

    @property
    def skips_unused(self) -> bool: ...

    def leaf_map(self, state: State) -> LeafMap: ...

    def sum_over_ranks(self, state: State, scalars: Any) -> Any: ...

    @property
    def sums(self) -> bool: ...


def with_unused(step: Summing, state: State, places: Iterable[int]) -> State:
    """The state after a backward pass that gave no gradient to the leaves at these places of the leaf map.

    A leaf that another pass of the same optimizer step has used stays used.
    """
    unused = list(places)
    leaves = step.leaf_map(state).leaves if unused else ()
    return without(state, frozenset(leaves[place].path for place in unused))


def without(state: State, paths: frozenset[str]) -> State:
    """The state after a backward pass that gave no gradient to the leaves of these paths."""
    return tree.replace(state, unused=paths if state.unused is None else state.unused & paths)


def summed_over_ranks(step: Summing, state: State, scalars: Any) -> tuple[Any, ...]:
    """A step's scalars summed over the ranks, and the paths of the trained leaves that none of them used, or None.

    Cost: 4 more bytes per leaf in the sum of the metrics. A rank whose loss used all its leaves does not wait for the result.
    """
    unused = state.unused
    if not step.skips_unused or unused is None or not step.sums:
        return (*step.sum_over_ranks(state, scalars), unused if unused and step.skips_unused else None)
    if unused and recorder().records:
        raise RuntimeError(
            f"the loss does not use {', '.join(map(repr, sorted(unused)[:3]))}, and whether another rank does is read on the "
            "host in every step: give them gradients of zero with fds.train_step(..., unused='zeros')"
        )
    leaf_map = step.leaf_map(state)
    leaves, device = leaf_map.leaves, state.step.device
    paths: Sequence[str] = ()
    if unused or leaf_map.other_paths:  # with those that other ranks of a pipeline hold, in one order on all ranks
        here = {leaf.path for leaf in leaves}
        paths = sorted(here.union(leaf_map.other_paths))
        used = arriving(torch.tensor([float(path in here and path not in unused) for path in paths]), device)
    else:
        used = torch.ones(len(leaves), device=device)
    *scalars, users = step.sum_over_ranks(state, (*scalars, used))
    if not unused or not has_values(users):
        return (*scalars, None)
    nobody = {path for path, count in zip(paths, users.tolist(), strict=True) if not count}
    return (*scalars, unused & nobody or None)


def unused_leaves(step: Summing, state: State) -> Unused | None:
    """What an optimizer must know of unused leaves; None if the loss has used all of them in every step."""
    if not step.skips_unused or not (state.unused or state.idle):
        return None
    return Unused(state.unused or frozenset(), {path: int(count) for path, count in state.idle.items()})


def with_idle(state: State, unused: frozenset[str] | None, before: Any) -> State:
    """The state after an update that has left these leaves unchanged, unless it was skipped, with the step as before."""
    if not unused:
        return state
    idle = dict(state.idle)
    if int(state.step) > int(before):
        idle |= {path: idle.get(path, torch.zeros((), dtype=torch.int64)) + 1 for path in sorted(unused)}
    return tree.replace(state, unused=None, idle=idle)
