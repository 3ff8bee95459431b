"""Splits the sequences of a batch over ranks."""

import re
from collections.abc import Mapping
from typing import Any

import attrs
import optree
import torch
from torch import Tensor
from torch.nn import functional as F

from functional_ds import comm
from functional_ds.base import tree
from functional_ds.parallel.sequence.axis import AXIS, SequenceAxis, documents_of
from functional_ds.parallel.sequence.sequence_layout import SequenceLayout
from functional_ds.sharding.path_patterns import check_expression, nearest
from functional_ds.step.axes import with_axis

IGNORED = -100  # the label of positions that do not count

# Leaves that are cut along dim 1 wherever they are, by the last part of their path: how many dims they have; what pads them.
_KNOWN = {
    "input_ids": (2, 0),
    "inputs_embeds": (3, 0),
    "labels": (2, IGNORED),
    "shift_labels": (2, IGNORED),
    "attention_mask": (2, 0),
    "position_ids": (2, 0),
    "token_type_ids": (2, 0),
    "loss_mask": (2, 0),
    "documents": (2, -1),
}


@tree.record
class CutBatch:
    """A batch of this rank's positions, and what masks need of the whole sequence.

    Attributes:
        batch: what the loss function gets.
        documents: as in ``SequenceAxis``, for the rows of this batch.
        axis: without documents.
    """

    batch: Any
    documents: Tensor | None
    axis: SequenceAxis = tree.static()

    @property
    def device(self) -> torch.device:
        """Where the batch's tensors are."""
        return next(leaf.device for leaf in tree.leaves(self.batch) if isinstance(leaf, Tensor))


def entered(function: Any, given: Any) -> Any:
    """``function``, called with the inner batch under the ``axis("sp")`` of its sequence.

    ``given`` is a ``CutBatch`` or contains one. A batch that was not split is passed through.
    """
    pieces: list[CutBatch] = []

    def unwrap(node: Any) -> Any:
        if not isinstance(node, CutBatch):
            return node
        pieces.append(node)
        return node.batch

    plain = optree.tree_map(unwrap, given, is_leaf=lambda node: isinstance(node, CutBatch), namespace=tree.NAMESPACE)
    if not pieces:
        return function(given)
    return with_axis(AXIS, attrs.evolve(pieces[0].axis, documents=pieces[0].documents), function)(plain)


@attrs.frozen(eq=False)
class BatchCut:
    """Which leaves of a batch are sequences, and how they are split.

    Attributes:
        dims: from a regular expression for whole paths to the dim to split, None for a leaf that every rank gets whole; or the
            dim to split of all leaves that have it; None: leaves with known names along dim 1, and a lone tensor of tokens.
        shift: whether a dict's ``labels`` become ``shift_labels``, where each position has the next one's label.
        pad: the padding value by expressions for paths, or True for leaves with known names only; False for no padding.
        whole: whether ranks are given whole sequences, not their pieces.
    """

    dims: Mapping[str, int | None] | int | None
    shift: bool
    pad: Mapping[str, float] | bool
    whole: bool

    def __attrs_post_init__(self) -> None:
        if isinstance(self.dims, int) and self.dims < 1:
            raise ValueError(f"dims={self.dims}: rows are along dim 0, and a sequence along a dim that is counted from 1 on")
        for option, patterns in (("dims", self.dims), ("pad", self.pad)):
            for pattern in patterns if isinstance(patterns, Mapping) else ():
                check_expression(f"{option}: ", pattern)

    def prepared(self, batch: Any) -> Any:
        """The batch with shifted labels, and with a lone tensor of tokens as a dict."""
        tokens = isinstance(batch, Tensor) and batch.dim() == 2 and not batch.is_floating_point()
        if tokens and self.dims is None and self.shift:
            batch = {"input_ids": batch, "labels": batch}
        if not isinstance(batch, Mapping) or "labels" not in batch or "shift_labels" in batch or not self.shift:
            return batch
        if not self.whole:
            raise ValueError(
                "batch: 'labels' of a piece of a sequence cannot be shifted, as the next may be on another rank: shift them "
                "before the split, as 'shift_labels', or pass shift=False for labels that are already shifted"
            )
        labels = batch["labels"]
        after = (0, 0) * (labels.dim() - 2)
        shifted = F.pad(labels[:, 1:], (*after, 0, 1), value=IGNORED)
        return {**{name: leaf for name, leaf in batch.items() if name != "labels"}, "shift_labels": shifted}

    def sequences(self, batch: Any) -> dict[str, int]:
        """The leaves to split, with their dims.

        Raises:
            ValueError: a leaf with a known name has another number of dims, or a leaf without a rule has the sequence's length;
                an expression matches no path; there is nothing to split.
        """
        named = [(path, leaf) for path, leaf in tree.named(batch) if isinstance(leaf, Tensor)]
        dims = {path: dim for path, leaf in named if (dim := self._dim(path, leaf)) is not None}
        self._check_patterns(dict(named))
        if not dims:
            paths = ", ".join(repr(path) for path, _ in named) or "none"
            raise ValueError(
                f"batch: no leaf is known to be a sequence (the tensors are {paths}); name them: dims={{'tokens': 1}}"
            )
        lengths = {path: leaf.shape[dims[path]] for path, leaf in named if path in dims}
        length = next(iter(lengths.values()))
        for path, leaf in named:
            if lengths.get(path, length) != length:
                raise ValueError(
                    f"batch: the leaf at {path!r} has {lengths[path]} positions along dim {dims[path]}, and "
                    f"{next(iter(lengths))!r} has {length}; all leaves that are split have the same"
                )
            if self.dims is None and path not in dims and length in leaf.shape[1:]:
                raise ValueError(
                    f"batch: the leaf at {path!r} of shape {list(leaf.shape)} has a dim of the sequence's length {length}, and "
                    "no rule tells whether it is split; pass dims=, from paths to the dim that is split, or None for a whole "
                    "leaf"
                )
        return dims

    def _dim(self, path: str, leaf: Tensor) -> int | None:
        if isinstance(self.dims, int):
            return self.dims if leaf.dim() > self.dims else None
        name = path.rpartition(".")[2]
        if self.dims is None:
            if name not in _KNOWN:
                return None
            if leaf.dim() != _KNOWN[name][0]:
                raise ValueError(
                    f"batch: the leaf at {path!r} has shape {list(leaf.shape)}, and {name!r} is known with "
                    f"{_KNOWN[name][0]} dims, [rows, positions, ...]; pass dims= if it is another thing"
                )
            return 1
        hits = [pattern for pattern in self.dims if re.fullmatch(pattern, path)]
        if len(hits) > 1:
            raise ValueError(f"dims: {path!r} matches {hits[0]!r} and {hits[1]!r}; let one match")
        dim = self.dims[hits[0]] if hits else None
        if dim is not None and not 0 < dim < leaf.dim():
            raise ValueError(
                f"dims: {path!r} of shape {list(leaf.shape)} cannot be split along dim {dim}: its rows are along dim 0, and a "
                f"sequence along one of the {leaf.dim() - 1} others"
            )
        return dim

    def _check_patterns(self, leaves: Mapping[str, Tensor]) -> None:
        for option, patterns in (("dims", self.dims), ("pad", self.pad)):
            for pattern in patterns if isinstance(patterns, Mapping) else ():
                if not any(re.fullmatch(pattern, path) for path in leaves):
                    raise ValueError(f"{option}: {pattern!r} matches no path; {nearest(pattern, leaves)}")

    def filler(self, path: str) -> float:
        """The padding value of a leaf.

        Raises:
            ValueError: there is none for it.
        """
        if isinstance(self.pad, Mapping):
            for pattern, value in self.pad.items():
                if re.fullmatch(pattern, path):
                    return value
        name = path.rpartition(".")[2]
        if name not in _KNOWN:
            raise ValueError(
                f"pad: there is no rule for what the leaf at {path!r} is padded with; pass pad={{{path!r}: 0}}, for example"
            )
        return _KNOWN[name][1]

    def cut(self, batch: Any, dims: Mapping[str, int], axis: SequenceAxis, length: int) -> CutBatch:
        """This rank's piece of a prepared batch.

        Args:
            batch: as ``prepared`` gives it.
            dims: as ``sequences`` gives them.
            axis: of the padded sequence.
            length: of the sequence without padding.
        """
        named = {path: leaf for path, leaf in tree.named(batch) if path in dims}
        some = next(iter(named.values()))
        documents = self._documents(named, axis, length)
        positions = axis.positions(some.device)

        def piece(path: str, leaf: Any) -> Any:
            if path not in dims or not self.whole:
                return leaf
            missing = axis.length - length
            if missing:
                after = (0, 0) * (leaf.dim() - 1 - dims[path])
                leaf = F.pad(leaf, (*after, 0, missing), value=self.filler(path))
            return leaf.index_select(dims[path], positions)

        local = tree.map_named(piece, batch)
        if isinstance(local, Mapping) and "position_ids" not in local and ("input_ids" in local or "inputs_embeds" in local):
            # [1, positions]: one row for all; padding gets the last position, which every table of positions has
            local = {**local, "position_ids": positions.clamp(max=length - 1)[None]}
        return CutBatch(local, documents, axis)

    def _documents(self, named: Mapping[str, Tensor], axis: SequenceAxis, length: int) -> Tensor | None:
        """The documents of the whole sequence; padding belongs to none."""
        by_name = {path.rpartition(".")[2]: leaf for path, leaf in named.items()}
        mask, given, documents = (by_name.get(name) for name in ("attention_mask", "position_ids", "documents"))
        if mask is not None and mask.device.type == "cpu" and self.whole and bool((mask != 0).all()):
            mask, given = None, None  # it masks nothing, and attention without a mask is faster
        if mask is not None:
            given = None  # as in transformers: positions mark documents only where there is no mask
        if not self.whole:
            mask, given, documents = (None if leaf is None else _gathered(leaf, axis) for leaf in (mask, given, documents))
        if documents is None:
            documents = documents_of(mask, position_ids=given)
        elif mask is not None:  # both: documents with padding
            documents = torch.where(mask == 0, -1, documents)
        missing = axis.length - length
        by_layout = documents is None and axis.layout.documents is not None  # the padding is a document of the layout
        if missing and not by_layout:
            if documents is None:
                some = next(iter(named.values()))
                documents = torch.zeros(1, length, dtype=torch.int64, device=some.device)
            documents = F.pad(documents, (0, missing), value=-1)
        return documents


def _gathered(piece: Tensor, axis: SequenceAxis) -> Tensor:
    """The whole sequence of a piece [rows, positions], on every rank."""
    inverse = axis.layout.inverse(axis.length, axis.group.size, device=piece.device)
    whole: Tensor = comm.all_gather(piece, axis.group, dim=1)
    return whole.index_select(1, inverse)


def padded(layout: SequenceLayout, length: int, ranks: int) -> tuple[SequenceLayout, int]:
    """The layout and length of a sequence that is padded to split evenly over so many ranks."""
    missing = layout.padding(length, ranks)
    return layout.extended(missing), length + missing
