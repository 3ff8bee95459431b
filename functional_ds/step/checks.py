"""What a step refuses at its boundary: params, batches and states of the wrong kind, and ranks that have another step."""

import re
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from types import MappingProxyType
from typing import Any, Protocol

import optree
import torch
from torch import Tensor, nn

from functional_ds import comm
from functional_ds.base import tree
from functional_ds.base.byte_ranges import overlapping
from functional_ds.base.containers import register_containers
from functional_ds.base.marks import is_trainable, module_of, trainable
from functional_ds.base.weighted import Weighted
from functional_ds.comm.agreement.agree import Entry, differences
from functional_ds.comm.agreement.description import described
from functional_ds.comm.record.call_recorder import current_recorder
from functional_ds.comm.worlds.process import ProcessWorld
from functional_ds.sharding.leaf_map import LeafMap

from .pass_scope import Pass
from .phases import Layer
from .state.buffers import BUFFERS
from .state.state import State, refuse_donated

__all__ = [
    "GUARDS",
    "check_graph",
    "check_same_leaves",
    "entries",
    "name_sum",
    "refuse_inference",
    "refuse_other_names",
    "structure_of",
    "warning_of_lone_ranks",
]

_PLAIN = (bool, int, float, complex, str, bytes)  # beside tensors, a batch may have these


class Strategy(Protocol):
    """The part of a step that these checks read."""

    @property
    def layers(self) -> tuple[Layer, ...]: ...

    @property
    def options(self) -> Mapping[str, Any]: ...

    @property
    def buffers(self) -> str: ...

    @property
    def skips_unused(self) -> bool: ...

    def leaf_map(self, state: State) -> LeafMap: ...

    @property
    def sums(self) -> bool: ...


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


def check_params(step: Strategy, params: Any) -> None:
    """Refuses what is no tree of tensors.

    Raises:
        TypeError: a leaf is none; ``params`` is a module.
        ValueError: two leaves have one path; two parameters of modules share memory, so that the step would part what is tied
            (other tensors are values).
    """
    if isinstance(params, nn.Module):
        raise TypeError(
            f"params: this is the module {type(params).__name__}; write apply, params = fds.functional(module), let the loss "
            "call apply(params, ...), and pass params"
        )
    tree.tensors(params, "params")
    tree.check_paths(params, "params")
    named = [(path, leaf) for path, leaf in tree.named(params) if is_trainable(leaf)]
    trained = [(path, leaf) for path, leaf in named if isinstance(leaf, nn.Parameter) or module_of(leaf) is not None]
    for one, other in overlapping(trained):
        raise ValueError(
            f"params: the leaves at {one.name!r} and {other.name!r} share memory, and the step would train each alone. If they "
            "are tied, give one leaf alone, and use it twice in the loss; modules that share a part go into one module "
            "(nn.ModuleDict), of which fds.functional takes the parameters once. If not, clone one of them"
        )


def check_state(step: Strategy, state: Any, *args: Any) -> None:
    """Refuses what is no state, and a state whose slots are not those of the step's transforms.

    Raises:
        TypeError: the former.
        ValueError: the latter.
    """
    if not isinstance(state, State):
        raise TypeError(f"state: {type(state).__name__} is no State; pass what step.init(params) or step(state, batch) gave")
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


def check_graph(loss: Weighted, pass_: Pass) -> None:
    """Refuses a loss that nothing would be trained by. One of weight zero has no part in the step.

    Raises:
        RuntimeError: as ``backward`` does.
    """
    if pass_.view is not None and pass_.view.leaves and not loss.sum.requires_grad and bool(torch.as_tensor(loss.weight != 0)):
        raise RuntimeError(
            f"the loss {loss.sum} has no graph, so it would train nothing: it does not depend on params, or was computed under "
            "torch.no_grad() or torch.inference_mode(), or taken out by detach() or item(). Return the tensor itself; a batch "
            "without targets weighs nothing: return fds.Weighted(torch.zeros(()), 0)"
        )


def name_sum(step: Strategy, state: State, metrics: Mapping[str, Any]) -> Tensor | None:
    """What ranks sum to see that their metrics have the same names; None where these were seen before.

    Sums over ranks match metrics by their places. The numbers are small, so their sum is exact in fp32 for 4,096 ranks.
    """
    names = ("metrics", *metrics)
    if len(metrics) < 2 or not step.sums or state.step.is_meta or not state.graphs.is_new(names):
        return None
    return torch.tensor([*_two_numbers(metrics), 1.0], device=state.step.device)


def refuse_other_names(metrics: Mapping[str, Any], total: Tensor | None) -> None:
    """Refuses metrics that have other names on another rank.

    Raises:
        ValueError: they have.
    """
    if total is None or total.is_meta:
        return
    *found, ranks = total.tolist()
    if found != [number * ranks for number in _two_numbers(metrics)]:
        raise ValueError(
            f"the loss function returned the metrics {sorted(metrics)} on this rank, and others on another rank; return the "
            "same metrics on every rank, fds.Weighted(torch.zeros(()), 0) where a rank has nothing to add"
        )


def _two_numbers(metrics: Mapping[str, Any]) -> list[float]:
    number = zlib.crc32("\n".join(sorted(metrics)).encode())
    return [float(number & 0xFFF), float(number >> 12 & 0xFFF)]


def structure_of(batch: Any) -> optree.PyTreeSpec:
    """The structure of a batch, whose containers are trees from now on."""
    register_containers(batch)
    return tree.structure(batch)


def check_batch(step: Strategy, state: State, batch: Any) -> None:
    """Refuses batches that are no trees of tensors and numbers, or have another structure than those before.

    Raises:
        TypeError: a leaf of the batch is neither a tensor nor a number or string.
        ValueError: the structure is another than that of the batches before; the params have no values, and the batch has.
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
    """Params without values are for predictions, whose batches have none either."""
    if not _on_meta(state.params) or all(map(_on_meta, tree.leaves(batch))):
        return
    tensors, leaf_map = trainable(state.params), step.leaf_map(state)
    trained = [leaf_map.leaves[piece.leaf].path for piece in leaf_map.shards if _on_meta(tensors[piece.tensor])]
    path = next(iter(trained), None) or next(path for path, leaf in tree.named(state.params) if _on_meta(leaf))
    raise ValueError(
        f"state: the leaf {path!r} of its params is on the device 'meta', without values, but the batch has some; a module "
        "without memory is built by fds.deferred(build), and fds.from_source(params, source) says where values are read"
    )


def _on_meta(values: Any) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in tree.leaves(values))


def entries(step: Strategy) -> dict[str, Entry]:
    """What all ranks of a step must have alike, by name.

    Neither the loss nor the batch is among it: these may be a rank's own, as may the names of groups.

    >>> import functional_ds as fds
    >>> from functional_ds import transforms as T
    >>> step = fds.compose(T.accumulate(2), T.clip(1.0))(fds.train_step(lambda params, x: x.sum(), fds.sgd(0.1)))
    >>> print(entries(step)["transforms"])
    accumulate(2) -> clip(1.0)
    """
    groups = _groups(step)
    layers = [_of_layer(layer, groups) for layer in step.layers]
    return {
        "functional_ds": Entry(version("functional-ds")),
        "torch": Entry(torch.__version__.partition("+")[0]),
        **{name: Entry(str(value), described(value)) for name, value in step.options.items()},
        "buffers": Entry(repr(step.buffers)),
        "unused": Entry(repr("skip" if step.skips_unused else "zeros")),
        "transforms": Entry(" -> ".join(map(str, layers)) or "none", " ".join(layer.exact for layer in layers)),
    }


def _of_layer(layer: Layer, groups: Sequence[comm.Group]) -> Entry:
    if layer.options is None:
        return Entry(_without_names(layer.name, groups))
    name = layer.name.partition("(")[0]
    shown = (f"{option}={getattr(value, '__name__', None) or value}" for option, value in layer.options.items())
    return Entry(f"{name}({', '.join(shown)})", described(layer.options))


def _without_names(text: str, groups: Iterable[comm.Group]) -> str:
    """The text without the groups' names, which may differ between ranks that lie along another axis."""
    for group in groups:
        text = re.sub(rf"{re.escape(repr(group.name))} of (?=\d)", "", text)
    return text


def _groups(step: Strategy) -> list[comm.Group]:
    """The groups of its transforms that have this rank and others, each once, in the order of the transforms."""
    given = [axis.ranks() for layer in step.layers for axis in layer.axes]
    return list({group.ranks: group for group in given if group.size > 1 and group.rank >= 0}.values())


def check_same_leaves(params: Any, group: comm.Group) -> None:
    """Refuses params that differ between the ranks in more than their values.

    Raises:
        ValueError: on all ranks: paths, shapes, dtypes, or which leaves are trained.
    """
    shapes = [(path, tuple(leaf.shape), str(leaf.dtype), is_trainable(leaf)) for path, leaf in tree.named(params)]
    differ, mend = "other leaves, shapes, dtypes or frozen leaves", "build the same model on every rank"
    comm.agree(shapes, group, what="params", differ=differ, mend=mend)


def check_same_step(step: Strategy, *args: Any) -> None:
    """Refuses steps that differ among the ranks that train together: those of the groups of the transforms, along all axes.

    Cost: one all-reduce of 16 bytes a group, on its channel "control"; the texts, where they differ.

    Raises:
        ValueError: on all ranks: names what differs, and which ranks have what.
    """
    groups = _groups(step)
    if not groups:
        return
    mine = entries(step)
    found = differences(mine, groups, what=f"a step of {mine['optimizer']} with {mine['transforms']}")
    if found:
        raise ValueError(
            f"init: ranks that train together have different steps. {found}. Compose the same step on every rank, and choose "
            "by rank only what a batch or a loss is made of"
        )


def refuse_unreduced(step: Strategy, state: State, grads: Sequence[Tensor]) -> None:
    """Refuses a norm of gradients that are not reduced yet.

    Raises:
        ValueError: they are those of each rank's rows.
    """
    for layer in step.layers:
        if state.reduced is False and any(axis.summed_in == "reduce" for axis in layer.axes):
            raise ValueError(
                f"{layer.name}: step.norm is asked within the phase gradients, where each rank has gradients of its rows "
                "alone; use reduced, grads = step.reduce(state, grads) first, and step.norm(reduced, grads.sum)"
            )


@contextmanager
def warning_of_lone_ranks(step: Strategy, state: State) -> Iterator[None]:
    """Warns of a first step that has sent nothing, so that each rank trains a model of its own; one rank says so.

    In a simulation ranks often run single-device steps beside each other, to compare with them.
    """
    here = comm.world()
    counts = state.batch is None and here.size > 1 and here.rank == 0 and not any(layer.axes for layer in step.layers)
    if not counts or not isinstance(here.world, ProcessWorld) or current_recorder() is not None:
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


Guard = Callable[..., None]

GUARDS: Mapping[str, tuple[Guard, ...]] = MappingProxyType(
    {  # what each call of a step looks for before it begins; the guards of its transforms stand beside their phases
        "init": (refuse_inference, check_params, check_same_step),
        "step": (refuse_inference, check_state, check_batch),
        "open": (refuse_inference, check_state, check_batch),
        "finish": (refuse_inference, check_state),
        "evaluate": (check_state, check_batch),
        "params": (check_state,),
        "norm": (refuse_unreduced,),
    }
)
