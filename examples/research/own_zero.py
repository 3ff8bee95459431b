"""Your own ZeRO stage: whole leaves, owned in turn, compared with one device; a planted bug is found.

ZeRO-1 (Rajbhandari et al. 2020, arXiv:1910.02054) divides the optimizer's state over the ranks. The library cuts flat tensors;
here leaf i belongs to rank i mod n, so that no leaf is cut. It is written with phases and collectives alone.

Law: it is training on one device, with clipping and accumulation on both sides. With a bug (the norm of a rank's own leaves),
the same check shows which compositions are wrong.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from shared import first, loss_fn, table, train

import functional_ds as fds
from functional_ds import comm
from functional_ds import transforms as T
from functional_ds.step.over_ranks.mesh_axes import Axis, AxisRole, GradientParts


def owned_in_turn(*, bug: bool = False) -> fds.Transform:
    """ZeRO-1 over the world. ``bug`` leaves out that ranks have different parts of the gradient."""

    def mine(leaves: Any) -> list[Any]:
        here = comm.world()
        return list(leaves)[here.rank :: here.size]

    def scattered(state: fds.State) -> fds.State:
        return fds.tree.replace(state, params=mine(fds.tree.leaves(state.params)))

    def published(state: fds.State, like: Any) -> fds.State:
        leaves, spec = fds.tree.flatten(like)
        own, here = iter(state.params), comm.world()
        sources = [next(own) if i % here.size == here.rank else leaf for i, leaf in enumerate(leaves)]
        whole = [comm.broadcast(leaf, i % here.size) for i, leaf in enumerate(sources)]
        return fds.tree.replace(state, params=fds.tree.unflatten(spec, whole))

    def init(inner: Any, step: fds.Step, params: Any) -> fds.State:
        params = comm.broadcast(params, 0)
        state = inner(step, params)
        return fds.tree.replace(state, optimizer=inner(step, mine(fds.tree.leaves(params))).optimizer)

    def gradients(inner: Any, step: fds.Step, state: fds.State, batch: Any, carry: Any, last: bool) -> Any:
        state, grads, metrics = inner(step, state, batch, carry, last)
        if last:
            sums = [comm.reduce(grad, i % comm.world().size) for i, grad in enumerate(grads.sum)]
            grads = fds.tree.replace(grads, sum=mine(sums))
        return state, grads, metrics

    def update(inner: Any, step: fds.Step, state: fds.State, grads: fds.Weighted) -> Any:
        like = state.params
        state, metrics = inner(step, scattered(state), grads)
        return published(state, like), metrics

    axis = Axis(None, AxisRole.BATCH, parts=None if bug else lambda step, state: GradientParts())
    return fds.wrap("owned_in_turn", axes=[axis], init=init, gradients=gradients, update=update)


def differences(make: Any, ranks: int) -> list[tuple[str, float]]:
    """By composition: how far the params are from those of one device."""
    both = T.accumulate(2), T.clip(0.1)
    strategies: dict[str, tuple[Sequence[fds.Transform], Sequence[fds.Transform]]] = {
        "alone": ((), ()),
        "accumulate(2) before": (both[:1], ()),
        "accumulate(2) after": ((), both[:1]),
        "clip(0.1) before": (both[1:], ()),
        "accumulate(2), clip(0.1) after": ((), both),
    }

    def program(*strategy: fds.Transform) -> Any:
        return train(*strategy, optimizer=fds.adamw(1e-2), steps=2)[0]

    found = []
    for name, (before, after) in strategies.items():
        wanted = program(*before, *after)
        every = comm.simulate(program, *before, make(), *after, world_size=ranks)
        found.append((name, max((params[path] - wanted[path]).abs().max().item() for params in every for path in wanted)))
    return found


def law() -> None:
    """Right without the bug; wrong with it, where the norm counts."""
    assert all(size < 1e-4 for _, size in differences(owned_in_turn, 2))
    wrong = [name for name, size in differences(partial(owned_in_turn, bug=True), 2) if size > 1e-4]
    assert wrong == ["clip(0.1) before", "accumulate(2), clip(0.1) after"]


def size() -> int:
    """Elements of the optimizer's state on this rank."""
    step = owned_in_turn()(fds.train_step(loss_fn, fds.adamw(1e-2)))
    return sum(leaf.numel() for leaf in fds.tree.leaves(step.init(first()).optimizer) if leaf.dim())


def main(ranks: int = 4) -> str:
    """Differences without the bug and with it, and what each rank holds."""
    right, wrong = differences(owned_in_turn, ranks), differences(partial(owned_in_turn, bug=True), ranks)
    lines = [(name, one, other) for (name, one), (_, other) in zip(right, wrong, strict=True)]
    held = comm.simulate(size, world_size=ranks)
    return table([f"{ranks} ranks", "differs by", "with the bug"], lines) + f"\nelements of Adam's state by rank: {held}"


TINY = {"ranks": 2}

if __name__ == "__main__":
    law()
    print(main())
