"""``Stages``: a model as a row of functions, whose composition is the loss function of the single-device step."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
from torch import Tensor

from functional_ds.base import tree
from functional_ds.base.prng import Key
from functional_ds.base.weighted import Weighted
from functional_ds.modules.functional import Apply

from .shape_check import check_shapes

__all__ = ["LossInput", "Stage", "Stages"]

Params = Mapping[str, Tensor]


@attrs.frozen(repr=False)
class Stage:
    """One stage of a model.

    Attributes:
        paths: the leaves of the params that it uses. Several stages may use the same leaf.
        run: ``run(params, x, batch, key)``, with params by path, returns the next stage's x, a pytree of tensors. The first
            stage takes its inputs from the batch, and its x is None. The last one returns the loss as ``train_step`` wants it.
        name: for reports and errors.
    """

    paths: tuple[str, ...]
    run: Callable[[Params, Any, Any, Key | None], Any]
    name: str

    def __repr__(self) -> str:
        return f"<Stage {self.name!r}: {len(self.paths)} leaves>"


@tree.record
class LossInput:
    """What the last stage computes the loss from: the batch, and x as the stage before gave it.

    A pipeline calls a step's phase ``loss`` with it in place of a batch. So transforms of batches and losses apply to the last
    stage. x is static, no child: a cast of the batch leaves activations alone.

    Attributes:
        batch: the micro-batch.
        x: what the stage before has sent.
        weight: what a plain mean weighs where micro-batches have different numbers of rows; None for one.
    """

    batch: Any
    x: Any = tree.static()
    weight: float | None = tree.static(default=None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _no_batch(f".{name}")

    def __getitem__(self, index: Any) -> Any:
        raise _no_batch(f"[{index!r}]")

    def __iter__(self) -> Iterator[Any]:
        raise _no_batch(" in a loop or an unpacking")


def _weighing(found: Any, weight: float) -> Any:
    """The loss and metrics, every plain mean with a weight."""
    if isinstance(found, tuple):
        return _weighing(found[0], weight), {name: _weighing(metric, weight) for name, metric in found[1].items()}
    return Weighted(found * weight, weight) if isinstance(found, Tensor) else found


def _no_batch(use: str) -> ValueError:
    return ValueError(
        f"batch{use}: this step is a pipeline, so its loss function must be the stages themselves: "
        "train_step(stages, optimizer), with loss= given to stages() or cut()"
    )


@attrs.frozen(repr=False)
class Stages:
    """The stages of a model, in order.

    ``stages(params, batch, key)`` runs all of them, one after the other: the loss function of the single-device step
    ``train_step(stages, optimizer)``, which a pipeline of these stages computes too.

    Attributes:
        stages: each a ``Stage``.
        sizes: the number of elements of each leaf of the params, by path.
        apply: the module that was cut, if one was. ``apply.module.eval()`` applies to the calls that follow.

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
        """The loss of a batch; for a ``LossInput`` the last stage's loss alone.

        Args:
            params: the user's tree, or its leaves by path.
            batch: the first stage takes its inputs from it, the last stage its targets.
            key: for random draws; None while evaluating.
        """
        held = self.by_path(params)
        if isinstance(batch, LossInput):
            found = self.run(len(self) - 1, held, batch.x, batch.batch, key)
            return found if batch.weight is None else _weighing(found, batch.weight)
        x = None
        for index in range(len(self)):
            x = self.run(index, held, x, batch, key)
        return x

    def run(self, index: int, params: Params, x: Any, batch: Any, key: Key | None) -> Any:
        """Runs one stage: what it sends to the next, or the loss.

        Args:
            index: the stage's number.
            params: its leaves by path.
            x: what the stage before gave; None for the first.
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
        """Runs the stages on tensors without values; what each sends to the next, on the device "meta".

        Where a stage needs values (a loop over data), all stages run on the real tensors.

        Raises:
            ValueError: a stage cannot take what the one before gives; names the stage, the shapes and the reason.
        """
        return check_shapes([(stage.name, stage.run) for stage in self.stages], self.by_path(params), batch)

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
