"""Your own ZeRO stage: whole leaves, owned in turn, compared with one device; a planted bug is found.

ZeRO-1 (Rajbhandari et al. 2020, arXiv:1910.02054) divides the optimizer's state over the ranks. The library cuts flat tensors;
here leaf i belongs to rank i mod n, so that no leaf is cut. A ``LeafMap`` says so to norms, optimizers and checkpoints.

Law: it is training on one device, with clipping and accumulation on both sides. With a bug (the norm of a rank's own leaves),
the same check shows which compositions are wrong.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import attrs
from shared import first, loss_fn, table, train

import functional_ds as fds
from functional_ds import comm
from functional_ds import transforms as T
from functional_ds.step import Axis, AxisRole, GradientParts, LeafShard, Trait


@fds.tree.record
class Owned:
    """The slot: which leaf is whose, and all params, while ``state.params`` are this rank's."""

    leaf_map: fds.LeafMap = fds.tree.static()
    whole: Any = None


def owned_in_turn(group: comm.Group, *, bug: bool = False) -> fds.Transform:
    """ZeRO-1 over a group. ``bug`` leaves out that ranks have different parts of the gradient."""
    n, rank = group.size, group.rank

    def mine(leaves: Any) -> list[Any]:
        return fds.tree.leaves(leaves)[rank::n]

    def owned(params: Any) -> Owned:
        whole = fds.LeafMap.of(params)
        shards = [LeafShard(i, 0, i // n, 0, leaf.numel) for i, leaf in enumerate(whole.leaves)]
        return Owned(attrs.evolve(whole, shards_by_rank=tuple(tuple(shards[r::n]) for r in range(n)), rank=rank))

    def init(inner: Any, step: fds.Step, params: Any) -> fds.State:
        params = comm.broadcast(params, 0, group)
        slot = owned(params)
        known = step.wrapped("owned", leaf_map=lambda inner, step, state: inner(step, state.put(owned=slot)))  # it has none yet
        return fds.tree.replace(inner(known, mine(params)), params=params).put(owned=slot)  # type: ignore[no-any-return]

    def leaf_map(inner: Any, step: fds.Step, state: fds.State) -> fds.LeafMap:
        return attrs.evolve(state.slots["owned"].leaf_map, group=group)

    def scattered(state: fds.State) -> fds.State:
        slot = state.slots.get("owned")
        if slot is None or slot.whole is not None:  # in an inner init or update
            return state
        return fds.tree.replace(state, params=mine(state.params)).put(owned=Owned(slot.leaf_map, state.params))

    def published(state: fds.State) -> fds.State:
        slot, own = state.slots["owned"], iter(state.params)
        leaves, spec = fds.tree.flatten(slot.whole)
        news = [next(own) if i % n == rank else leaf for i, leaf in enumerate(leaves)]
        sent = [comm.start(comm.broadcast, new, i % n, group) for i, new in enumerate(news)]
        whole = fds.tree.unflatten(spec, [each.wait() for each in sent])
        return fds.tree.replace(state, params=whole).put(owned=Owned(slot.leaf_map))

    def reduce(inner: Any, step: fds.Step, state: fds.State, grads: fds.Weighted) -> Any:
        state, grads = inner(step, state, grads)
        sums = [comm.start(comm.reduce, grad, i % n, group) for i, grad in enumerate(grads.sum)]
        return state, fds.Weighted(mine([each.wait() for each in sums]), grads.weight)

    def update(inner: Any, step: fds.Step, state: fds.State, grads: fds.Weighted) -> Any:
        state, metrics = inner(step, scattered(state), grads)
        return published(state), metrics

    parts = None if bug else lambda step, state: GradientParts()
    return fds.wrap(
        "owned_in_turn",
        slot="owned",
        traits=[Trait.HEEDS_SKIPS],  # its update gives the inner one params of another form, in skipped steps too
        axes=[Axis(group, AxisRole.BATCH, parts, summed_in="reduce")],
        init=init,
        leaf_map=leaf_map,
        reduce=reduce,
        update=update,
        scatter=lambda inner, step, state: inner(step, scattered(state)),
        publish=lambda inner, step, state: published(inner(step, state)),
    )


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

    def on_ranks(before: Sequence[fds.Transform], after: Sequence[fds.Transform]) -> Any:
        return program(*before, make(comm.world()), *after)

    found = []
    for name, (before, after) in strategies.items():
        wanted = program(*before, *after)
        every = comm.simulate(on_ranks, before, after, world_size=ranks)
        found.append((name, max((params[path] - wanted[path]).abs().max().item() for params in every for path in wanted)))
    return found


def law() -> None:
    """Right without the bug; wrong with it, where the norm counts."""
    assert all(size < 1e-4 for _, size in differences(owned_in_turn, 2))
    wrong = [name for name, size in differences(partial(owned_in_turn, bug=True), 2) if size > 1e-4]
    assert wrong == ["clip(0.1) before", "accumulate(2), clip(0.1) after"]


def size() -> int:
    """Elements of the optimizer's state on this rank."""
    step = owned_in_turn(comm.world())(fds.train_step(loss_fn, fds.adamw(1e-2)))
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
