"""DiLoCo: training loss against bytes, with an outer step every H inner steps.

Workers train separately with AdamW and meet every H steps: the mean of their changes is the gradient of an outer Nesterov SGD
(Douillard et al. 2023, arXiv:2311.08105). The bytes are the ledger's.

Law: with H = 1, plain SGD inside and an outer rate of 1 without momentum it is data parallelism, ``T.zero(0)``; workers of two
ranks with ZeRO in stages 0 and 3 are workers of one rank.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from shared import table, train, validation

import functional_ds as fds
from functional_ds import comm
from functional_ds import transforms as T


def diloco(every: int, group: comm.Group | None = None, *, rate: float = 0.7, momentum: float = 0.9) -> fds.Transform:
    """An outer step over the workers after so many updates.

    If each worker is several ranks, ``group`` is the outer axis of a mesh; list ``T.zero`` over the inner axis after it.
    """

    def init(inner: Any, step: fds.Step, params: Any) -> fds.State:
        state = inner(step, params)
        leaves = fds.tree.leaves(state.params)
        return state.put(diloco={"outer": [x.clone() for x in leaves], "velocity": [torch.zeros_like(x) for x in leaves]})

    def update(inner: Any, step: fds.Step, state: fds.State, grads: fds.Weighted) -> Any:
        state, metrics = inner(step, state, grads)
        local, spec = fds.tree.flatten(state.params)
        outer, velocity = state.slots["diloco"]["outer"], state.slots["diloco"]["velocity"]
        way = comm.all_reduce([old - new for old, new in zip(outer, local, strict=True)], group, op="avg")
        velocity = [momentum * v + d for v, d in zip(velocity, way, strict=True)]
        outer = [o - rate * (d + momentum * v) for o, d, v in zip(outer, way, velocity, strict=True)]
        state = fds.tree.replace(state, params=fds.tree.unflatten(spec, [o.clone() for o in outer]))
        return state.put(diloco={"outer": outer, "velocity": velocity}), metrics

    return T.every(every, fds.wrap("diloco", slot="diloco", init=init, update=update))


def run(strategy: tuple[fds.Transform, ...], steps: int) -> tuple[float, int]:
    """The validation loss of one rank's params, and the bytes that it sent."""
    params, sent = train(*strategy, optimizer=fds.adamw(3e-3), steps=steps)
    return validation(params), sent


def in_workers(method: Callable[..., fds.Transform], steps: int = 4) -> None:
    """A method over the outer axis of a 2 x 2 mesh, with ZeRO along the inner axis, is that of workers of one rank."""

    def program(inner: int, stage: int) -> Any:
        mesh = comm.mesh(outer=2, inner=inner)
        strategy = method(mesh["outer"]), T.zero(stage, mesh["inner"]), T.apart(mesh["outer"])
        return train(*strategy, optimizer=fds.sgd(0.3), steps=steps)[0]

    wanted = comm.simulate(program, 1, 0, world_size=2)
    for stage in (0, 3):
        for rank, params in enumerate(comm.simulate(program, 2, stage, world_size=4)):
            torch.testing.assert_close(params, wanted[rank // 2], rtol=1e-4, atol=1e-5)


def law() -> None:
    """H = 1 without momentum is data parallelism."""

    def program(*strategy: fds.Transform) -> Any:
        return train(*strategy, optimizer=fds.sgd(0.5), steps=3)[0]

    apart = comm.simulate(program, diloco(1, rate=1.0, momentum=0.0), world_size=4)
    together = comm.simulate(program, T.zero(0), world_size=4)
    torch.testing.assert_close(apart, together, rtol=1e-4, atol=1e-5)
    in_workers(partial(diloco, 2))


def main(steps: int = 120, every: tuple[int, ...] = (5, 20, 60), workers: int = 4) -> str:
    """Loss and bytes for several H, beside data parallelism."""
    lines = []
    for name, strategy in {"every step": (T.zero(0),), **{f"H = {h}": (diloco(h),) for h in every}}.items():
        loss, sent = comm.simulate(run, strategy, steps, world_size=workers)[0]
        lines.append((name, loss, f"{sent:,}"))
    return table([f"{workers} workers, {steps} steps", "loss", "bytes a worker"], lines)


TINY = {"steps": 4, "every": (2,), "workers": 2}

if __name__ == "__main__":
    law()
    print(main())
