"""The bytes on each rank beside what ZeRO's paper says (Rajbhandari, Rasley, Ruwase, He 2020), as text and picture."""

from typing import TYPE_CHECKING

import attrs

from functional_ds.memory import EIGHTEEN, SINGLE, SIXTEEN, Formula, Memory, by_stage, compared, draw_compared, elements_sent

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NOTES = """
Beyond the formula: padding, which makes shards equal and aligns leaves, and Adam's step counts.
Gradients are what the optimizer gets. Stage 1 reduces each unit's as soon as they are complete, so it gets its shard.
The peak counts everything: Python, torch, the text, activations (with --simulate: of all ranks together).
"""


@attrs.frozen
class Expected:
    """What the laws say of Adam at a stage, Ψ being `psi`.

    In bf16 2 + 4 + 8 + 2 bytes a parameter for params, masters, moments and gradients; in fp32 4 + 0 + 8 + 4.
    """

    stage: int
    dtype: str
    micro_batches: int
    psi: int
    ranks: int

    def parts(self) -> dict[str, Formula]:
        """The formula of each part."""
        half = EIGHTEEN if self.micro_batches > 1 else SIXTEEN  # sums of micro-batches are fp32
        return by_stage(self.stage, half if self.dtype == "bf16" else SINGLE)

    def elements_sent(self) -> str:
        """The elements that each rank sends in a step."""
        factor = elements_sent(self.stage, micro_batches=self.micro_batches)
        return f"{factor}Ψ(n-1)/n = {factor * self.psi * (self.ranks - 1) / self.ranks:,.0f}"


def table(title: str, expected: Expected, ranks: list[Memory]) -> str:
    """A row for each part: the formula, its bytes, and what each rank was seen to hold."""
    return compared(title, expected.parts(), expected.psi, ranks) + "\n" + NOTES


def draw(title: str, expected: Expected, ranks: list[Memory]) -> "Figure":
    """The same as stacked bars."""
    return draw_compared(title, expected.parts(), expected.psi, ranks)
