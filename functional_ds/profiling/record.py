"""``record``: a short run with its metrics as columns."""

import html
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs
from torch import Tensor

from functional_ds import comm
from functional_ds.comm.record.notebook import progress_bar
from functional_ds.step.state.state import State
from functional_ds.step.step import Step

_CURVE = (240, 40)  # pixels, wide and high
_LINES = 10  # of a printed table


@attrs.frozen(repr=False)
class Recording:
    """The metrics of a run; printed, it is a table, and notebooks plot its curves.

    Attributes:
        state: after the last step.
        columns: by metric, a number for each step.
    """

    state: State
    columns: Mapping[str, list[float]]

    @property
    def steps(self) -> int:
        """How many steps were recorded."""
        return len(next(iter(self.columns.values()), ()))

    def __repr__(self) -> str:
        return f"Recording({self.steps} steps of {', '.join(self.columns)})"

    def __str__(self) -> str:
        shown = range(self.steps)[-_LINES:]
        head = f"{'step':>6}" + "".join(f"{name:>16}" for name in self.columns)
        rows = [f"{index + 1:>6}" + "".join(f"{column[index]:>16.6g}" for column in self.columns.values()) for index in shown]
        return "\n".join([head, *(["..."] if self.steps > _LINES else []), *rows])

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{html.escape(name)}</td><td>{_curve(column)}</td><td>{column[0]:.6g}</td><td>{column[-1]:.6g}</td></tr>"
            for name, column in self.columns.items()
        )
        return f"<table><tr><th>metric</th><th>{self.steps} steps</th><th>first</th><th>last</th></tr>{rows}</table>"

    def plot(self, path: str | Path) -> None:
        """Plots the metrics over the steps, stacked; needs matplotlib.

        Args:
            path: a file that ends in .svg, .png or .pdf.
        """
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6.0, 1.8 * len(self.columns)), layout="constrained")
        axes = figure.subplots(len(self.columns), sharex=True, squeeze=False)[:, 0]
        for place, (name, column) in zip(axes, self.columns.items(), strict=True):
            place.plot(range(1, len(column) + 1), column)
            place.set_ylabel(name)
        axes[-1].set_xlabel("step")
        figure.savefig(path)


def _curve(column: list[float]) -> str:
    """The finite numbers as a line."""
    wide, high = _CURVE
    points = [(index, value) for index, value in enumerate(column) if abs(value) < float("inf")]
    low = min((value for _, value in points), default=0.0)
    span = max((value for _, value in points), default=0.0) - low or 1.0
    line = " ".join(
        f"{index * wide / max(len(column) - 1, 1):.1f},{high - (value - low) / span * high:.1f}" for index, value in points
    )
    return f'<svg width="{wide}" height="{high}"><polyline points="{line}" fill="none" stroke="currentColor"/></svg>'


def record(step: Step, state: State, batches: Iterable[Any], *, progress: bool = False) -> Recording:
    """Trains on the batches, one step each, and records each step's metrics as numbers.

    Law: it is the loop ``for batch in batches: state, metrics = step(state, batch)``; the columns are its metrics.

    The numbers are read once, after the last step, so that no step waits for the device. For long runs, with checkpoints, logs
    and data loaders, use ``fds.fit``.

    Args:
        step: the training step.
        state: where it begins; it is consumed if the step donates.
        batches: this rank's, as the step takes them.
        progress: whether rank 0 shows a progress bar; needs the extra ``fit``.

    Raises:
        ValueError: there is no batch; a metric is missing in some step, or has several elements.

    >>> import torch
    >>> import functional_ds as fds
    >>> step = fds.train_step(lambda params, x: (params["w"] * x).square().mean(), fds.sgd(0.25))
    >>> run = record(step, step.init({"w": torch.ones(())}), [torch.ones(2)] * 3)
    >>> run.columns["loss"]
    [1.0, 0.25, 0.0625]
    """
    history: list[dict[str, Tensor]] = []
    for batch in progress_bar(batches, shown=comm.world().rank == 0) if progress else batches:
        state, metrics = step(state, batch)
        history.append(metrics)
    if not history:
        raise ValueError("batches: there is none, so nothing was recorded")
    for index, metrics in enumerate(history):
        if metrics.keys() != history[0].keys():
            raise ValueError(f"step {index + 1} has the metrics {sorted(metrics)}, and step 1 {sorted(history[0])}")
        for name, value in metrics.items():
            if value.numel() != 1:
                raise ValueError(f"metric {name!r} has the shape {list(value.shape)}: a column takes one number a step")
    return Recording(state, {name: [metrics[name].item() for metrics in history] for name in history[0]})
