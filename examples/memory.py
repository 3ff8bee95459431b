"""The bytes on each rank: measured on its tensors, and as ZeRO's paper says (Rajbhandari, Rasley, Ruwase, He 2020)."""

import resource
import sys
from typing import Any

import attrs
import torch
from matplotlib.figure import Figure
from torch import Tensor

import functional_ds as fds
from functional_ds import comm

STATE = ("params", "masters", "optimizer")
COLOURS = {"params": "#4c72b0", "masters": "#55a868", "optimizer": "#c44e52", "gradients": "#ccb974"}
NOTES = """
Beyond the formula: padding, which makes shards equal and aligns leaves, and Adam's step counts.
Gradients are what the optimizer gets. Stage 1 reduces each unit's as soon as they are complete, so it gets its shard.
The peak counts everything: Python, torch, the text, activations (with --simulate: of all ranks together).
"""


@attrs.frozen
class Memory:
    """Bytes on one rank; `peak` is that of the whole process, or of the allocator on a GPU."""

    params: int
    masters: int
    optimizer: int
    gradients: int
    peak: int

    @classmethod
    def of(cls, state: fds.State, gradients: int) -> "Memory":
        """What a rank holds, given the bytes of its gradients, which no state keeps."""
        masters = state.slots.get("masters")
        return cls(stored(state.params), stored(masters), stored(state.optimizer), gradients, peak())

    def of_all_ranks(self) -> list["Memory"]:
        """Everybody's, in rank order."""
        return [Memory(*row) for row in comm.all_gather(torch.tensor(attrs.astuple(self)), tiled=False).tolist()]


@attrs.frozen
class Formula:
    """`whole` Ψ + `cut` Ψ/n bytes, for Ψ parameters on n ranks."""

    whole: int = 0
    cut: int = 0

    def __str__(self) -> str:
        terms = [f"{self.whole}Ψ"] * bool(self.whole) + [f"{self.cut}Ψ/n"] * bool(self.cut)
        return " + ".join(terms) or "0"

    def __add__(self, other: "Formula") -> "Formula":
        return Formula(self.whole + other.whole, self.cut + other.cut)

    def bytes(self, psi: int, n: int) -> float:
        """The bytes, before padding."""
        return self.whole * psi + self.cut * psi / n


@attrs.frozen
class Expected:
    """What the laws say of Adam at a stage, Ψ being `psi`.

    Law 20: in bf16 2 + 4 + 8 + 2 bytes a parameter for params, masters, moments and gradients; in fp32 4 + 0 + 8 + 4.
    """

    stage: int
    dtype: str
    micro_batches: int
    psi: int
    ranks: int

    def parts(self) -> dict[str, Formula]:
        """The formula of each part."""
        half = self.dtype == "bf16"
        gradient = 2 if half and self.micro_batches == 1 else 4  # sums of micro-batches are fp32
        each = {  # bytes a parameter, and the first stage that cuts them into shards
            "params": (2 if half else 4, 3),
            "masters": (4 if half else 0, 1),
            "optimizer": (8, 1),
            "gradients": (gradient, 2),
        }
        return {part: Formula(0, b) if self.stage >= first else Formula(b, 0) for part, (b, first) in each.items()}

    def bytes(self, formula: Formula) -> float:
        """The formula's value here."""
        return formula.bytes(self.psi, self.ranks)

    def elements_sent(self) -> str:
        """Law 21, by each rank in a step: stages 0 and 1 reduce once, 2 in each micro-batch, 3 gathers there too."""
        factor = {0: 2, 1: 2, 2: 1 + self.micro_batches, 3: 3 * self.micro_batches}[self.stage]
        return f"{factor}Ψ(n-1)/n = {factor * self.psi * (self.ranks - 1) / self.ranks:,.0f}"


def gradients_noted(sizes: list[int]) -> fds.Transform:
    """A transform that changes nothing: it appends the bytes of each step's gradients, as the optimizer gets them."""

    def reduce(inner: Any, step: fds.Step, state: fds.State, grads: fds.Weighted) -> tuple[fds.State, fds.Weighted]:
        after, reduced = inner(step, state, grads)
        sizes.append(stored(reduced.sum))
        return after, reduced

    return fds.wrap("gradients_noted", reduce=reduce)


def stored(tree: Any) -> int:
    """The bytes of a tree's storages; one that several tensors share counts once."""
    storages = [leaf.untyped_storage() for leaf in fds.tree.leaves(tree) if isinstance(leaf, Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def peak() -> int:
    """The most bytes so far."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def table(title: str, expected: Expected, ranks: list[Memory]) -> str:
    """A row for each part: the formula, its bytes, and what each rank was seen to hold."""
    each = expected.parts()
    rows: list[tuple[str, tuple[str, ...]]] = [(part, (part,)) for part in STATE]
    rows += [("state, these three", STATE), ("gradients", ("gradients",)), ("state and gradients", tuple(each))]
    lines = [
        f"{title}\nΨ = {expected.psi:,} parameters on n = {expected.ranks} ranks; bytes on each rank\n",
        f"{'':<22}{'formula':>13}{'bytes':>16}" + "".join(f"{f'rank {i}':>16}" for i in range(len(ranks))),
    ]
    for label, parts in rows:
        formula = sum((each[part] for part in parts), Formula())
        found = "".join(f"{sum(getattr(rank, part) for part in parts):>16,}" for rank in ranks)
        lines.append(f"{label:<22}{formula!s:>13}{expected.bytes(formula):>16,.0f}{found}")
    lines.append(f"{'peak of the process':<51}" + "".join(f"{rank.peak:>16,}" for rank in ranks))
    return "\n".join(lines) + "\n" + NOTES


def draw(title: str, expected: Expected, ranks: list[Memory]) -> Figure:
    """Stacked bars, the formula's beside each rank's; and the peaks."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(2, 1))
    names = ["formula", *(f"rank {i}" for i in range(len(ranks)))]
    floors = [0.0] * len(names)
    for part, formula in expected.parts().items():
        heights = [expected.bytes(formula) / 1e6, *(getattr(rank, part) / 1e6 for rank in ranks)]
        if any(heights):
            left.bar(names, heights, 0.6, bottom=floors, color=COLOURS[part], label=f"{part} ({formula})")
        floors = [floor + height for floor, height in zip(floors, heights, strict=True)]
    left.set_title(f"state and gradients, Ψ = {expected.psi:,}")
    left.set_ylim(0, 1.45 * max(floors))  # room for the legend
    left.legend(loc="upper right", ncols=2, frameon=False)
    right.bar(names[1:], [rank.peak / 1e6 for rank in ranks], 0.6, color="#8c9bb0")
    right.set_title("peak of the process")
    for axes in (left, right):
        axes.set_ylabel("MB")
        axes.tick_params(axis="x", rotation=0 if len(names) < 6 else 90)
    figure.suptitle(title)
    return figure
