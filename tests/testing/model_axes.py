"""Transforms that split a model over an axis, the library's and one's own, with problems for ``holds(axis=)``."""

from collections.abc import Callable
from functools import partial
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import functional_ds as fds
from functional_ds import comm, testing
from functional_ds import pipelining as pp
from functional_ds import transforms as T
from functional_ds.step import Axis, AxisRole, GradientParts, LeafSlice, axis, sliced

__all__ = [
    "batches",
    "error",
    "experts",
    "feature_loss",
    "features",
    "flat_problem",
    "mixture",
    "normal",
    "own_positions",
    "pipeline",
    "prefix_problem",
    "sequences",
    "sliced_loss",
    "sliced_stage_problem",
    "slices",
    "stage_problem",
    "staged_slices",
    "tensors",
    "vocabulary",
    "vocabulary_plan",
]


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) / 2


def error(y: Tensor, x: Tensor) -> Tensor:
    return (y - torch.sin(2 * x)).square().mean()


def batches(rows: int = 24) -> list[Tensor]:
    return [2 * normal(10 + index, rows, 4) for index in range(6)]


# -- tensor parallelism ----------------------------------------------------------------------------------------------------


def by_slices(p: Any, x: Tensor, bias: bool = True) -> Tensor:
    hidden = fds.tp.column(x, p["up"], bias=p["bias"] if bias else None)
    return error(fds.tp.row(hidden.tanh(), p["down"]) * p["scale"], x)


def by_torch(p: Any, x: Tensor, bias: bool = True) -> Tensor:
    hidden = F.linear(x, p["up"], p["bias"] if bias else None)
    return error(F.linear(hidden.tanh(), p["down"]) * p["scale"], x)


def without_bias(p: Any, x: Tensor) -> Tensor:
    return (by_torch if axis("tp") is None else by_slices)(p, x, bias=False)


def tensors() -> testing.Problem:
    params = {"up": normal(0, 8, 4), "bias": normal(1, 8), "down": normal(2, 4, 8), "scale": torch.ones(4)}
    return testing.Problem(params=params, loss=by_slices, plain=by_torch, unused=without_bias, batches=batches())


WORDS, INNER = 16, 8
LAYERS = nn.Embedding(WORDS, 4), nn.Linear(4, INNER), nn.Tanh(), nn.Linear(INNER, 4), nn.LayerNorm(4), nn.Linear(4, WORDS)
APPLY, WEIGHTS = fds.functional(nn.Sequential(*LAYERS))
vocabulary_plan = {"0": "vocab", "1": "colwise", "3": "rowwise", "5": "vocab"}


def next_word(p: Any, ids: Tensor) -> fds.Weighted:
    return fds.tp.cross_entropy(APPLY(p, ids)[:, :-1], ids[:, 1:])


def plain_next_word(p: Any, ids: Tensor) -> Tensor:
    return F.cross_entropy(APPLY(p, ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def texts(rows: int = 12) -> list[Tensor]:
    return [torch.randint(WORDS, (rows, 8), generator=torch.Generator().manual_seed(index)) for index in range(6)]


def vocabulary() -> testing.Problem:
    """Modules between an embedding and a head of slices."""
    weights = torch.Generator().manual_seed(0)
    params = fds.tree.map(lambda leaf: nn.Parameter(torch.randn(leaf.shape, generator=weights) / 2), WEIGHTS)
    return testing.Problem(params=params, loss=next_word, plain=plain_next_word, batches=texts())


# -- pipelines -------------------------------------------------------------------------------------------------------------


def stage(p: Any, x: Tensor) -> Tensor:
    return torch.tanh(x @ p["w"] + p["b"])


STAGED = [{"w": normal(place, 4, 4), "b": normal(9 + place, 4)} for place in range(4)]
STAGES = pp.stages([stage] * 4, STAGED, loss=error)


def stage_problem() -> testing.Problem:
    return testing.Problem(params=STAGED, loss=STAGES, batches=batches())


def pipeline(group: comm.Group) -> fds.Transform:
    schedules = {2: pp.interleaved_one_f_one_b(2, 2), 4: pp.one_f_one_b(4, 2)}
    return T.pipeline(schedules[group.size], STAGES, group)


def sliced_stage(p: Any, x: Tensor, sums: bool = True) -> Tensor:
    hidden = fds.tp.column(x, p["up"]).tanh()
    return x + (fds.tp.row(hidden, p["down"]) if sums else F.linear(hidden, p["down"]))


SLICED = [{"up": normal(place, 8, 4), "down": normal(9 + place, 4, 8)} for place in range(4)]
SLICED_STAGES = {sums: pp.stages([partial(sliced_stage, sums=sums)] * 4, SLICED, loss=error) for sums in (True, False)}


def plain_stages(params: Any, x: Tensor) -> Tensor:
    y = x
    for p in params:
        y = y + F.linear(F.linear(y, p["up"]).tanh(), p["down"])
    return error(y, x)


def sliced_stage_problem(sums: bool = True) -> testing.Problem:
    return testing.Problem(params=SLICED, loss=SLICED_STAGES[sums], plain=plain_stages, batches=batches())


def staged_slices(stages: comm.Group, slices: comm.Group, *, sums: bool = True) -> fds.Transform:
    """A pipeline of stages whose weights are sliced over another axis."""
    schedules = {2: pp.interleaved_one_f_one_b(2, 2), 4: pp.one_f_one_b(4, 2)}
    pipeline = T.pipeline(schedules[stages.size], SLICED_STAGES[sums], stages)
    return fds.compose(pipeline, T.tensor_parallel({"up": 0, "down": 1}, slices))


# -- sequences -------------------------------------------------------------------------------------------------------------


def token_loss(p: Any, batch: Any, attend: Callable[..., Tensor]) -> fds.Weighted:
    x = p["words"][batch["input_ids"]] + p["places"][batch["position_ids"]]  # [rows, positions, width]
    q, k, v = (x @ p["qkv"]).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
    x = x + attend(q, k, v).transpose(1, 2).flatten(2)
    labels = batch["shift_labels"]
    total = F.cross_entropy((x @ p["words"].T).flatten(0, 1), labels.flatten(), reduction="sum")
    return fds.Weighted(total, (labels != -100).sum())


def split_loss(p: Any, batch: Any, make: Callable[[], Callable[..., Tensor]]) -> fds.Weighted:
    return token_loss(p, batch, partial(make(), causal=True))


def plain_token_loss(p: Any, batch: Any) -> fds.Weighted:
    labels = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    places = torch.arange(labels.shape[1]).expand_as(labels)
    whole = {"input_ids": batch["input_ids"], "shift_labels": labels, "position_ids": places}
    return token_loss(p, whole, partial(F.scaled_dot_product_attention, is_causal=True))


def sequences(make: Callable[[], Callable[..., Tensor]]) -> testing.Problem:
    """Ranks have different numbers of labels."""
    params = {"words": normal(0, WORDS, 8), "places": normal(1, 8, 8), "qkv": normal(2, 8, 24) / 2}
    labelled = [{"input_ids": ids, "labels": ids.where(torch.arange(8) != 2, -100)} for ids in texts()]
    return testing.Problem(params=params, loss=partial(split_loss, make=make), plain=plain_token_loss, batches=labelled)


# -- experts ---------------------------------------------------------------------------------------------------------------


def expert_loss(p: Any, x: Tensor) -> fds.Weighted:
    routing = fds.moe.route(x @ p["router"], 2)
    y = x + fds.moe.exchange(fds.moe.mlp(p["experts.up"], p["experts.down"]), x, routing=routing)
    return fds.Weighted((y - torch.sin(2 * x)).square().sum(), len(x))


def mixture() -> testing.Problem:
    params = {"router": normal(0, 4, 4), "experts.up": normal(1, 4, 8, 4), "experts.down": normal(2, 4, 4, 8)}
    return testing.Problem(params=params, loss=expert_loss, batches=batches())


def experts(ep: comm.Group, edp: comm.Group) -> fds.Transform:
    return T.experts(r"^experts\.", ep, edp=edp)


def expert_loss_of_positions(p: Any, x: Tensor) -> fds.Weighted:
    return expert_loss(p, x.flatten(0, 1))


def mixture_of_positions() -> testing.Problem:
    x = [2 * normal(10 + step, 24, 8, 4) for step in range(6)]  # [rows, positions, width]
    return attrs.evolve(mixture(), loss=expert_loss_of_positions, batches=x)


def experts_of_positions(sp: comm.Group, ep: comm.Group, edp: comm.Group) -> fds.Transform:
    """Experts along one axis, positions along another: ``edp`` includes the latter."""
    return fds.compose(experts(ep, edp), own_positions(sp))


# -- one's own -------------------------------------------------------------------------------------------------------------


def feature_loss(p: Any, x: Tensor, sums: bool = True) -> Tensor:
    """Each rank of an axis "features" computes some of the hidden features."""
    group = axis("features")
    here, ranks = (0, 1) if group is None else (group.rank, group.size)
    y = torch.tanh(x @ p["up"].chunk(ranks, 1)[here]) @ p["down"].chunk(ranks)[here]
    return error(y if group is None or not sums else comm.reduce_from(y, group), x)


def flat_problem(loss: Callable[..., Any] = feature_loss, plain: Callable[..., Any] | None = None) -> testing.Problem:
    return testing.Problem(params={"up": normal(0, 4, 8), "down": normal(1, 8, 4)}, loss=loss, plain=plain, batches=batches())


def features(group: comm.Group, reduced: Callable[[list[Tensor], comm.Group], list[Tensor]] = comm.all_reduce) -> fds.Transform:
    """Params are whole on all ranks, which sum their parts of the gradients."""

    def reduce(inner: Any, step: fds.Step, state: fds.State, grads: fds.Weighted) -> Any:
        state, grads = inner(step, state, grads)
        return state, fds.tree.replace(grads, sum=reduced(grads.sum, group))

    return fds.wrap("features", axes=[Axis(group, name="features")], reduce=reduce)


def sliced_loss(p: Any, x: Tensor) -> Tensor:
    y, group = torch.tanh(x @ p["up"]) @ p["down"], axis("slices")
    return error(y if group is None else comm.reduce_from(y, group), x)


def own_part(step: fds.Step, state: fds.State) -> GradientParts:
    return GradientParts()


def slices(group: comm.Group, parts: Any = own_part, cut: Callable[[Tensor, LeafSlice], Tensor] = sliced) -> fds.Transform:
    """Each rank stores its slices of the leaves."""
    dims = {"up": 1, "down": 0}

    def init(inner: Any, step: fds.Step, params: Any) -> fds.State:
        where = {name: LeafSlice.even(dim, params[name].shape[dim], group.size, group.rank) for name, dim in dims.items()}
        return inner(step, {name: cut(leaf, where[name]) for name, leaf in params.items()})  # type: ignore[no-any-return]

    def params(inner: Any, step: fds.Step, state: fds.State) -> Any:
        own = inner(step, state)
        return {name: comm.all_gather(own[name].detach(), group, dim=dim) for name, dim in dims.items()}

    return fds.wrap("slices", axes=[Axis(group, parts=parts, name="slices")], init=init, params=params)


def prefix_loss(p: Any, batch: Any, before: Callable[[Tensor, comm.Group], Tensor] | None = None) -> fds.Weighted:
    """Each position sees the sum of all positions up to it."""
    x, counts, group = batch["x"], batch["counts"], axis("positions")
    sums = x.cumsum(1)
    if group is not None:
        totals = comm.all_gather(sums[:, -1], group, tiled=False)  # [ranks, rows, width]
        sums = sums + (totals[: group.rank].sum(0) if before is None else before(totals, group))[:, None]
    y = torch.tanh(sums @ p["up"]) @ p["down"]
    return fds.Weighted(((y - torch.sin(2 * x)).square().mean(-1) * counts).sum(), counts.sum())


def prefix_problem(loss: Callable[..., Any] = prefix_loss) -> testing.Problem:
    """Sequences of 8 positions, the first of which do not count, so that ranks weigh unequally."""
    rows = [{"x": normal(10 + index, 12, 8, 4), "counts": (torch.arange(8) > 2).float().repeat(12, 1)} for index in range(6)]
    return testing.Problem(params=flat_problem().params, loss=loss, batches=rows)


def own_positions(group: comm.Group, weight: Callable[[fds.Weighted], fds.Weighted] = lambda found: found) -> fds.Transform:
    """Each rank has some positions of the same rows."""

    def gradients(inner: Any, step: fds.Step, state: fds.State, batch: Any, carry: Any, last: bool) -> Any:
        mine = fds.tree.map(lambda leaf: leaf.chunk(group.size, 1)[group.rank], batch)
        return inner(step, state, mine, carry, last)

    def loss(inner: Any, step: fds.Step, state: fds.State, params: Any, batch: Any) -> Any:
        found, metrics = inner(step, state, params, batch)
        return weight(found), metrics

    axes = [Axis(group, AxisRole.SEQUENCE, name="positions")]
    return fds.wrap("positions", axes=axes, gradients=fds.outermost(gradients), loss=loss)
