"""Checks of a step's arguments: params, batches and states, and that ranks have the same step."""

import warnings
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import optree
import torch
from torch import Tensor

from functional_ds import comm
from functional_ds.base import tree
from functional_ds.base.byte_ranges import overlapping
from functional_ds.base.containers import register_containers
from functional_ds.base.marks import like_marked, trainable
from functional_ds.base.torch_private import has_values, in_torch_func, storage_id
from functional_ds.comm.worlds.process import ProcessWorld

from .phases import Layer
from .state.buffers import BUFFERS
from .state.state import State, Summing, refuse_donated

_PLAIN = (bool, int, float, complex, str, bytes)  # leaves of a batch that are not tensors


class Strategy(Summing, Protocol):
    """The part of a step that these checks read."""

    @property
    def layers(self) -> tuple[Layer, ...]: ...

    @property
    def options(self) -> Mapping[str, Any]: ...

    @property
    def buffers(self) -> str: ...

    @property
    def keeps_graph(self) -> bool: ...


def refuse_inference(step: Strategy, *args: Any) -> None:
    """Refuses inference mode, whose tensors have no part in training, in this step or a later one.

    Raises:
        RuntimeError: it is on.
    """
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            "step: torch.inference_mode() is on, and nothing trains on the tensors that it makes; leave the block for it "
            "(step.evaluate may stay inside)"
        )


def refuse_torch_func(step: Strategy, *args: Any) -> None:
    """Refuses to run within ``torch.func.grad``, ``jvp`` or ``vmap``, which most steps do not support.

    Raises:
        RuntimeError: one of them runs, and this step is not differentiable.
    """
    if in_torch_func() and not step.keeps_graph:
        raise RuntimeError(
            f"step: a transform of torch.func runs ({step}), and this step writes into memory and keeps no graph: use "
            "fds.differentiable(step)"
        )


def check_state(step: Strategy, state: Any, *args: Any) -> None:
    """Refuses a value that is not a State, and a state whose slots are not those of the step's transforms.

    Raises:
        TypeError: the former.
        ValueError: the latter.
    """
    if not isinstance(state, State):
        raise TypeError(f"state: {type(state).__name__} is not a State; pass what step.init(params) or step(state, batch) gave")
    refuse_donated(state)
    wanted = {layer.slot: layer.name for layer in step.layers if layer.slot is not None}
    missing, extra = wanted.keys() - state.slots.keys(), state.slots.keys() - wanted.keys() - {BUFFERS}
    if missing or extra:
        lacks = "".join(f"; it lacks the slot {slot!r} of {wanted[slot]}" for slot in sorted(missing))
        has = "".join(f"; it has the slot {slot!r}, which no transform of the step keeps" for slot in sorted(extra))
        raise ValueError(
            f"state: it is the state of another strategy than {step}{lacks}{has}. Use the state of this step's init, or carry "
            "the values over: fds.save(state, folder), then fds.load(folder, like=step.init(params))"
        )


def shared_tensors(state: State) -> list[tuple[str, str, Tensor]]:
    """What of its optimizer's state and slots shares memory with the params, or with each other: ``(part, other, tensor)``."""
    if not has_values(state.step):
        return []
    slots = {f"the slot {slot!r}": value for slot, value in state.slots.items()}
    parts = {"the params": state.params, "the optimizer's state": state.optimizer, **slots}
    leaves = ((part, leaf) for part, value in parts.items() for leaf in tree.leaves(value))
    named = [(part, leaf) for part, leaf in leaves if isinstance(leaf, Tensor) and leaf.layout == torch.strided]
    owners = defaultdict[int, set[str]](set)
    for part, leaf in named:
        owners[storage_id(leaf)].add(part)
    shared = [(part, leaf) for part, leaf in named if len(owners[storage_id(leaf)]) > 1]
    pairs = [sorted(pair, key=lambda extent: [*parts].index(extent.name)) for pair in (overlapping(shared) if shared else ())]
    return [(later.name, first.name, later.tensor) for first, later in pairs if first.name != later.name]


def with_own_memory(state: State) -> State:
    """A new state whose optimizer and slots share no memory with the params: they keep values, and updates write in place."""
    shared = {id(tensor) for _, _, tensor in shared_tensors(state)}
    if not shared:
        return state
    copies = tree.map(lambda x: like_marked(x.detach().clone(), x) if id(x) in shared else x, (state.optimizer, state.slots))
    return tree.replace(state, optimizer=copies[0], slots=copies[1])


def refuse_shared(state: State) -> None:
    """Refuses what the first update returns if slots share memory with the params, into which the next update writes.

    Raises:
        ValueError: they do.
    """
    for part, other, _ in shared_tensors(state):
        raise ValueError(
            f"update: {part} shares memory with {other}, and the next update writes into it in place; let the transform or "
            "optimizer keep a copy, tensor.clone()"
        )


def name_sum(step: Strategy, state: State, metrics: Mapping[str, Any], call: str) -> Tensor | None:
    """What ranks sum to check that their metrics have the same names; None after the first call.

    Sums over ranks match metrics by position. The numbers are small, so their sum is exact in fp32 for 4,096 ranks.

    Args:
        step: the step whose loss returned them.
        state: records the names.
        metrics: this rank's metrics.
        call: "step" or "measure", whose names may differ.

    Raises:
        ValueError: the names differ from those of the first call.
    """
    if not step.sums or not has_values(state.step):
        return None
    names, known = sorted(metrics.keys() - {"loss"}), state.graphs.metrics.setdefault(step, {})
    if call in known:
        if known[call] != names:
            raise ValueError(
                f"the loss function returned the metrics {names}, and {known[call]} before; ranks add them up by their places: "
                "return the same metrics in every step, fds.Weighted(torch.zeros(()), 0) where there is nothing to add"
            )
        return None
    known[call] = names
    if len(metrics) < 2:
        return None
    return torch.tensor([*_two_numbers(metrics), 1.0], device=state.step.device)


def refuse_other_names(metrics: Mapping[str, Any], total: Tensor | None) -> None:
    """Refuses metrics whose names differ between ranks.

    Raises:
        ValueError: they differ.
    """
    if total is None or total.is_meta:
        return
    *summed, ranks = total.tolist()
    if summed != [number * ranks for number in _two_numbers(metrics)]:
        raise ValueError(
            f"the loss function returned the metrics {sorted(metrics)} on this rank, and others on another rank; return the "
            "same metrics on every rank, fds.Weighted(torch.zeros(()), 0) where a rank has nothing to add"
        )


def _two_numbers(metrics: Mapping[str, Any]) -> list[float]:
    number = zlib.crc32("\n".join(sorted(metrics)).encode())
    return [float(number & 0xFFF), float(number >> 12 & 0xFFF)]


def structure_of(batch: Any) -> optree.PyTreeSpec:
    """The structure of a batch; registers its containers as pytrees."""
    if not all(isinstance(leaf, Tensor) for leaf in tree.leaves(batch)):
        register_containers(batch)
    return tree.structure(batch)


def check_batch(step: Strategy, state: State, batch: Any) -> None:
    """Refuses batches that are not trees of tensors and numbers, or whose structure differs from the previous ones.

    Raises:
        TypeError: a leaf of the batch is neither a tensor nor a number or string.
        ValueError: the structure differs from that of earlier batches; the params are meta tensors, and the batch is not.
    """
    if batch is None:
        return
    structure = structure_of(batch) if state.batch is None else tree.structure(batch)
    if state.batch is None:
        _check_leaves(batch)
        _refuse_bare(step, state, batch)
    elif state.batch != structure:
        raise ValueError(
            f"batch: its structure is {structure}, but the batches so far had {state.batch}; give all batches one structure"
        )


def _check_leaves(batch: Any) -> None:
    leaves = tree.named(batch)
    for path, leaf in leaves:
        if isinstance(leaf, (Tensor, *_PLAIN)):
            continue
        mend = "torch.as_tensor(array)" if hasattr(leaf, "__array__") else "a dict, list or tuple of its tensors"
        if isinstance(leaf, Mapping) or (hasattr(leaf, "data") and isinstance(leaf.data, Mapping)):
            mend = "dict(batch)"
        where = f"the leaf at {path!r}" if path else "it"
        raise TypeError(f"batch: {where} is a {type(leaf).__name__}, in which no tensors are found; pass {mend} instead")
    if leaves and not any(isinstance(leaf, Tensor) for _, leaf in leaves):
        raise TypeError(
            f"batch: {batch!r} has no tensor, so it has no rows to divide among ranks and micro-batches; wrap numbers in "
            "torch.tensor"
        )


def _refuse_bare(step: Strategy, state: State, batch: Any) -> None:
    """Raises an error for params without values, which are for dry runs, whose batches have none either."""
    if not tree.on_meta(state.params) or all(map(tree.on_meta, tree.leaves(batch))):
        return
    tensors, leaf_map = trainable(state.params), step.leaf_map(state)
    trained = [leaf_map.leaves[piece.leaf].path for piece in leaf_map.shards if tree.on_meta(tensors[piece.tensor])]
    path = next(iter(trained), None) or next(path for path, leaf in tree.named(state.params) if tree.on_meta(leaf))
    raise ValueError(
        f"state: the leaf {path!r} of its params is on the device 'meta', without values, but the batch has some; a module "
        "without memory is built by fds.deferred(build), and fds.from_source(params, source) names where values are read"
    )


@contextmanager
def warning_of_lone_ranks(step: Strategy, state: State) -> Iterator[None]:
    """Warns, on one rank, of a first step without communication, in which each rank trains its own model.

    Simulated ranks do not warn: they often run single-device steps for comparison.
    """
    here = comm.world()
    counts = state.batch is None and here.size > 1 and here.rank == 0 and not any(layer.axes for layer in step.layers)
    if not counts or not isinstance(here.world, ProcessWorld):
        yield
        return
    with comm.ledger() as sent:
        yield
    if not any(len(row.ranks) > 1 for row in sent.rows):
        warnings.warn(
            f"{step}: the first step has sent nothing between the {here.size} ranks, so each trains a model by itself, on "
            "its own batches: compose T.zero(0), which sums gradients over the ranks. If that is what you want, say so by a "
            f"group of one rank, T.zero(0, comm.new_group([{here.rank}])), or ignore this warning",
            stacklevel=4,
        )
