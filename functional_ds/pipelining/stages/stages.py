"""``Stages``: a model as a sequence of functions, whose composition is the loss function of the single-device step."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from functional_ds.base import tree
from functional_ds.base.prng import Key
from functional_ds.base.torch_private import (
    READ_NUMBER,
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)
from functional_ds.base.weighted import Weighted, weigh
from functional_ds.modules.functional import Apply

Params = Mapping[str, Tensor]


@attrs.frozen(repr=False)
class Stage:
    """One stage of a model.

    Attributes:
        paths: the leaves of the params that it uses. Several stages may use the same leaf.
        run: ``run(params, x, batch, key)``, with params by path, returns the next stage's x, a pytree of tensors. The first
            stage takes its inputs from the batch, and its x is None. The last one returns the loss, as for ``train_step``.
        name: for reports and errors.

    >>> first = Stage(("embed",), lambda params, x, batch, key: params["embed"][batch], "embedding")
    >>> first
    <Stage 'embedding': 1 leaves>
    >>> first.run({"embed": torch.eye(3)}, None, torch.tensor([2]), None)
    tensor([[0., 0., 1.]])
    """

    paths: tuple[str, ...]
    run: Callable[[Params, Any, Any, Key | None], Any]
    name: str

    def __repr__(self) -> str:
        return f"<Stage {self.name!r}: {len(self.paths)} leaves>"


@tree.record
class LossInput:
    """The last stage's input for the loss: the batch, and x from the previous stage.

    A pipeline calls a step's phase ``loss`` with it instead of a batch, so transforms of batches and losses apply to the last
    stage. x is static, not a child, so a cast of the batch does not cast activations.

    Attributes:
        batch: the micro-batch.
        x: the previous stage's output.
        weight: the weight of a plain mean, if micro-batches have different numbers of rows; None for one.
        trial: in a dry run, the paths of the leaves that train: the stage gets the leaves as those of another graph.
    """

    batch: Any
    x: Any = tree.static()
    weight: float | None = tree.static(default=None)
    trial: Collection[str] | None = tree.static(default=None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _no_batch(f".{name}")

    def __getitem__(self, index: Any) -> Any:
        raise _no_batch(f"[{index!r}]")

    def __iter__(self) -> Iterator[Any]:
        raise _no_batch(" in a loop or an unpacking")


def _weighing(value: Any, weight: float) -> Any:
    """The loss and metrics, every plain mean with a weight."""
    if isinstance(value, tuple):
        return _weighing(value[0], weight), {name: _weighing(metric, weight) for name, metric in value[1].items()}
    return Weighted(value * weight, weight) if isinstance(value, Tensor) else value


def _no_batch(use: str) -> ValueError:
    return ValueError(
        f"batch{use}: this step is a pipeline, so its loss function must be the stages themselves: "
        "train_step(stages, optimizer), with loss= given to stages() or cut()"
    )


@attrs.frozen(repr=False)
class Stages:
    """The stages of a model, in order.

    ``stages(params, batch, key)`` runs all of them, one after another: the loss function of the single-device step
    ``train_step(stages, optimizer)``, to which a pipeline of these stages is equivalent.

    Attributes:
        stages: each a ``Stage``.
        sizes: the number of elements of each leaf of the params, by path.
        apply: the module that was split, if one was. ``apply.module.eval()`` applies to later calls.

    >>> import torch
    >>> from functional_ds.pipelining import stages
    >>> two = stages(
    ...     [lambda p, x: x * p["a"], lambda p, x: x + p["b"]],
    ...     [{"a": torch.ones(3)}, {"b": torch.ones(())}],
    ...     inputs=lambda batch: batch,
    ...     loss=lambda y, batch: y.sum(),
    ... )
    >>> two([{"a": torch.full((3,), 2.0)}, {"b": torch.tensor(1.0)}], torch.ones(3))
    tensor(9.)
    """

    stages: tuple[Stage, ...]
    sizes: Mapping[str, int] = attrs.field(factory=dict)
    apply: Apply | None = None

    @property
    def draws(self) -> bool:
        """Whether a stage may draw random numbers."""
        return any(getattr(stage.run, "draws", True) for stage in self.stages)

    def __call__(self, params: Any, batch: Any, key: Key | None = None) -> Any:
        """The loss of a batch; for a ``LossInput`` only the last stage's loss.

        Args:
            params: the user's tree, or its leaves by path.
            batch: the first stage takes its inputs from it, the last stage its targets.
            key: for random draws; None while evaluating.
        """
        held = self.by_path(params)
        if isinstance(batch, LossInput):
            if batch.trial is not None:
                held = {path: leaf.detach().requires_grad_(path in batch.trial) for path, leaf in held.items()}
            loss = self.stages[-1].run(held, batch.x, batch.batch, key)
            return loss if batch.weight is None else _weighing(loss, batch.weight)
        x = None
        for index in range(len(self)):
            x = self.run(index, held, x, batch, key)
        return x

    def run(self, index: int, params: Params, x: Any, batch: Any, key: Key | None) -> Any:
        """Runs one stage; returns its output, or the loss.

        Args:
            index: the stage's number.
            params: its leaves by path.
            x: the previous stage's output; None for the first.
            batch: the micro-batch.
            key: for random draws; None while evaluating.
        """
        return self.stages[index].run(params, x, batch, key)

    def by_path(self, params: Any) -> Params:
        """The leaves of the params by path; a dict by path is returned as it is."""
        if isinstance(params, dict) and params.keys() <= self.sizes.keys():
            return params
        return dict(tree.named(params))

    def check(self, params: Any, batch: Any) -> tuple[Any, ...]:
        """Runs the stages on tensors without values; returns each stage's output on the device "meta".

        If a stage needs values (a loop over data), all stages run on the real tensors. Meta tensors represent tensors on the
        others' device.

        Raises:
            ValueError: a stage does not accept the previous stage's output; names the stage, the shapes and the reason.
        """
        held, mode = self.by_path(params), FakeTensorMode(allow_non_fake_inputs=True)
        given = dict(held), batch, Key.of(0)
        device = next((leaf.device for leaf in tree.leaves(given[:2]) if isinstance(leaf, Tensor) and not leaf.is_meta), "cpu")
        faked = [mapped(lambda leaf: standing_for(leaf, mode, device), value) for value in given]
        try:
            with mode:
                sent = _run_all(self.stages, *faked)
        except NEEDS_VALUES:
            with torch.no_grad():
                sent = _run_all(self.stages, held, batch, Key.of(0))
        return tuple(mapped(lambda leaf: torch.empty(leaf.shape, dtype=leaf.dtype, device="meta"), x) for x in sent)

    def __len__(self) -> int:
        return len(self.stages)

    def __iter__(self) -> Iterator[Stage]:
        return iter(self.stages)

    def __getitem__(self, index: int) -> Stage:
        return self.stages[index]

    def __repr__(self) -> str:
        return f"<Stages: {len(self)} stages, {sum(self.sizes.values()):,} parameters>"

    def __str__(self) -> str:
        holders: dict[str, int] = {}
        for stage in self.stages:
            for path in stage.paths:
                holders[path] = holders.get(path, 0) + 1
        lines = [f"{len(self)} stages"]
        for index, stage in enumerate(self.stages):
            shared = sum(holders[path] > 1 for path in stage.paths)
            count = sum(self.sizes.get(path, 0) for path in stage.paths)
            more = f", {shared} of them shared" if shared else ""
            lines.append(f"{index}: {stage.name}: {len(stage.paths)} leaves{more}, {count:,} parameters")
        return "\n".join(lines)


NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException)


class OnesReadMode(FakeTensorMode):
    """Fake tensors of which a loss may read some values: enough to infer its dtypes.

    A number that is read on the host (``.item()``) is one, and a mask selects every element.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        except DataDependentOutputException:
            if func is not READ_NUMBER:
                raise
            return torch.ones((), dtype=args[0].dtype, device="cpu").tolist()
        except DynamicOutputShapeException:
            if func is torch.ops.aten.nonzero.default:
                return args[0].new_zeros((args[0].numel(), args[0].dim()), dtype=torch.int64)
            if func is torch.ops.aten.masked_select.default:
                return torch.add(*args[:2]).flatten().to(args[0].dtype)
            raise


def standing_for(leaf: Tensor, mode: FakeTensorMode, device: torch.device | str) -> Tensor:
    """A fake tensor; for a meta tensor one on a device, because a forward may ask for its device."""
    if not leaf.is_meta:
        return mode.from_tensor(leaf)
    with mode:
        fake = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=device)
        return fake.requires_grad_(leaf.requires_grad)


def mapped(function: Callable[[Tensor], Any], value: Any) -> Any:
    """The tree with ``function`` of its tensors, and other leaves as they are."""
    return tree.map(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, value)


def _run_all(stages: Sequence[Stage], params: Params, batch: Any, key: Key) -> tuple[Any, ...]:
    x, sent = None, []
    for index, stage in enumerate(stages):
        try:
            y = stage.run(params, x, batch, key)
            if index == len(stages) - 1:
                weigh(y[0] if isinstance(y, tuple) else y, "the loss")
            else:
                _refuse_others(y)
                sent.append(y)
        except NEEDS_VALUES:
            raise
        except Exception as error:
            source = f"the batch, {shown(batch)}" if index == 0 else f"what stage {index - 1} gives, {shown(x)}"
            raise ValueError(f"stage {index} ({stage.name}) cannot take {source}: {type(error).__name__}: {error}") from error
        x = y
    return tuple(sent)


def _refuse_others(x: Any) -> None:
    """Raises an error for leaves that are not tensors."""
    for path, leaf in tree.named(x):
        if not isinstance(leaf, Tensor):
            raise TypeError(
                f"it gives {type(leaf).__name__} {leaf!r} at {path or 'the top'!r} to the next; only tensors are sent"
            )


def shown(value: Any) -> str:
    """A tree with each tensor as its dtype and shape.

    >>> shown((torch.zeros(2, 3), {"ids": torch.zeros(4, dtype=torch.int64)}))
    "(float32[2, 3], {'ids': int64[4]})"
    """
    return str(tree.map(_Shown, value))


class _Shown:
    def __init__(self, leaf: Any) -> None:
        self.leaf = leaf

    def __repr__(self) -> str:
        return tree.summary(self.leaf) if isinstance(self.leaf, Tensor) else repr(self.leaf)
