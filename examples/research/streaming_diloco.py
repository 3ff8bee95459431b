"""Streaming DiLoCo: fragments of the model are synchronised in turn, and arrive some steps later, while training goes on.

DiLoCo sends all params at once every H steps. Streaming DiLoCo (Douillard et al. 2025, arXiv:2501.18512) sends one fragment
at a time; the mean is used ``delay`` steps later, so that it can travel meanwhile, and is mixed with what the worker has
learned since.

Law: with one fragment, no delay and no mixing it is DiLoCo, bit for bit; with several it is a plain loop of PyTorch; workers
of two ranks with ZeRO in stages 0 and 3 are workers of one rank.
"""

from functools import partial
from itertools import pairwise
from typing import Any

import torch
from diloco import diloco, in_workers
from shared import first, loss_fn, rows, table, validation
from torch import Tensor

import functional_ds as fds
from functional_ds import comm
from functional_ds import transforms as T

RATE, MOMENTUM = 0.7, 0.9


def streaming(
    every: int, fragments: tuple[tuple[str, ...], ...], group: comm.Group | None = None, *, delay: int, mix: float
) -> fds.Transform:
    """Fragment f leaves ``f * every / len(fragments)`` updates after each multiple of ``every``; ``group`` as in ``diloco``."""
    apart = every // len(fragments)

    def turn(count: int) -> tuple[str, ...]:
        """The leaves whose turn it is after so many updates."""
        index, rest = divmod(count % every, apart)
        return () if rest or not count else fragments[index]

    def init(inner: Any, step: fds.Step, params: Any) -> fds.State:
        state = inner(step, params)
        leaves = fds.tree.leaves(state.params)
        kept = {"velocity": [torch.zeros_like(x) for x in leaves], "sent": [torch.zeros_like(x) for x in leaves]}
        return state.put(streaming={"outer": [x.clone() for x in leaves], **kept})

    def update(inner: Any, step: fds.Step, state: fds.State, grads: fds.Weighted) -> Any:
        count = int(state.step) + 1
        state, metrics = inner(step, state, grads)
        places = step.leaf_map(state)
        shards = [(places.leaves[shard.leaf].path, shard) for shard in places.shards]
        local, spec = fds.tree.flatten(state.params)
        local = [x.clone() for x in local]
        slot = {name: [x.clone() for x in tensors] for name, tensors in state.slots["streaming"].items()}

        def part(tensors: list[Tensor], shard: Any) -> Tensor:
            return tensors[shard.tensor].view(-1)[shard.start : shard.start + shard.numel]

        leaves = [shard for path, shard in shards if path in turn(count)]
        ways = comm.all_reduce([part(slot["outer"], shard) - part(local, shard) for shard in leaves], group, op="avg")
        for shard, way in zip(leaves, ways, strict=True):
            part(slot["sent"], shard).copy_(way)
        for shard in [shard for path, shard in shards if path in turn(count - delay)]:
            way, v, outer, x = (part(tensors, shard) for tensors in (slot["sent"], slot["velocity"], slot["outer"], local))
            v.mul_(MOMENTUM).add_(way)
            outer.sub_(RATE * (way + MOMENTUM * v))
            x.lerp_(outer, mix)
        return fds.tree.replace(state, params=fds.tree.unflatten(spec, local)).put(streaming=slot), metrics

    whole = fds.wrap("streaming", slot="streaming", init=init, update=update)
    return T.every(1, whole)  # workers skip a step together, so that they count the same updates


def oracle(workers: int, steps: int, every: int, fragments: Any, delay: int, mix: float, lr: float) -> dict[str, Tensor]:
    """The first worker's params, with SGD inside."""
    params = [first() for _ in range(workers)]
    outer, velocity, sent = first(), {path: torch.zeros_like(leaf) for path, leaf in first().items()}, dict[str, Tensor]()
    turns = {f * every // len(fragments): names for f, names in enumerate(fragments)}
    for count in range(1, steps + 1):
        for worker in range(workers):
            leaves = {path: leaf.requires_grad_() for path, leaf in params[worker].items()}
            grads = torch.autograd.grad(loss_fn(leaves, rows(count - 1, rank=worker, size=workers)), [*leaves.values()])
            moved = zip(leaves.items(), grads, strict=True)
            params[worker] = {path: leaf.detach() - lr * grad for (path, leaf), grad in moved}
        for path in turns.get(count % every, ()):
            sent[path] = torch.stack([outer[path] - own[path] for own in params]).mean(0)
        for path in turns.get((count - delay) % every, ()) if count > delay else ():
            velocity[path] = MOMENTUM * velocity[path] + sent[path]
            outer[path] = outer[path] - RATE * (sent[path] + MOMENTUM * velocity[path])
            for own in params:
                own[path] = own[path].lerp(outer[path], mix)
    return params[0]


FRAGMENTS = (("embed",), ("hidden", "bias"), ("head",))


def run(strategy: fds.Transform, optimizer: Any, steps: int) -> tuple[dict[str, Tensor], int, int]:
    """The params, the bytes that this rank sent, and the most in one step."""
    step = fds.compose(strategy)(fds.train_step(loss_fn, optimizer))
    state, sent = step.init(first()), [0]
    with comm.ledger() as book:
        for index in range(steps):
            state, _ = step(state, rows(index))
            sent.append(book.bytes)
    return step.params(state), sent[-1], max(after - before for before, after in pairwise(sent))


def law() -> None:
    """One fragment is DiLoCo; three are the plain loop."""
    inner, whole = fds.sgd(0.3), (("embed", "hidden", "bias", "head"),)
    streamed = comm.simulate(run, streaming(2, whole, delay=0, mix=1.0), inner, 4, world_size=2)
    at_once = comm.simulate(run, diloco(2, rate=RATE, momentum=MOMENTUM), inner, 4, world_size=2)
    for (ours, *_), (wanted, *_) in zip(streamed, at_once, strict=True):
        assert all(torch.equal(ours[path], wanted[path]) for path in wanted)
    found = comm.simulate(run, streaming(3, FRAGMENTS, delay=1, mix=0.5), inner, 8, world_size=2)[0][0]
    torch.testing.assert_close(found, oracle(2, 8, 3, FRAGMENTS, 1, 0.5, 0.3), rtol=1e-4, atol=1e-5)
    in_workers(partial(streaming, 3, FRAGMENTS, delay=1, mix=0.5), 8)


def main(steps: int = 120, every: int = 15, workers: int = 4) -> str:
    """The mean loss of the workers, and bytes in all and in the busiest step."""
    methods = {
        "DiLoCo": diloco(every),
        "streaming": streaming(every, FRAGMENTS, delay=0, mix=1.0),
        "streaming, 2 steps late": streaming(every, FRAGMENTS, delay=2, mix=0.5),
    }
    lines = []
    for name, method in methods.items():
        found = comm.simulate(run, method, fds.adamw(3e-3), steps, world_size=workers)
        loss = sum(validation(params) for params, _, _ in found) / workers
        lines.append((name, loss, f"{found[0][1]:,}", f"{found[0][2]:,}"))
    return table([f"{workers} workers, H = {every}", "loss", "bytes a worker", "in one step at most"], lines)


TINY = {"steps": 4, "every": 3, "workers": 2}

if __name__ == "__main__":
    law()
    print(main())
