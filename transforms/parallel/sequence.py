"""Sequence (context) parallelism: each rank has other positions of the same sequences."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor

from functional_ds import comm
from functional_ds.base import tree
from functional_ds.base.device import generator_states
from functional_ds.base.weighted import Weighted
from functional_ds.comm.worlds.current import recorder
from functional_ds.parallel.sequence.axis import AXIS, IN_DOCUMENTS, SequenceAxis
from functional_ds.parallel.sequence.sequence_layout import SequenceLayout
from functional_ds.state_dict.fingerprint import fingerprints
from functional_ds.step.axes import EAGER_FIRST, IN_ORDER, asked
from functional_ds.step.compose import wrap
from functional_ds.step.over_ranks.mesh_axes import Axis, AxisRole
from functional_ds.step.pass_scope import current_pass
from functional_ds.step.phase_signatures import Passed
from functional_ds.step.phases import outermost
from functional_ds.step.state.state import State
from functional_ds.step.step import Step, Transform

from .batch_cut import BatchCut, CutBatch, entered, padded
from .loss_checks import HALF, ZEROS, check_order, check_sum
from .wide_sums import is_half

_KINDS = 256  # how many batches to remember: each may have other documents, which a layout knows


def sequence(
    group: comm.Group | None = None,
    *,
    layout: SequenceLayout | str | Callable[[Any], SequenceLayout] = "contiguous",
    dims: Mapping[str, int | None] | int | None = None,
    shift: bool = True,
    pad: Mapping[str, float] | bool = False,
    whole: bool = True,
    tokenwise: bool = False,
) -> Transform:
    """Sequence (context) parallelism: each rank of ``group`` computes the loss of its positions of the same sequences.

    For any layout, it equals the single-device step on the whole batch, if the loss sums over tokens and
    returns ``Weighted(sum, tokens)``; ranks may have different numbers of counted tokens. A ``Key`` draws for each position
    along dim 1 what a single device draws there; use ``places={1: None}`` for tensors without a sequence dim. Attention across
    ranks is the model's: ``fds.seq.ring`` and similar functions get group, layout and masks from ``axis("sp")``.

    All ranks of the group get the same batch. A dict's ``labels`` become ``shift_labels`` before the split, and
    ``position_ids`` are added. A lone tensor of tokens [rows, positions] becomes ``{"input_ids": tokens, "labels": tokens}``.
    Then the sequence leaves are split in the layout. Attention masks follow from ``attention_mask``, ``documents`` [rows,
    positions], or both, or, without these, ``position_ids`` that restart.

    It does not reduce gradients: compose it with ``T.zero(k, mesh["dp", "sp"])``, which sums gradients and weights over both
    axes. Rows are counted over "dp" alone. Put it after ``pipeline``; it may be before or after any other transform.

    Cost: one small message, on which the host waits, for each new shape or layout of batches, by which ranks compare them; with
    ``whole=False`` also the masks. The first step runs five more forward passes, with dropout off, to check that only attention
    depends on the order of a rank's tokens, and that the loss is a sum over tokens; seven, most of which sum in fp32, if the
    loss is in half precision; the second step too, if a matrix was all zeros at first. A loss that reduces over the ranks
    itself need not be a sum over tokens. The order is not checked with attention other than ``fds.seq``'s or a window of 2.

    Args:
        group: the ranks over which sequences are split; None for the whole world.
        layout: "contiguous", "zigzag", "striped", a ``SequenceLayout``, or a function from the batch to one, for documents that
            differ from batch to batch.
        dims: which leaves are split. None: ``input_ids``, ``inputs_embeds``, ``labels``, ``shift_labels``, ``attention_mask``,
            ``position_ids``, ``token_type_ids``, ``loss_mask`` and ``documents``, along dim 1, wherever they are. A number: all
            leaves that have this dim. A dict from regular expressions for whole paths to dims, None for leaves that stay whole.
        shift: whether ``labels`` are shifted.
        pad: whether to pad sequences that do not split evenly: True if all leaves to split have the names above, else the
            padding values, by expressions for paths. Padding is masked in attention; in the loss its label is -100. Without
            ``pad`` such lengths raise an error.
        whole: whether ranks get whole batches. If not, each gets its positions, in the layout, with shifted labels.
        tokenwise: whether the loss has no attention. Otherwise the first step raises an error if no function asks for this
            axis, since a model that attends only to a rank's own positions would train wrongly. In a pipeline one stage must
            ask.

    Raises:
        TypeError: ``group`` is not a ``comm.Group``.
        ValueError: an unknown layout; in a step: a length that does not split evenly, leaves of different lengths or without a
            rule, ranks with different layouts, lengths or batches, gradients that no transform sums over the group, a loss that
            is a plain mean or not a sum over tokens, a model that does not ask for this axis, counts positions itself or mixes
            neighbours.
        RuntimeError: in the first step: the loss draws from torch's generator.

    >>> import functional_ds as fds
    >>> from functional_ds import transforms as T
    >>> def loss(params, batch):
    ...     counts = batch["shift_labels"] != -100
    ...     error = (params["w"] * batch["input_ids"] - batch["shift_labels"]) ** 2
    ...     return fds.Weighted((error * counts).sum(), counts.sum())
    >>> def program():
    ...     step = fds.compose(T.zero(1), sequence(layout="zigzag", tokenwise=True))(fds.train_step(loss, fds.sgd(0.1)))
    ...     state, metrics = step(step.init({"w": torch.zeros(())}), torch.arange(8.0).long().view(1, 8))
    ...     return metrics["loss"].item()
    >>> comm.simulate(program, world_size=1) == comm.simulate(program, world_size=4)[:1] == [20.0]
    True
    """
    chosen = layout if callable(layout) else SequenceLayout.of(layout)
    return _SequenceParallel(Axis(group, AxisRole.SEQUENCE), chosen, BatchCut(dims, shift, pad, whole), tokenwise).transform()


@attrs.frozen(eq=False)
class _SequenceParallel:
    """The phases that sequence parallelism wraps.

    Attributes:
        mesh_axis: the ranks.
        layout: one for all batches, or a function from a batch to its layout.
        rules: which leaves of a batch are split, and how.
        tokenwise: whether the loss has no attention.
        axes: of the batches so far, by group, layout and length, so that batches of one shape share one.
        agreed: the shapes of batches that ranks have compared.
    """

    mesh_axis: Axis
    layout: SequenceLayout | Callable[[Any], SequenceLayout]
    rules: BatchCut
    tokenwise: bool
    axes: dict[Any, SequenceAxis] = attrs.field(factory=dict)
    agreed: set[Any] = attrs.field(factory=set)

    def transform(self) -> Transform:
        """The phases that it wraps."""
        return wrap(
            str(self),
            options={"layout": self.layout, "batch": self.rules, "tokenwise": self.tokenwise},
            axes=[self.mesh_axis],
            gradients=outermost(self.gradients),
            measure=outermost(self.measure),
            forward=self.forward,
            check=self.check,
            guards={"gradients": self.guard_gradients, "forward": self.guard_forward, "loss": self.guard_loss},
        )

    def __str__(self) -> str:
        return f"sequence({getattr(self.layout, 'kind', self.layout)}, {self.mesh_axis})"

    def check(self, step: Step) -> None:
        """Raises an error for a second sequence axis."""
        other = step.has(AxisRole.SEQUENCE)
        if other is not None:
            raise ValueError(f"{self}: this step splits sequences already, by {other} ({step})")

    # -- batches -------------------------------------------------------------------------------------------------------

    def gradients(self, inner: Any, step: Step, state: State, batch: Any, carry: Weighted | None, last: bool) -> Passed:
        """The gradients of this rank's positions."""
        if self._has_no_sequences(batch):
            return inner(step, state, batch, carry, last)  # type: ignore[no-any-return]
        piece, length, _ = self.cut(step, state, batch)
        key = state.key
        if key is not None:
            positions = piece.axis.positions(piece.device)
            key = tree.replace(key, places={**key.places, 1: (positions, length)})
        after, grads, metrics = inner(step, tree.replace(state, key=key), piece, carry, last)
        return tree.replace(after, key=state.key), grads, metrics

    def measure(self, inner: Any, step: Step, state: State, batch: Any) -> dict[str, Weighted]:
        """The sums over this rank's positions."""
        piece = batch if isinstance(batch, CutBatch) else self.cut(step, state, batch)[0]
        return inner(step, state, piece)  # type: ignore[no-any-return]

    def _has_no_sequences(self, batch: Any) -> bool:
        """Whether the batch is one of a memory forecast, in which only rows count."""
        return (
            not self.mesh_axis.ranks().world.has_peers and isinstance(batch, Tensor) and batch.dim() < 2 and tree.on_meta(batch)
        )

    def cut(self, step: Step, state: State, batch: Any) -> tuple[CutBatch, int, dict[str, int]]:
        """This rank's piece of the batch, the unpadded length of the whole sequence, and which leaves are split."""
        step.batch_shard(state)  # raises an error if the step sums nothing over the group
        group = self.mesh_axis.ranks()
        layout = self.layout if isinstance(self.layout, SequenceLayout) else self.layout(batch)
        if not isinstance(layout, SequenceLayout):
            raise TypeError(f"layout: the function returned {layout!r} for a batch, and must return a SequenceLayout")
        prepared = self.rules.prepared(batch)
        dims = self.rules.sequences(prepared)
        pieces = {path: leaf for path, leaf in tree.named(prepared) if path in dims}
        path, some = next(iter(pieces.items()))
        length = some.shape[dims[path]] * (1 if self.rules.whole else group.size)
        self._compare(group, layout, length, pieces)
        try:
            how, size = padded(layout, length, group.size) if self.rules.pad and self.rules.whole else (layout, length)
            axis = self._axis(group, how, size)
        except ValueError as error:
            mend = "" if self.rules.pad else "; T.sequence(pad=True) pads batches"
            raise ValueError(f"batch: the leaf at {path!r}: {error}{mend}") from None
        return self.rules.cut(prepared, dims, axis, length), length, dims

    def _axis(self, group: comm.Group, layout: SequenceLayout, length: int) -> SequenceAxis:
        key = (group, layout, length)
        if key not in self.axes:
            if len(self.axes) >= _KINDS:
                self.axes.clear()
            inner, rank, ring, heads = layout.inner, group.rank, None, None
            if inner > 1:
                layout.check(length, group.size)
                ring = group.world.group(group.ranks[rank % inner :: inner], f"{group.name}:ring")
                first = rank // inner * inner
                heads = group.world.group(group.ranks[first : first + inner], f"{group.name}:ulysses")
            self.axes[key] = SequenceAxis(group, layout, length, ring_group=ring, ulysses_group=heads)
        return self.axes[key]

    def _compare(self, group: comm.Group, layout: SequenceLayout, length: int, pieces: Mapping[str, Tensor]) -> None:
        """Compares batches of a new shape over the ranks.

        Raises:
            ValueError: ranks have different layouts, lengths or leaves, or, where they get whole batches, different values.
        """
        signature = (group, layout, tuple((path, tuple(leaf.shape)) for path, leaf in pieces.items()))
        if signature in self.agreed or not self.mesh_axis.compares or tree.on_meta(dict(pieces)):
            return
        if recorder().records:  # traced tensors have no values to compare
            raise RuntimeError(f"{EAGER_FIRST}: ranks compare batches of a new shape")
        prints = fingerprints([leaf.contiguous().flatten() for leaf in pieces.values()]) if self.rules.whole else None
        shapes = {path: list(leaf.shape) for path, leaf in pieces.items()}
        told = comm.all_gather_object((layout, length, shapes, prints), group.channel("control"))
        first = told[0]
        for what, place in (("layout", 0), ("length", 1), ("leaves", 2)):
            if any(theirs[place] != first[place] for theirs in told):
                listed = ", ".join(f"rank {rank} {theirs[place]}" for rank, theirs in zip(group.ranks, told, strict=True))
                raise ValueError(
                    f"{self}: the ranks of group {group.name!r} have different sequences: {what}: {listed}; they share "
                    "sequences, so give them the same layout and batches of the same shape"
                )
        odd = [rank for rank, theirs in zip(group.ranks, told, strict=True) if theirs[3] != first[3]]
        if odd:
            raise ValueError(
                f"{self}: ranks {odd} of group {group.name!r} have another batch than rank {group.ranks[0]}; ranks that share "
                "sequences all get the same batch, so split data by their place along other axes alone"
            )
        if len(self.agreed) >= _KINDS:  # on all ranks at once
            self.agreed.clear()
        self.agreed.add(signature)

    # -- the loss ------------------------------------------------------------------------------------------------------

    def forward(self, inner: Any, step: Step, state: State, function: Callable[[Any], Any], batch: Any) -> Any:
        """Runs the function with ``axis("sp")``."""
        return inner(step, state, lambda given: entered(function, given), batch)

    # -- guards --------------------------------------------------------------------------------------------------------

    def guard_gradients(self, inner: Any, step: Step, state: State, batch: Any, carry: Weighted | None, last: bool) -> Passed:
        """Raises an error for losses that see order outside attention, or are not sums over tokens.

        It checks the first step, and the second if a matrix was zeros at first.
        """
        if carry is not None or self._has_no_sequences(batch) or not self.is_due(state):
            return inner(step, state, batch, carry, last)  # type: ignore[no-any-return]
        piece, _, dims = self.cut(step, state, batch)
        if self.mesh_axis.compares and not state.step.is_meta:
            key = None if state.key is None else tree.replace(state.key, constant=True)
            stages = partial(self.check_stages, step, state, piece.device)
            check_order(str(self), step, tree.replace(state, key=key), piece, dims, stages)
            check_sum(str(self), step, tree.replace(state, key=key), piece, dims, stages)
        result = inner(step, state, batch, carry, last)
        self.check_stages(step, state, piece.device)
        return result  # type: ignore[no-any-return]

    def is_due(self, state: State) -> bool:
        """Whether this step's loss is checked."""
        graphs = state.graphs
        if state.batch is None:
            return graphs.is_new("first step over sequences")
        return ZEROS in graphs.kinds and not recorder().records and graphs.is_new("second step over sequences")

    def guard_forward(self, inner: Any, step: Step, state: State, function: Callable[[Any], Any], batch: Any) -> Any:
        """Refuses draws from torch's generator, a loss that is None, and a loss that does not ask for the axis.

        Raises:
            RuntimeError: the loss drew from torch's generator.
            ValueError: it is None, or none of its functions asked for the axis.
        """
        first = state.batch is None and self.mesh_axis.ranks().size > 1 and not step.has(AxisRole.STAGES)
        drawn = generator_states() if first else []
        result = inner(step, state, function, batch)
        if first and not all(map(torch.equal, drawn, generator_states())):
            raise RuntimeError(
                f"{self}: the loss drew from torch's random generator (nn.Dropout in training?): on pieces of a sequence these "
                "are not a single device's draws. Set its probability to 0, or draw by the step's Key: key.dropout(x, p, name)"
            )
        if result is None or (isinstance(result, tuple) and result and result[0] is None):
            raise ValueError(
                f"{self}: the loss is None: a model of Hugging Face computes one from 'labels', and the batch has "
                "'shift_labels', which were shifted before the sequence was split. Sum over this rank's tokens: pass labels="
                "batch['shift_labels'], num_items_in_batch=1 with these, and return fds.Weighted(loss, number of labels)"
            )
        if is_half(result):
            state.graphs.is_new(HALF)
        if asked(AXIS) or asked(IN_ORDER):
            state.graphs.is_new(IN_ORDER)
        if asked(AXIS) or asked(IN_DOCUMENTS):
            state.graphs.is_new(AXIS)
        elif first and current_pass() is not None and not self.tokenwise:
            raise ValueError(self._unasked())
        return result

    def guard_loss(self, inner: Any, step: Step, state: State, params: Any, batch: Any) -> tuple[Weighted, dict[str, Weighted]]:
        """Refuses a plain mean over this rank's tokens.

        Raises:
            ValueError: the loss is one.
        """
        total, pass_ = inner(step, state, params, batch), current_pass()
        if pass_ is not None and pass_.slots.get("mean") and self.mesh_axis.ranks().size > 1:
            raise ValueError(
                f"{self}: the loss is a plain number, a mean over this rank's tokens, and ranks may have different numbers of "
                "them: return fds.Weighted(sum over tokens, number of tokens)"
            )
        return total  # type: ignore[no-any-return]

    def check_stages(self, step: Step, state: State, device: torch.device) -> None:
        """Raises an error, after the first pass, for a pipeline in which no stage asks for this axis.

        Raises:
            ValueError: on all ranks.
        """
        known = step.has(AxisRole.STAGES) and self.mesh_axis.compares and not (self.tokenwise or state.step.is_meta)
        if known and state.graphs.is_new("stages of a sequence"):
            asks = torch.tensor([float(AXIS in state.graphs.kinds)], device=device)
            if not step.sum_over_ranks(state, asks).item():
                raise ValueError(self._unasked())

    def _unasked(self) -> str:
        return (
            f"{self}: no function of the loss asked for the sequence axis, so its attention would see the positions of one "
            "rank alone: use fds.seq.ring(), fds.seq.ulysses(...) or their names in a Hugging Face config, without a "
            "group; Ulysses over a ring takes groups, and here a layout with inner=, the number of Ulysses' ranks: "
            "T.sequence(mesh['ring', 'heads'], layout=SequenceLayout(kind, inner=2)) and "
            "fds.seq.ulysses(fds.seq.ring(mesh['ring'], layout=kind), mesh['heads']); for a loss without attention pass "
            "tokenwise=True"
        )
