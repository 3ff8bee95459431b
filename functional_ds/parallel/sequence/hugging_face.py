"""Attention over split sequences for unmodified Hugging Face models, in transformers' attention and mask registries.

The registered functions hold no group: they get it, the layout and the documents from the running step.
"""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from functional_ds.base import tree
from functional_ds.base.torch_private import has_values
from functional_ds.step.axes import is_for_shapes

from .axis import SequenceAxis, sequence_axis
from .cut_attention import shape_of_attention
from .gathered_keys import gathered
from .ring import ring
from .ulysses import ulysses

# Unsupported arguments that change an attention's result, by the names under which models pass them.
_REFUSED = ("softcap", "s_aux", "position_bias", "head_mask", "alibi", "cu_seq_lens_q", "cu_seq_lens_k", "cache")


@attrs.frozen(eq=False)
class SequenceMask:
    """A model's mask as data, for attention over a split sequence: no mask tensor is made.

    Attributes:
        causal: whether positions attend only to themselves and earlier ones.
        window: to how many positions at most, itself included.
        padding, position_ids: the model's, if they are not compared with the step's yet, because the mask was made in a trace.
    """

    causal: bool
    window: int | None
    padding: Tensor | None = attrs.field(default=None, repr=tree.summary)
    position_ids: Tensor | None = attrs.field(default=None, repr=tree.summary)


def _ulysses_ring(axis: SequenceAxis) -> Callable[..., Tensor]:
    if axis.ring_group is None or axis.ulysses_group is None:
        raise ValueError(
            f"fds_ulysses_ring: the step's layout {axis.layout!r} has no groups for a ring and for Ulysses inside of it: give "
            "T.sequence one with inner=, the number of ranks of Ulysses"
        )
    layout = attrs.evolve(axis.layout, inner=1)
    return ulysses(ring(axis.ring_group, layout=layout), axis.ulysses_group)


WAYS: dict[str, Callable[[SequenceAxis], Callable[..., Tensor]]] = {
    "fds_gathered": lambda axis: gathered(axis.group, layout=axis.layout),
    "fds_ring": lambda axis: ring(axis.group, layout=axis.layout),
    "fds_ulysses": lambda axis: ulysses(None, axis.group, layout=axis.layout),
    "fds_ulysses_ring": _ulysses_ring,
}


def register_attention() -> tuple[str, ...]:
    """Registers attention over split sequences in transformers; returns the names for ``attn_implementation``.

    Law: in a step with ``T.sequence`` such a model equals the model with "sdpa" on one device. "fds_ring", "fds_ulysses" and
    "fds_gathered" are the functions of those names, "fds_ulysses_ring" is Ulysses over a ring. They are registered for the
    whole process; a second call does nothing.

    Padding masks and packed documents are those of the batch that ``T.sequence`` has split. When the model runs, an error is
    raised for what is unsupported: other masks (chunked, blockwise, of 4 dims), dropout, soft caps, sinks, position biases,
    caches, another mask or other positions than the step's, and a step without a sequence axis.

    Raises:
        ImportError: transformers is not installed.

    Cost: if a model passes an attention mask or positions, the host waits once a forward pass to compare them.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    for name, way in WAYS.items():
        AttentionInterface.register(name, _attention(name, way))
        AttentionMaskInterface.register(name, _mask(name))
    return tuple(WAYS)


def _attention(name: str, way: Callable[[SequenceAxis], Callable[..., Tensor]]) -> Callable[..., tuple[Tensor, None]]:
    def forward(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        sliding_window: int | None = None,
        position_ids: Tensor | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """[rows, heads, N/P, d] to [rows, N/P, heads, d]."""
        axis = None if is_for_shapes() else sequence_axis(name)
        if dropout:
            raise ValueError(f"{name}: dropout={dropout} in attention: set the model's attention_dropout to 0")
        for other in _REFUSED:
            if others.get(other) is not None:
                raise ValueError(f"{name}: the model passes {other}, which attention over a split sequence does not have")
        if attention_mask is None:
            causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
            mask = SequenceMask(causal, sliding_window if causal else None)
        elif isinstance(attention_mask, SequenceMask):
            mask = attention_mask
        else:
            shape = list(getattr(attention_mask, "shape", []))
            raise ValueError(
                f"{name}: an attention mask {type(attention_mask).__name__} of shape {shape}: the ranks know padding masks "
                "[rows, positions] and documents of the batch that T.sequence splits, no others"
            )
        first = getattr(module, "layer_idx", 0) == 0
        given = mask.position_ids if position_ids is None else position_ids
        if axis is None:
            for tensor in (given, mask.padding) if first else ():
                _ = None if tensor is None else tensor.clone()  # a trace leaves out the values of what nothing reads
            return shape_of_attention(query, key, value).transpose(1, 2), None
        if first:
            _check_positions(name, given, axis)
            _check_padding(name, mask.padding, axis)
        window = mask.window if mask.window is not None and mask.window < axis.length else None
        o = way(axis)(query, key, value, scale=scaling, causal=mask.causal, window=window)  # the step has the documents
        return o.transpose(1, 2), None

    return forward


def _check_positions(name: str, given: Tensor | None, axis: SequenceAxis) -> None:
    """Without documents, positions count through the whole sequence; a model on its own would count each piece from 0."""
    if given is None or not has_values(given):
        return
    positions = axis.positions(given.device)
    if axis.documents is None and axis.layout.documents is None and not torch.equal(given, positions.expand_as(given)):
        raise ValueError(
            f"{name}: the model's position_ids are not this rank's positions in the sequence: pass it those of the batch that "
            "T.sequence split; packed documents must be known to T.sequence"
        )


def _mask(name: str) -> Callable[..., SequenceMask]:
    def make(
        batch_size: int,
        q_length: int,
        kv_length: int,
        q_offset: int = 0,
        kv_offset: int = 0,
        mask_function: Callable[..., Any] | None = None,
        attention_mask: Tensor | None = None,
        **others: Any,
    ) -> SequenceMask:
        axis = None if is_for_shapes() else sequence_axis(name)
        local_length = q_length if axis is None else axis.length // axis.group.size
        if (q_length, kv_length, q_offset, kv_offset) != (local_length, local_length, 0, 0):
            raise ValueError(
                f"{name}: {q_length} queries from {q_offset} and {kv_length} keys from {kv_offset}: a rank has {local_length} "
                "of both; it takes the batch that T.sequence split, and no cache"
            )
        known, causal, windows, position_ids = _known(), False, [], None
        for function in _parts(name, mask_function):
            code, free = function.__code__, inspect.getclosurevars(function).nonlocals
            causal = causal or code is known["causal"]
            windows += [free["sliding_window"]] if code is known["window"] else []
            if code is known["remap"]:
                position_ids = free["position_ids"]
        if windows and not causal:
            raise ValueError(f"{name}: a window of {min(windows)} without causal attention")
        window = min(windows, default=None)
        if axis is None:
            return SequenceMask(causal, window, attention_mask, position_ids)
        _check_padding(name, attention_mask, axis)
        _check_positions(name, position_ids, axis)
        return SequenceMask(causal, window)

    return make


def _check_padding(name: str, given: Tensor | None, axis: SequenceAxis) -> None:
    if given is None or not has_values(given):
        return
    documents = axis.documents
    expected = torch.ones_like(given, dtype=torch.bool) if documents is None else (axis.cut(documents) >= 0).expand_as(given)
    if not torch.equal(given.to(torch.bool), expected):
        raise ValueError(
            f"{name}: the model's attention_mask is not the mask of the batch that T.sequence split: other ranks do not know it"
        )


def _known() -> dict[str, Any]:
    """The code objects of the supported mask functions of transformers."""
    from transformers import masking_utils as masks

    some, causal = torch.zeros(1, 1), masks.causal_mask_function
    functions = {
        "causal": causal,
        "every": masks.bidirectional_mask_function,
        "window": masks.sliding_window_overlay(1),
        "both": masks.and_masks(causal),
        "packed": masks.packed_sequence_mask_function(some),
        "remap": masks.remap_positions_for_packed_sequence(causal, some),
    }
    return {name: function.__code__ for name, function in functions.items()}


def _parts(name: str, function: Any) -> Iterator[Any]:
    """The functions of which all must allow a pair.

    Raises:
        ValueError: one is not supported.
    """
    known = _known()
    code = getattr(function, "__code__", None)
    if code not in known.values():
        what = getattr(function, "__qualname__", function)
        raise ValueError(f"{name}: the model's mask has {what}, which attention over a split sequence does not have")
    free = inspect.getclosurevars(function).nonlocals
    if code is known["both"]:
        for part in free["mask_functions"]:
            yield from _parts(name, part)
        return
    yield function
    if code is known["remap"]:
        yield from _parts(name, free["mask_function"])
