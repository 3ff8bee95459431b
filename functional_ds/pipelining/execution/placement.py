"""``Placed``: which rank of a pipeline has which leaves."""

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import attrs
import optree
import torch
from torch import Tensor

from functional_ds import comm
from functional_ds.base import tree
from functional_ds.base.marks import freeze, is_trainable, like_marked, mark_part, part_of
from functional_ds.pipelining.schedules.action import Action
from functional_ds.pipelining.schedules.lower import receives_early
from functional_ds.pipelining.schedules.schedule import Schedule
from functional_ds.pipelining.stages.stages import Stages
from functional_ds.sharding.leaf_map import LeafMap
from functional_ds.step.step import Step

from .boundary import Blank, Crossing

__all__ = ["Part", "Placed"]


@attrs.frozen
class Part:
    """Leaves that the same stages use.

    Attributes:
        ranks: those that hold it, ascending; all sum its gradients, and the first one's counts.
    """

    name: str
    stages: tuple[int, ...]
    ranks: tuple[int, ...]
    paths: tuple[str, ...]


@attrs.define(eq=False)
class Known:
    """What crosses between the stages, by step and what else it depends on; parts' leaves, by step and name; and rows.

    Found once, and no part of a state's structure; a pickled one comes back empty.
    """

    crossing: "WeakKeyDictionary[Step, dict[Any, Crossing]]" = attrs.field(factory=WeakKeyDictionary)
    leaves: "WeakKeyDictionary[Step, dict[str, dict[str, Blank]]]" = attrs.field(factory=WeakKeyDictionary)
    rows: dict[tuple[Schedule, int], list[tuple[Action, ...]]] = attrs.field(factory=dict)

    def row(self, schedule: Schedule, rank: int, *, lead: int) -> list[tuple[Action, ...]]:
        """The steps of this rank in a schedule, receives ``lead`` compute actions early."""
        key = schedule, lead
        if key not in self.rows:
            steps = list(schedule.steps(rank))
            self.rows[key] = receives_early(steps, lead) if lead else steps
        return self.rows[key]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Known)

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> Any:
        return Known, ()


@tree.record
class Placed:
    """pipeline's slot in the state: all leaves' paths, parts by the stages that use them, and the ranks that hold those.

    Attributes:
        spec: of the user's tree.
        paths: its leaves', in order.
    """

    spec: optree.PyTreeSpec = tree.static()
    paths: tuple[str, ...] = tree.static()
    partition: tuple[Part, ...] = tree.static()
    known: Known = tree.static()

    @staticmethod
    def of(params: Any, stages: Stages, placement: Sequence[int]) -> "Placed":
        """Leaves with the ranks whose stages use them.

        Raises:
            ValueError: the stages use leaves that the params do not have, or the other way round.
        """
        paths = tuple(path for path, _ in tree.named(params))
        users: dict[str, list[int]] = {path: [] for path in tree.as_written(params)}
        for index, stage in enumerate(stages):
            for path in stage.paths:
                if path not in users:
                    raise ValueError(
                        f"params: stage {index} ({stage.name}) uses {path!r}, which they do not have; they have "
                        f"{', '.join(paths[:8])}...; init takes the params of the stages: put pipeline after zero"
                    )
                users[path].append(index)
        idle = [path for path, used in users.items() if not used]
        if idle:
            raise ValueError(f"params: no stage uses {', '.join(idle)}; init takes the params that the stages were made for")
        groups: dict[tuple[int, ...], list[str]] = {}
        for path, used in users.items():
            groups.setdefault(tuple(used), []).append(path)
        parts = [
            Part(_title(used), used, tuple(sorted({placement[s] for s in used})), tuple(held)) for used, held in groups.items()
        ]
        alone = {used for used in groups if len(used) == 1}
        empty = [Part(_title((s,)), (s,), (placement[s],), ()) for s in range(len(stages)) if (s,) not in alone]
        return Placed(tree.structure(params), paths, tuple(sorted((*parts, *empty), key=lambda part: part.stages)), Known())

    def parts_of(self, stage: int) -> list[Part]:
        """A stage's: first its own, then what it shares."""
        return sorted((part for part in self.partition if stage in part.stages), key=lambda part: len(part.stages) > 1)

    def here(self, rank: int) -> list[Part]:
        """A rank's."""
        return [part for part in self.partition if rank in part.ranks]

    def own(self, params: Any, rank: int) -> dict[str, Tensor]:
        """A rank's leaves by path, each marked with its part."""
        leaves = dict(tree.named(params))
        own = {path: (leaves[path], part.name) for part in self.here(rank) for path in part.paths}
        return {path: mark_part(leaf, ", ".join(filter(None, (name, part_of(leaf))))) for path, (leaf, name) in own.items()}

    def elsewhere(self, parts: LeafMap, rank: int) -> LeafMap:
        """A rank's parts, who know that there are other leaves."""
        mine = {path for part in self.here(rank) for path in part.paths}
        return attrs.evolve(parts, other_paths=tuple(path for path in self.paths if path not in mine))

    def copies(self, parts: LeafMap, rank: int) -> set[int]:
        """Which of the tensors that the optimizer gets hold leaves that count on another rank."""
        copied = {path for part in self.here(rank) if part.ranks[0] != rank for path in part.paths}
        return {p.tensor for pieces in parts.shards_by_rank for p in pieces if parts.leaves[p.leaf].path in copied}

    def gathered(self, own: Mapping[str, Tensor], group: comm.Group, device: torch.device) -> Any:
        """The user's tree, whole on every rank; sends each leaf from the first rank that has it."""
        shapes: dict[str, tuple[Any, ...]] = {}
        mine = {path: (list(leaf.shape), leaf.dtype, is_trainable(leaf)) for path, leaf in own.items()}
        for told in comm.all_gather_object(mine, group):
            shapes.update(told)
        holder = {path: part.ranks[0] for part in self.partition for path in part.paths}
        leaves = []
        for path in self.paths:
            shape, dtype, trained = shapes[path]
            blank = own[path] if path in own else torch.empty(shape, dtype=dtype, device=device)
            blank = blank if trained == is_trainable(blank) else freeze(blank)
            leaves.append(like_marked(comm.broadcast(blank.detach(), holder[path], group), blank))
        return tree.unflatten(self.spec, leaves)


def _title(stages: Sequence[int]) -> str:
    return f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"
