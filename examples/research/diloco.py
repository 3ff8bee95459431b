"""DiLoCo: training loss against bytes, with an outer step every H inner steps.

Workers train separately with AdamW and meet every H steps: the mean of their changes is the gradient of an outer Nesterov SGD
(Douillard et al. 2023, arXiv:2311.08105). The bytes are the ledger's.

Law: with H = 1, plain SGD inside and an outer rate of 1 without momentum it is data parallelism, ``T.zero(0)``.
"""

from typing import Any

import torch
from shared import table, train, validation

import functional_ds as fds
from functional_ds import comm
from functional_ds import transforms as T


def diloco(every: int, *, rate: float = 0.7, momentum: float = 0.9) -> fds.Transform:
    """An outer step over all ranks after so many updates; put it before ``T.zero`` over an axis within a worker."""

    def init(inner: Any, step: fds.Step, params: Any) -> fds.State:
        state = inner(step, params)
        leaves = fds.tree.leaves(state.params)
        return state.put(diloco={"outer": [x.clone() for x in leaves], "velocity": [torch.zeros_like(x) for x in leaves]})

    def update(inner: Any, step: fds.Step, state: fds.State, grads: fds.Weighted) -> Any:
        meets = (int(state.step) + 1) % every == 0
        state, metrics = inner(step, state, grads)
        if not meets:
            return state, metrics
        local, spec = fds.tree.flatten(state.params)
        outer, velocity = state.slots["diloco"]["outer"], state.slots["diloco"]["velocity"]
        way = comm.all_reduce([old - new for old, new in zip(outer, local, strict=True)], op="avg")
        velocity = [momentum * v + d for v, d in zip(velocity, way, strict=True)]
        outer = [o - rate * (d + momentum * v) for o, d, v in zip(outer, way, velocity, strict=True)]
        state = fds.tree.replace(state, params=fds.tree.unflatten(spec, [o.clone() for o in outer]))
        return state.put(diloco={"outer": outer, "velocity": velocity}), metrics

    return fds.wrap(f"diloco({every})", slot="diloco", init=init, update=update)


def run(strategy: tuple[fds.Transform, ...], steps: int) -> tuple[float, int]:
    """The validation loss of one rank's params, and the bytes that it sent."""
    params, sent = train(*strategy, optimizer=fds.adamw(3e-3), steps=steps)
    return validation(params), sent


def law() -> None:
    """H = 1 without momentum is data parallelism."""

    def program(*strategy: fds.Transform) -> Any:
        return train(*strategy, optimizer=fds.sgd(0.5), steps=3)[0]

    apart = comm.simulate(program, diloco(1, rate=1.0, momentum=0.0), world_size=4)
    together = comm.simulate(program, T.zero(0), world_size=4)
    torch.testing.assert_close(apart, together, rtol=1e-4, atol=1e-5)


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
