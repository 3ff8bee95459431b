"""``Placement``: which rank of a pipeline holds which leaves."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import attrs
import optree
import torch
from torch import Tensor

from functional_ds import comm
from functional_ds.base import tree
from functional_ds.base.marks import freeze, is_trainable, like_marked, mark_part
from functional_ds.optim.kernels import widest
from functional_ds.pipelining.schedules.action import Action
from functional_ds.pipelining.schedules.lower import receives_early
from functional_ds.pipelining.schedules.schedule import Schedule
from functional_ds.pipelining.stages.stages import Stages
from functional_ds.sharding.leaf_map import LeafMap
from functional_ds.step.step import Step

from .boundary import Crossing, TensorMeta


@attrs.frozen
class StageParams:
    """The leaves that only one stage uses, or that the same several stages share.

    Attributes:
        name: for reports: ``stage 0``, ``stages 0, 3``.
        stages: those that use them, ascending.
        ranks: those that hold them, ascending. All ranks sum their gradients; norms and files use the first rank's.
        paths: of the leaves.
    """

    name: str
    stages: tuple[int, ...]
    ranks: tuple[int, ...]
    paths: tuple[str, ...]


@attrs.define(eq=False)
class PipelineCache(tree.Uncompared):
    """Cached facts about a pipeline's stages. It is not compared with a state's structure, and is pickled empty.

    Attributes:
        crossing: what is sent between the stages, by step and by what else it depends on.
        leaves: the leaves of each part of the params, without values, by step and the part's name.
        rows: this rank's steps, by schedule and lead.
        given: all ranks' leaves without values, as in the params; recorded on shapes only.
    """

    crossing: "WeakKeyDictionary[Step, dict[Any, Crossing]]" = attrs.field(factory=WeakKeyDictionary)
    leaves: "WeakKeyDictionary[Step, dict[str, dict[str, TensorMeta]]]" = attrs.field(factory=WeakKeyDictionary)
    rows: dict[tuple[Schedule, int], list[tuple[Action, ...]]] = attrs.field(factory=dict)
    given: dict[str, TensorMeta] = attrs.field(factory=dict)

    def row(self, schedule: Schedule, rank: int, *, lead: int) -> list[tuple[Action, ...]]:
        """This rank's steps in a schedule, with receives posted ``lead`` compute actions early."""
        key = schedule, lead
        if key not in self.rows:
            steps = list(schedule.steps(rank))
            self.rows[key] = receives_early(steps, lead) if lead else steps
        return self.rows[key]

    def __reduce__(self) -> Any:
        return PipelineCache, ()


@tree.record
class Placement:
    """The pipeline's slot in the state: which ranks and stages use which leaves.

    Attributes:
        spec: the structure of the user's tree.
        paths: all its leaves, in order.
        trained: those of them that are trained.
        parts: the leaves by the stages that use them; every stage has its own part, which may be empty.
        widest: the dtype of norms: fp64 if a trained leaf of any stage is fp64, else fp32.
        cache: what is computed once.
    """

    spec: optree.PyTreeSpec = tree.static()
    paths: tuple[str, ...] = tree.static()
    trained: tuple[str, ...] = tree.static()
    parts: tuple[StageParams, ...] = tree.static()
    widest: torch.dtype = tree.static()
    cache: PipelineCache = tree.static()

    @staticmethod
    def of(params: Any, stages: Stages, placement: Sequence[int]) -> "Placement":
        """The placement of a tree of params.

        Args:
            params: the user's tree.
            stages: the model's stages.
            placement: the rank that holds each stage.

        Raises:
            ValueError: the stages use leaves that the params do not have, or the reverse.
        """
        paths = tuple(path for path, _ in tree.named(params))
        users = _users(tree.as_written(params), paths, stages)
        shared: dict[tuple[int, ...], list[str]] = {(index,): [] for index in range(len(stages))}
        for path, used in users.items():
            shared.setdefault(tuple(used), []).append(path)
        parts = [
            StageParams(_title(used), used, tuple(sorted({placement[stage] for stage in used})), tuple(held))
            for used, held in sorted(shared.items())
        ]
        trained = {path: leaf for path, leaf in tree.named(params) if is_trainable(leaf)}
        dtype = widest([*trained.values()])
        return Placement(tree.structure(params), paths, tuple(trained), tuple(parts), dtype, PipelineCache())

    def parts_of(self, stage: int) -> list[StageParams]:
        """A stage's parts: its own first, then those that it shares."""
        return sorted((part for part in self.parts if stage in part.stages), key=lambda part: len(part.stages) > 1)

    def here(self, rank: int) -> list[StageParams]:
        """A rank's parts."""
        return [part for part in self.parts if rank in part.ranks]

    def own(self, params: Any, rank: int) -> dict[str, Tensor]:
        """A rank's leaves by path, each marked with its part's name."""
        leaves = dict(tree.named(params))
        placed = {path: (leaves[path], part.name) for part in self.here(rank) for path in part.paths}
        return {path: mark_part(leaf, name) for path, (leaf, name) in placed.items()}

    def all_leaves(self, local: Mapping[int, Mapping[str, TensorMeta]], stages: int) -> dict[int, dict[str, TensorMeta]]:
        """All stages' leaves, from this rank's; those of other ranks with the dtype of most of this rank's."""
        known = {path: leaf for held in local.values() for path, leaf in held.items()}
        casts = Counter((self.cache.given[path].dtype, leaf.dtype) for path, leaf in known.items())
        most = {before: after for (before, after), _ in reversed(casts.most_common())}

        def elsewhere(path: str) -> TensorMeta:
            leaf = self.cache.given[path]
            return attrs.evolve(leaf, dtype=most.get(leaf.dtype, leaf.dtype))

        paths = {stage: [path for part in self.parts_of(stage) for path in part.paths] for stage in range(stages)}
        return {
            stage: {path: known.get(path) or elsewhere(path) for path in stage_paths} for stage, stage_paths in paths.items()
        }

    def elsewhere(self, leaf_map: LeafMap, rank: int) -> LeafMap:
        """A rank's leaf map in the order of the user's tree, with the paths of trained leaves that only other ranks hold."""
        mine = {path for part in self.here(rank) for path in part.paths}
        return attrs.evolve(
            leaf_map.ordered(self.trained), other_paths=tuple(path for path in self.trained if path not in mine)
        )

    def copies(self, leaf_map: LeafMap, rank: int) -> set[int]:
        """The places of the optimizer's tensors that hold leaves which another rank counts."""
        copied = {path for part in self.here(rank) if part.ranks[0] != rank for path in part.paths}
        return {p.tensor for shards in leaf_map.shards_by_rank for p in shards if leaf_map.leaves[p.leaf].path in copied}

    def gathered(self, local: Mapping[str, Tensor], group: comm.Group, device: torch.device) -> Any:
        """The user's tree, gathered on every rank. Collective: the first rank that holds a leaf broadcasts it.

        Args:
            local: this rank's leaves by path.
            group: the pipeline's ranks.
            device: of other ranks' leaves.
        """
        shapes: dict[str, tuple[Any, ...]] = {}
        mine = {path: (list(leaf.shape), leaf.dtype, is_trainable(leaf)) for path, leaf in local.items()}
        for told in comm.all_gather_object(mine, group):
            shapes.update(told)
        holder = {path: part.ranks[0] for part in self.parts for path in part.paths}
        leaves = []
        for path in self.paths:
            shape, dtype, trained = shapes[path]
            leaf = local[path] if path in local else torch.empty(shape, dtype=dtype, device=device)
            leaf = leaf if trained == is_trainable(leaf) else freeze(leaf)
            leaves.append(like_marked(comm.broadcast(leaf.detach(), holder[path], group), leaf))
        return tree.unflatten(self.spec, leaves)


def _users(written: Iterable[str], paths: Sequence[str], stages: Stages) -> dict[str, list[int]]:
    """The stages that use each leaf."""
    users: dict[str, list[int]] = {path: [] for path in written}
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
    return users


def _title(stages: Sequence[int]) -> str:
    return f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"
