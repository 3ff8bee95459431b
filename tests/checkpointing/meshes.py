"""Plans of slices, meshes to hold them, and states whose every element says where it lies in the whole leaf."""

import functools
from collections.abc import Mapping
from typing import Any

import attrs
import torch
from hypothesis import strategies as st
from torch import Tensor

import functional_ds as fds
from functional_ds import comm, transforms
from functional_ds.base.marks import mark_sharers
from functional_ds.sharding.leaf_slice import LeafSlice
from functional_ds.sharding.sources import sliced
from functional_ds.state_dict.describe import TensorShard, describe
from tests.checkpointing.states import places_of, precision


@attrs.frozen
class Dim:
    """How a dim of a leaf is cut, over whichever ranks: evenly, in blocks that lie side by side, by heads, or not."""

    size: int
    axis: str = ""
    blocks: tuple[int, ...] = ()
    heads: int = 0

    def cut(self, dim: int, group: comm.Group) -> LeafSlice:
        if self.heads:
            return LeafSlice.heads(dim, self.heads, self.size // self.heads, group.size, group.rank)
        return LeafSlice.even(dim, list(self.blocks), group.size, group.rank)


Plan = Mapping[str, tuple[Dim, ...]]


def whole_dim() -> st.SearchStrategy[Dim]:
    return st.integers(1, 5).map(Dim)


def cut_dim(axis: str, most: int) -> st.SearchStrategy[Dim]:
    """Divides by any number of ranks up to ``most``, a power of two; heads may be fewer than ranks."""
    blocks = st.lists(st.integers(1, 2).map(lambda k: k * most), min_size=1, max_size=3)
    heads = st.tuples(st.sampled_from([1, 2, 4, 8]), st.integers(1, 3))
    return st.one_of(
        blocks.map(lambda sizes: Dim(sum(sizes), axis, tuple(sizes))),
        heads.map(lambda pair: Dim(pair[0] * pair[1], axis, (), pair[0])),
    )


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Leaves of one to three dims; experts first where they are cut, and another dim over tensor-parallel ranks."""
    found = {}
    for index in range(draw(st.integers(1, 4))):
        dims = [draw(whole_dim()) for _ in range(draw(st.integers(1, 3)))]
        if draw(st.booleans()):
            dims[0] = draw(cut_dim("ep", 2))
        if draw(st.booleans()) and (len(dims) > 1 or not dims[0].axis):
            dims[draw(st.integers(1 if dims[0].axis else 0, len(dims) - 1))] = draw(cut_dim("tp", 4))
        found[f"blocks.{index}.w"] = tuple(dims)
    return found


@attrs.frozen
class Setting:
    """A mesh, and the stage of zero over its axis dp, or over dp and ep: there experts have fewer sharers than other leaves."""

    dp: int
    tp: int
    ep: int
    pp: int
    stage: int | None
    inside: bool = False

    @property
    def world_size(self) -> int:
        return self.dp * self.tp * self.ep * self.pp


def meshes() -> st.SearchStrategy[Setting]:
    some = st.builds(
        Setting,
        dp=st.integers(1, 3),
        tp=st.sampled_from((1, 2, 4)),
        ep=st.integers(1, 2),
        pp=st.integers(1, 2),
        stage=st.sampled_from((None, 0, 1, 2, 3)),
        inside=st.booleans(),
    )
    return some.map(lambda s: attrs.evolve(s, dp=1, inside=False) if s.stage is None else s).filter(
        lambda s: s.world_size <= 12
    )


RULES: dict[str, Any] = {
    "adamw": lambda: fds.adamw(0.1),
    "groups": lambda: fds.param_groups({r"[02]\.w": fds.adamw(0.1)}, fds.sgd(0.1, momentum=0.9)),
    "one for each": lambda: fds.PerParameter(lambda leaf_map: fds.adagrad(0.1), "each"),
}


def whole_params(plan: Plan, dtype: torch.dtype) -> dict[str, Tensor]:
    return {path: torch.ones([dim.size for dim in dims], dtype=dtype) for path, dims in plan.items()}


def cut_over(mesh: Any, plan: Plan, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """This rank's slices; leaves may be deferred."""
    found = {}
    for path, leaf in params.items():
        cuts = [each.cut(dim, mesh[each.axis]) for dim, each in enumerate(plan[path]) if each.axis]
        found[path] = functools.reduce(sliced, cuts, leaf)
        if any(each.axis == "ep" for each in plan[path]) and "edp" in mesh.axes:
            found[path] = mark_sharers(found[path], transforms.experts(path, mesh["ep"], edp=mesh["edp"]).blocks)
    return found


def begun(
    plan: Plan, setting: Setting, params: Mapping[str, Tensor], *, rule: str = "adamw", policy: str = "none"
) -> fds.State:
    """A state of slices, in shards, on the ranks of a mesh; a pipeline's stages have every other leaf, and all the first."""
    if setting.inside:
        mesh = comm.mesh(pp=setting.pp, dp=setting.dp * setting.ep, tp=setting.tp)
        mesh = mesh.split("dp", edp=setting.dp, ep=setting.ep)
    else:
        mesh = comm.mesh(pp=setting.pp, ep=setting.ep, dp=setting.dp, tp=setting.tp)
    place = mesh.coordinates["pp"]
    own = {path: leaf for i, (path, leaf) in enumerate(params.items()) if i == 0 or i % setting.pp == place}
    strategy = [transforms.ema(0.5), *precision(policy)]
    strategy += (
        [] if setting.stage is None else [transforms.zero(setting.stage, mesh["edp", "ep"] if setting.inside else mesh["dp"])]
    )
    step = fds.compose(*strategy)(fds.train_step(lambda p, x: NotImplemented, RULES[rule]()))
    return step.init(cut_over(mesh, plan, own))


def expected(name: str, places: Tensor, dtype: torch.dtype) -> Tensor:
    """The value of each element, by where it lies in the whole leaf: exact in every dtype."""
    return ((places * 7 + sum(name.encode())) % 113).to(dtype)


def wanted(shard: TensorShard) -> Tensor:
    """What ``filled`` puts into a shard."""
    places = places_of(shard.region)[shard.offset : shard.offset + shard.view.numel()]
    return expected(shard.name, places, shard.view.dtype)


def filled(state: fds.State) -> fds.State:
    """The state with other values for every element, in its own memory."""
    for shard in of_leaves(state):
        shard.view.copy_(wanted(shard))
    return state


def of_leaves(state: fds.State) -> list[TensorShard]:
    """The shards of leaves, in each of their forms; but not the counts."""
    return [shard for shard in describe(state) if "/" in shard.name and not shard.shared]
