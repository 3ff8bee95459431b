"""``Stages``: a model's parts as functions, whose composition is the loss function of the single-device step."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
from torch import Tensor

from functional_ds.base import tree
from functional_ds.base.prng import Key
from functional_ds.base.weighted import Weighted
from functional_ds.modules.functional import Apply

from .shape_check import check_shapes

__all__ = ["Stage", "Stages", "Visit"]

Params = Mapping[str, Tensor]


@attrs.frozen
class Stage:
    """A part of a model.

    Attributes:
        paths: the leaves of the params that it uses; one that several stages use is in each one's.
        run: ``run(params, x, batch, key)``, with params by path, gives the next stage's x, a pytree. The first stage takes what
            it needs from the batch, and its x is None; the last one returns the loss as ``train_step`` wants it.
        name: for reports and errors.
    """

    paths: tuple[str, ...]
    run: Callable[[Params, Any, Any, Key | None], Any] = attrs.field(repr=False)
    name: str


@tree.record
class Visit:
    """What the last stage's loss is computed from: the batch, and x as the stage before gave it.

    It stands for a batch where a pipeline calls a step's phase ``loss``, so that whatever is done to batches and losses is
    done to this stage's. x is no child of it: a cast of the batch leaves activations alone.

    Attributes:
        weight: what a plain mean weighs, where micro-batches have different numbers of rows; else one.
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
    """The loss and metrics with every plain mean weighed."""
    if isinstance(found, tuple):
        return _weighing(found[0], weight), {name: _weighing(metric, weight) for name, metric in found[1].items()}
    return Weighted(found * weight, weight) if isinstance(found, Tensor) else found


def _no_batch(use: str) -> ValueError:
    return ValueError(
        f"batch{use}: this step is a pipeline, so its loss function must be the stages themselves: "
        "train_step(stages, optimizer), with loss= given to stages() or cut()"
    )


@attrs.frozen
class Stages:
    """The stages of a model, in order.

    Called as ``stages(params, batch, key)`` it runs all of them, one after the other: the loss function of the single-device
    step, ``train_step(stages, optimizer)``, which a pipeline of these stages computes too.

    Attributes:
        stages: each a ``Stage``.
        sizes: how many elements each leaf of the params has.
        apply: the module that was cut, if one was; ``apply.module.eval()`` holds for the calls that follow.

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
    sizes: Mapping[str, int] = attrs.field(factory=dict, repr=False)
    apply: Apply | None = attrs.field(default=None, repr=False)

    def __call__(self, params: Any, batch: Any, key: Key | None = None) -> Any:
        """The loss of a batch; of a ``Visit``, what the last stage makes of it.

        Args:
            params: the user's tree, or its leaves by path.
            batch: what the first stage takes its inputs from, and the last its targets.
            key: where random draws come from; None while evaluating.
        """
        held = self.by_path(params)
        if isinstance(batch, Visit):
            found = self.run(len(self) - 1, held, batch.x, batch.batch, key)
            return found if batch.weight is None else _weighing(found, batch.weight)
        x = None
        for index in range(len(self)):
            x = self.run(index, held, x, batch, key)
        return x

    def run(self, index: int, params: Params, x: Any, batch: Any, key: Key | None) -> Any:
        """One stage: what it gives to the next, or the loss."""
        return self.stages[index].run(params, x, batch, key)

    def by_path(self, params: Any) -> Params:
        """The leaves of the params by path; a dict of that form is given back as it is."""
        if isinstance(params, dict) and params.keys() <= self.sizes.keys():
            return params
        return dict(tree.named(params))

    def check(self, params: Any, batch: Any) -> tuple[Any, ...]:
        """Runs the stages on tensors without values, and gives what each hands to the next, on the device "meta".

        Where a stage needs values (a loop over data), all of them are run on the real ones.

        Raises:
            ValueError: a stage cannot take what the one before gives; it names the stage, the shapes and the reason.
        """
        return check_shapes([(stage.name, stage.run) for stage in self.stages], self.by_path(params), batch)

    def __len__(self) -> int:
        return len(self.stages)

    def __iter__(self) -> Iterator[Stage]:
        return iter(self.stages)

    def __getitem__(self, index: int) -> Stage:
        return self.stages[index]

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
