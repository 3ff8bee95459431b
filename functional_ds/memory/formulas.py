"""Formulas for memory and traffic of each rank: of ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054) and tensor parallelism."""

from collections.abc import Mapping

import attrs

from functional_ds.sharding.layout import Layout


@attrs.frozen
class Formula:
    """``whole`` Ψ + ``cut`` Ψ/n bytes, for Ψ parameters on n ranks.

    >>> str(Formula(4, 12)), Formula(4, 12).bytes(7.5e9, 64) / 1e9
    ('4Ψ + 12Ψ/n', 31.40625)
    """

    whole: int = 0
    cut: int = 0

    def __str__(self) -> str:
        terms = [f"{self.whole}Ψ"] * bool(self.whole) + [f"{self.cut}Ψ/n"] * bool(self.cut)
        return " + ".join(terms) or "0"

    def __add__(self, other: "Formula") -> "Formula":
        return Formula(self.whole + other.whole, self.cut + other.cut)

    def bytes(self, psi: float, n: int) -> float:
        """The bytes, without padding.

        Args:
            psi: the number of parameters.
            n: the number of ranks.

        Raises:
            ValueError: no parameters or no ranks.
        """
        if not psi > 0 or n < 1:
            raise ValueError(f"psi={psi}, n={n}: there is at least one parameter and one rank")
        return self.whole * psi + self.cut * psi / n


@attrs.frozen
class Convention:
    """Bytes per parameter, by category.

    Attributes:
        name: for tables and pictures.
        params: of the stored params.
        masters: of the fp32 copies that the optimizer updates; 0 if there are none.
        optimizer: of the optimizer's state.
        gradients: of the gradients.

    >>> mixed_adam = Convention("bf16 with fp32 Adam", params=2, masters=4, optimizer=8, gradients=2)
    >>> mixed_adam.total
    16
    >>> by_stage(3, mixed_adam)["optimizer"].bytes(psi=1000, n=4)
    2000.0
    """

    name: str
    params: int
    masters: int
    optimizer: int
    gradients: int

    @property
    def total(self) -> int:
        """The sum over all categories."""
        return self.params + self.masters + self.optimizer + self.gradients


SIXTEEN = Convention("16 bytes: half params and gradients, fp32 masters, Adam's two moments", 2, 4, 8, 2)
EIGHTEEN = Convention("18 bytes: as the 16, with gradients summed in fp32", 2, 4, 8, 4)
SINGLE = Convention("fp32: params, gradients, Adam's two moments", 4, 0, 8, 4)
_FIRST = {"params": 3, "masters": 1, "optimizer": 1, "gradients": 2}  # the first stage that shards it


def by_stage(stage: int, convention: Convention = SIXTEEN) -> dict[str, Formula]:
    """The formula of each category in a stage; their sum is the memory of the stage.

    >>> [str(sum(by_stage(stage).values(), Formula())) for stage in range(4)]
    ['16Ψ', '4Ψ + 12Ψ/n', '2Ψ + 14Ψ/n', '16Ψ/n']

    Raises:
        ValueError: there is no such stage.
    """
    if stage not in range(4):
        raise ValueError(f"stage={stage!r}: ZeRO has the stages 0, 1, 2 and 3")
    sizes: Mapping[str, int] = {category: getattr(convention, category) for category in _FIRST}
    return {
        category: Formula(0, sizes[category]) if stage >= first else Formula(sizes[category], 0)
        for category, first in _FIRST.items()
    }


def elements_sent(stage: int, *, micro_batches: int = 1) -> int:
    """The elements that each rank sends in a step, in units of Ψ(n-1)/n.

    Stages 0 and 1 reduce once a step, stage 2 reduces in each micro-batch, and stage 3 also gathers twice in each.

    >>> [elements_sent(stage, micro_batches=4) for stage in (0, 1, 2, 3)]
    [2, 2, 5, 12]
    """
    return {0: 2, 1: 2, 2: 1 + micro_batches, 3: 3 * micro_batches}[stage]


def layer_elements_sent(tokens: int, width: int, *, n: int, blocks: int = 2) -> int:
    """The elements that each tensor-parallel rank sends for a layer in a forward and a backward pass.

    Each block, attention or MLP, has an all-reduce of ``tokens · width`` elements forward and one backward, of which each rank
    sends ``2 (n - 1) / n``. Sequence parallelism gathers and scatters instead, and sends equally many (Shoeybi et al. 2019,
    arXiv:1909.08053; Korthikanti et al. 2022, arXiv:2205.05198).

    Args:
        tokens: of a micro-batch.
        width: of the model.
        n: the ranks.
        blocks: how many blocks the layer has.

    Raises:
        ValueError: ``tokens · width`` is not divisible by the ranks, so that ranks send unequal parts.

    >>> layer_elements_sent(8, 16, n=4)
    768
    """
    if n < 1 or tokens * width % n:
        raise ValueError(f"tokens={tokens}, width={width}: {tokens * width} elements do not divide by the {n} ranks")
    return blocks * 2 * 2 * (n - 1) * (tokens * width // n)


def padding(layout: Layout) -> int:
    """The elements of all ranks' shards that belong to no leaf, for alignment and equal shards.

    >>> padding(Layout.of({"w": torch.ones(5)}, 4))
    3
    """
    return sum(s.size - sum(slot.numel for slot in s.slots) for s in layout.segments)


def padding_bound(layout: Layout) -> int:
    """An upper bound of ``padding`` for these leaves.

    Aligning a leaf that is not its segment's first takes up to 16 bytes less one element, and the end of a segment is rounded
    up to a multiple of n elements:
    ``Σ over segments of (leaves - 1) (16 / itemsize - 1) + n - 1``.

    >>> layout = Layout.of({"a": torch.ones(3), "b": torch.ones(5)}, 4)
    >>> padding(layout), padding_bound(layout)
    (4, 6)
    """
    return sum((len(s.slots) - 1) * (max(1, 16 // s.dtype.itemsize) - 1) + layout.n - 1 for s in layout.segments)
