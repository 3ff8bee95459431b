"""Methods that are wrong, each in one way, and the law that must notice. Processes can import them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import functional_ds as fds
from functional_ds import comm
from functional_ds.step.phases import Trait
from functional_ds.testing import Problem

__all__ = ["WRONG", "Change", "changed", "descent"]

Change = Callable[[fds.Step, fds.State, fds.Weighted], fds.Weighted]


def changed(name: str, change: Change) -> fds.Transform:
    """A change of the gradients before the update."""
    return fds.wrap(name, update=lambda inner, step, state, grads: inner(step, state, change(step, state, grads)))


def length(tensors: list[Tensor]) -> Tensor:
    return torch.stack([x.float().norm() for x in tensors]).norm()


def with_slot(name: str, made: Callable[[fds.Step, fds.State], Any], **phases: Any) -> fds.Transform:
    """A transform with a slot ``kept``."""

    def init(inner: Any, step: fds.Step, params: Any) -> fds.State:
        state = inner(step, params)
        return state.put(kept=made(step, state))

    return fds.wrap(name, slot="kept", init=init, **phases)


# -- what a rank sees is not the whole -------------------------------------------------------------------------------------


def own_norm() -> fds.Transform:
    """Clips by the norm of this rank's shard."""
    return changed("own_norm", lambda step, state, grads: fds.Weighted(grads.sum, length(grads.sum)))


def norm_by_hand() -> fds.Transform:
    """Sums squares over all ranks, which counts whole gradients once for each rank."""

    def change(step: fds.Step, state: fds.State, grads: fds.Weighted) -> fds.Weighted:
        return fds.Weighted(grads.sum, comm.all_reduce(length(grads.sum).square()).sqrt())

    return changed("norm_by_hand", change)


def norm_by_tensor() -> fds.Transform:
    """Takes a tensor for a leaf."""
    ones = lambda grads: torch.ones_like(grads.weight)  # noqa: E731
    unit = lambda step, state, grads: fds.Weighted([g / (g.norm() + 1e-8) for g in grads.sum], ones(grads))  # noqa: E731
    return changed("norm_by_tensor", unit)


def centred() -> fds.Transform:
    """Subtracts the mean of a tensor, as if it were a leaf."""
    return changed("centred", lambda step, state, grads: fds.Weighted([g - g.mean() for g in grads.sum], grads.weight))


def rates_by_position() -> fds.Transform:
    """Gives rates to tensors by their places in the list."""

    def change(step: fds.Step, state: fds.State, grads: fds.Weighted) -> fds.Weighted:
        return fds.Weighted([g / (1 + place) for place, g in enumerate(grads.sum)], grads.weight)

    return changed("rates_by_position", change)


def sharpness(norm: Callable[[fds.Step, fds.State, list[Tensor]], Tensor]) -> fds.Transform:
    """The docs' SAM without the sum over ranks before the norm."""

    def gradients(inner: Any, step: fds.Step, state: fds.State, batch: Any, carry: Any, last: bool) -> Any:
        after, first, _ = inner(step, state, batch, None, True)
        scale = 0.5 / norm(step, after, first.sum)
        pairs = zip(step.trained(state), first.sum, strict=True)
        there = step.with_trained(state, [leaf + scale * grad.view_as(leaf) for leaf, grad in pairs])
        return (after, *inner(step, there, batch, carry, last)[1:])

    return fds.wrap("sharpness", gradients=gradients)


def forgotten_reduce() -> fds.Transform:
    """Takes the norm of gradients that ``T.replicated`` has not summed."""
    return sharpness(lambda step, state, grads: length(grads))


# -- noise -----------------------------------------------------------------------------------------------------------------


def noise(seed: Callable[[fds.State], int]) -> fds.Transform:
    """Noise from a generator with this seed."""

    def change(step: fds.Step, state: fds.State, grads: fds.Weighted) -> fds.Weighted:
        generator = torch.Generator().manual_seed(seed(state))
        drawn = [g + 0.1 * torch.randn(g.shape, generator=generator) * grads.weight for g in grads.sum]
        return fds.Weighted(drawn, grads.weight)

    return changed("noise", change)


def noise_equal_on_shards() -> fds.Transform:
    """Each shard gets the same noise."""
    return noise(lambda state: 7)


def noise_different_on_ranks() -> fds.Transform:
    """Replicas drift apart."""
    return noise(lambda state: comm.world().rank)


# -- weights ---------------------------------------------------------------------------------------------------------------


def weight_replaced() -> fds.Transform:
    """Forgets that gradients are sums."""
    return changed("weight_replaced", lambda step, state, grads: fds.Weighted(grads.sum, torch.ones_like(grads.weight)))


def memory_of_sums() -> fds.Transform:
    """Keeps a mean of sums, which depends on how many ranks and micro-batches there are."""

    def update(inner: Any, step: fds.Step, state: fds.State, grads: fds.Weighted) -> Any:
        mean = [torch.lerp(g.to(m.dtype).view_as(m), m, 0.5) for g, m in zip(grads.sum, state.slots["kept"], strict=True)]
        return inner(step, state.put(kept=mean), fds.Weighted(mean, torch.ones_like(grads.weight)))

    zeros = lambda step, state: [torch.zeros_like(x) for x in step.trained(state)]  # noqa: E731
    return with_slot("memory_of_sums", zeros, update=fds.innermost(update))


def first_micro_batch_twice() -> fds.Transform:
    """Doubles the first micro-batch's sum."""

    def gradients(inner: Any, step: fds.Step, state: fds.State, batch: Any, carry: Any, last: bool) -> Any:
        after, grads, metrics = inner(step, state, batch, carry, last)
        return after, fds.Weighted([g * 2 if carry is None else g for g in grads.sum], grads.weight), metrics

    return fds.wrap("first_micro_batch_twice", gradients=gradients)


def rate_by_rows() -> fds.Transform:
    """Divides by the rows of this rank."""

    def loss(inner: Any, step: fds.Step, state: fds.State, params: Any, batch: Any) -> Any:
        found, metrics = inner(step, state, params, batch)
        return fds.Weighted(found.sum / len(batch), found.weight), metrics

    return fds.wrap("rate_by_rows", loss=loss)


# -- states ----------------------------------------------------------------------------------------------------------------


def counts_skipped() -> fds.Transform:
    """Says that it heeds skipped steps, and does not."""

    def update(inner: Any, step: fds.Step, state: fds.State, grads: fds.Weighted) -> Any:
        state, metrics = inner(step, state, grads)
        return state.put(kept=state.slots["kept"] + 1), metrics

    return with_slot("counts_skipped", lambda step, state: torch.zeros(()), update=update, traits=[Trait.HEEDS_SKIPS])


def infinite_memory() -> fds.Transform:
    """Keeps the last gradient, an infinite one, too."""

    def update(inner: Any, step: fds.Step, state: fds.State, grads: fds.Weighted) -> Any:
        last = [g.to(m.dtype).view_as(m) / grads.weight for g, m in zip(grads.sum, state.slots["kept"], strict=True)]
        old = fds.Weighted([*state.slots["kept"]], torch.ones_like(grads.weight))
        return inner(step, state.put(kept=last), old)

    zeros = lambda step, state: [torch.zeros_like(x) for x in step.trained(state)]  # noqa: E731
    return with_slot("infinite_memory", zeros, update=fds.innermost(update), traits=[Trait.HEEDS_SKIPS])


def limited_from_outside() -> fds.Transform:
    """Limits a gradient by the last one's norm, an infinite one too, which no state holds."""
    last: list[Tensor] = []

    def change(step: fds.Step, state: fds.State, grads: fds.Weighted) -> fds.Weighted:
        norm = step.norm(state, grads.sum) / grads.weight
        limit = last[-1] / 2 if last else norm
        last.append(norm)
        return fds.Weighted(grads.sum, grads.weight * (norm / limit).clamp(min=1))

    return changed("limited_from_outside", change)


def writes_in_place() -> fds.Transform:
    """Changes its slot in the phase ``gradients``, where the state is still the caller's."""

    def gradients(inner: Any, step: fds.Step, state: fds.State, batch: Any, carry: Any, last: bool) -> Any:
        state.slots["kept"].add_(1)
        return inner(step, state, batch, carry, last)

    return with_slot("writes_in_place", lambda step, state: torch.zeros(()), gradients=gradients)


def mean_in_the_params() -> fds.Transform:
    """From the second update on its slot is the params themselves, into which updates write; a copy with ``donate=False``."""

    def update(inner: Any, step: fds.Step, state: fds.State, grads: fds.Weighted) -> Any:
        before = state.slots["kept"]
        state, metrics = inner(step, state, grads)
        pulled = [p.lerp(mean.view_as(p), 0.1) for p, mean in zip(step.trained(state), before, strict=True)]
        state = step.with_trained(state, pulled)
        return state.put(kept=before if int(state.step) == 1 else step.trained(state)), metrics

    return with_slot("mean_in_the_params", lambda step, state: step.trained(state), update=update)


def counts_outside() -> fds.Transform:
    """Counts steps in Python, which no checkpoint has."""
    steps = [0]

    def rate(inner: Any, step: fds.Step, state: fds.State) -> Any:
        steps[0] += 1
        return inner(step, state) / steps[0]

    return fds.wrap("counts_outside", rate=rate)


def mean_of_sums() -> fds.Transform:
    """Watches a mean of sums, which depends on the number of ranks, and changes no parameter."""

    def update(inner: Any, step: fds.Step, state: fds.State, grads: fds.Weighted) -> Any:
        mean = [torch.lerp(g.to(m.dtype).view_as(m), m, 0.5) for g, m in zip(grads.sum, state.slots["kept"], strict=True)]
        return inner(step, state.put(kept=mean), grads)

    zeros = lambda step, state: [torch.zeros_like(x) for x in step.trained(state)]  # noqa: E731
    return with_slot("mean_of_sums", zeros, update=fds.innermost(update))


# -- precision, leaves, worlds ---------------------------------------------------------------------------------------------


def one_dtype() -> fds.Transform:
    """Mixes gradients and masters, as if they had one dtype."""

    def change(step: fds.Step, state: fds.State, grads: fds.Weighted) -> fds.Weighted:
        pairs = zip(grads.sum, step.trained(state), strict=True)
        return fds.Weighted([torch.lerp(g / grads.weight, x.view_as(g), 0.1) for g, x in pairs], torch.ones_like(grads.weight))

    return changed("one_dtype", change)


def all_leaves_used() -> fds.Transform:
    """Differentiates by all leaves, used or not."""

    def loss(inner: Any, step: fds.Step, state: fds.State, params: Any, batch: Any) -> Any:
        viewed = fds.tree.map(lambda leaf: leaf.view_as(leaf), params)
        found, metrics = inner(step, state, viewed, batch)
        if torch.is_grad_enabled():
            grads = torch.autograd.grad(found.sum, fds.tree.leaves(viewed), create_graph=True)
            found = fds.Weighted(found.sum + 0.01 * found.weight * sum(g.square().sum() for g in grads), found.weight)
        return found, metrics

    return fds.wrap("all_leaves_used", loss=loss)


def one_rank_sums() -> fds.Transform:
    """Sums over ranks in some ranks alone."""

    def change(step: fds.Step, state: fds.State, grads: fds.Weighted) -> fds.Weighted:
        if comm.world().rank == 0:
            comm.all_reduce(grads.weight)
        return grads

    return changed("one_rank_sums", change)


def impatient() -> fds.Transform:
    """Asks whether a sum has arrived, and does not wait for it."""

    def change(step: fds.Step, state: fds.State, grads: fds.Weighted) -> fds.Weighted:
        started = comm.start(comm.all_reduce, torch.ones(()), comm.world().channel("impatient"))
        done = started.poll(0.0)
        started.wait()
        return fds.Weighted(grads.sum, grads.weight * (1 + 1e-5 * done))

    return changed("impatient", change)


_RANKS_SEEN: set[int] = set()


def shared_memory() -> fds.Transform:
    """Takes for granted that all ranks are in one process."""

    def change(step: fds.Step, state: fds.State, grads: fds.Weighted) -> fds.Weighted:
        _RANKS_SEEN.add(comm.world().rank)
        comm.barrier()
        return fds.Weighted(grads.sum, grads.weight * len(_RANKS_SEEN & set(range(comm.world().size))) / comm.world().size)

    return changed("shared_memory", change)


def stale_constant() -> fds.Transform:
    """Reads Python's numbers while the step is traced."""
    calls = [0]

    def change(step: fds.Step, state: fds.State, grads: fds.Weighted) -> fds.Weighted:
        calls[0] += 1
        return fds.Weighted(grads.sum, grads.weight * float(calls[0]))

    return changed("stale_constant", change)


def chatty() -> fds.Transform:
    """Sends a number that no rank needs."""

    def change(step: fds.Step, state: fds.State, grads: fds.Weighted) -> fds.Weighted:
        comm.all_reduce(grads.weight.clone())
        return grads

    return changed("chatty", change)


def descent(params: Any, batches: list[Any], rate: float = 0.1, momentum: float = 0.5) -> Any:
    """The oracle of a transform that changes nothing: sgd with momentum in plain PyTorch."""
    leaves, spec = fds.tree.flatten(params)
    speeds: list[Any] = [0.0] * len(leaves)
    for batch in batches:
        leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        grads = torch.autograd.grad(Problem().loss(fds.tree.unflatten(spec, leaves), batch), leaves)
        speeds = [momentum * speed + grad for speed, grad in zip(speeds, grads, strict=True)]
        leaves = [leaf - rate * speed for leaf, speed in zip(leaves, speeds, strict=True)]
    return fds.tree.unflatten(spec, [leaf.detach() for leaf in leaves])


def uphill() -> fds.Transform:
    """Another method, the same on any ranks."""
    return changed("uphill", lambda step, state, grads: fds.Weighted(grads.sum, -grads.weight))


# The method, the law that must notice, and what ``holds`` is told.
WRONG: dict[Callable[[], fds.Transform], tuple[str, dict[str, Any]]] = {
    own_norm: ("stages", {}),
    norm_by_hand: ("stages", {}),
    norm_by_tensor: ("stages", {}),
    centred: ("stages", {}),
    rates_by_position: ("stages", {}),
    forgotten_reduce: ("replicated", {}),
    noise_equal_on_shards: ("stages", {}),
    noise_different_on_ranks: ("replicated", {}),
    weight_replaced: ("stages", {}),
    memory_of_sums: ("accumulate before", {}),
    first_micro_batch_twice: ("accumulate after", {}),
    rate_by_rows: ("stages", {}),
    counts_skipped: ("skipped steps", {}),
    infinite_memory: ("skipped steps", {}),
    limited_from_outside: ("skipped steps", {}),
    writes_in_place: ("donation", {}),
    mean_in_the_params: ("donation", {}),
    counts_outside: ("checkpoints", {}),
    mean_of_sums: ("slots", {}),
    one_dtype: ("bf16", {}),
    all_leaves_used: ("unused leaves", {}),
    one_rank_sums: ("stages", {}),
    impatient: ("interleavings", {}),
    shared_memory: ("processes", {}),
    stale_constant: ("jit", {}),
    chatty: ("bytes", {"sends": lambda stage, ranks: 0}),
    uphill: ("oracle", {"oracle": descent}),
}
