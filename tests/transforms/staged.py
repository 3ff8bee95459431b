"""A model in any number of stages, with everything that crosses stages: ties, skips, draws, frozen leaves, integers."""

from itertools import pairwise
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import functional_ds as fds
from functional_ds import comm, transforms
from functional_ds import pipelining as pp

VOCABULARY, WIDTH, LENGTH = 7, 4, 3


def _embed(table: Tensor, ids: Tensor) -> Any:
    return {"h": table[ids], "ids": ids}, {"early": table[ids].square()}


def _layer(p: Any, x: Any, key: Any) -> Any:
    h = torch.tanh(x["h"] @ p["w"]) * p["scale"]
    return {**x, "h": x["h"] + (h if key is None else key.dropout(h, 0.25, "layer"))}


def _recomputed(p: Any, x: Any) -> Any:
    def body(h: Tensor) -> Tensor:
        return torch.tanh(h @ p["w"] + p["b"])

    return {**x, "h": checkpoint(body, x["h"], use_reentrant=False)}


def _head(p: Any, x: Any, early: Tensor) -> Any:
    scale, table = p
    return (x["h"] * scale + early) @ table.T + (x["ids"] % 2)[..., None]


def _loss(logits: Tensor, batch: Any) -> Any:
    """Tokens with target 0 weigh nothing."""
    targets = batch[1].flatten()
    losses = F.cross_entropy(logits.flatten(0, 1), targets, reduction="none")
    weight = (targets > 0).float()
    return fds.Weighted((losses * weight).sum(), weight.sum()), {"largest": logits.detach().amax()}


@attrs.frozen
class Staged:
    """Params, the stages that use them, and a batch."""

    params: Any
    stages: pp.Stages
    batch: Any

    @staticmethod
    def of(count: int, rows: int) -> "Staged":
        """With ``count`` stages; with three or more, the skip passes a stage that does not use it."""
        generator = torch.Generator().manual_seed(11)

        def leaf(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator) / 2

        def layer(i: int) -> Any:
            more = {"scale": leaf(WIDTH)} if i % 2 else {"b": leaf(WIDTH)}
            return {"w": leaf(WIDTH, WIDTH), **more}

        params = {
            "embed": leaf(VOCABULARY, WIDTH),
            "layers": [layer(i) for i in range(6)],
            "norm": leaf(WIDTH),
            "idle": leaf(3),
        }
        params = fds.freeze(params, "layers.2")
        ends = [round(i * 8 / count) for i in range(count + 1)]  # eight pieces: embedding, six layers, head
        tasks = [list(range(a, b)) for a, b in pairwise(ends)]
        pieces = [_piece(task) for task in tasks]
        made = pp.stages(pieces, params, loss=_loss)
        ids = torch.randint(0, VOCABULARY, (2, rows, LENGTH), generator=generator)
        return Staged(params, made, (ids[0], ids[1]))


def _piece(task: list[int]) -> pp.Piece:
    first, last = 0 in task, 7 in task
    layers = [i - 1 for i in task if 0 < i < 7]
    uses = (*(("embed",) if first else ()), *(f"layers.{i}" for i in layers), *(("norm", "embed") if last else ()))

    def run(p: Any, x: Any, key: Any, early: Any = None) -> Any:
        held = list(p)
        if first:
            x, kept = _embed(held.pop(0), x)
            early = kept["early"]
        for i in layers:
            x = _layer(held.pop(0), x, key) if i % 2 else _recomputed(held.pop(0), x)
        if last:
            return _head(held, x, early)
        return (x, {"early": early}) if first else x

    both = first and last
    return pp.Piece(
        run, uses=uses, keeps=("early",) * (first and not both), takes=("early",) * (last and not both), name=str(task)
    )


def trained(
    case: Staged, *strategy: fds.Transform, part: tuple[int, int] = (0, 1), steps: int = 2, lr: float = 1e-2
) -> tuple[list[dict[str, float]], dict[str, float], Any]:
    """Metrics of some steps on this part of the batch, a measurement after them, and the params at the end."""
    step = fds.compose(*strategy)(fds.train_step(case.stages, fds.adamw(lr, eps=1e-4), seed=3))
    state = step.init(case.params)
    batch = fds.tree.map(lambda x: x.tensor_split(part[1])[part[0]], case.batch)
    found = []
    for _ in range(steps):
        state, metrics = step(state, batch)
        found.append({name: value.item() for name, value in metrics.items()})
    return found, {name: value.item() for name, value in step.measure(state, batch).items()}, step.params(state)


def on_mesh(
    schedule: pp.Schedule,
    rows: int,
    *inner: fds.Transform,
    zero: int | None = None,
    dp: int = 1,
    accumulate: int = 1,
    resident: int | None = None,
    **options: Any,
) -> Any:
    """The same on this rank of a pp x dp mesh."""
    mesh = comm.mesh(dp=dp, pp=schedule.ranks)
    case = Staged.of(schedule.stages, rows)
    strategy = [
        *inner,
        *([] if zero is None else [transforms.zero(zero, mesh["dp"])]),
        transforms.pipeline(schedule, case.stages, mesh["pp"], resident=resident),
        *([transforms.accumulate(accumulate)] if accumulate > 1 else []),
        transforms.clip(0.3),
    ]
    return trained(case, *strategy, part=(mesh["dp"].rank, dp), **options)
