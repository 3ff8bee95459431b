"""Bytes as text: ZeRO's table, and what ranks hold beside what was expected."""

from collections.abc import Mapping, Sequence

from .account import Memory
from .formulas import SIXTEEN, Convention, Formula, by_stage

__all__ = ["compared", "zero_table"]

_STATE = ("params", "masters", "optimizer")


def zero_table(psi: float = 7.5e9, n: int = 64, *, convention: Convention = SIXTEEN) -> str:
    """What each rank holds in ZeRO's stages, in GB of 10⁹ bytes; by default the figures of the paper's first picture.

    >>> print(zero_table())
    Ψ = 7.5e+09 parameters on n = 64 ranks; GB on each rank
    16 bytes: half params and gradients, fp32 masters, Adam's two moments
    stage     params   masters optimizer gradients     total  formula
    0          15.00     30.00     60.00     15.00    120.00  16Ψ
    1          15.00      0.47      0.94     15.00     31.41  4Ψ + 12Ψ/n
    2          15.00      0.47      0.94      0.23     16.64  2Ψ + 14Ψ/n
    3           0.23      0.47      0.94      0.23      1.88  16Ψ/n

    Raises:
        ValueError: no parameters or no ranks.
    """
    kinds = tuple(by_stage(0))
    head = f"{'stage':<6}" + "".join(f"{kind:>10}" for kind in (*kinds, "total")) + "  formula"
    lines = [f"Ψ = {psi:g} parameters on n = {n} ranks; GB on each rank", convention.name, head]
    for stage in range(4):
        formulas = by_stage(stage, convention)
        whole = sum(formulas.values(), Formula())
        cells = "".join(f"{formula.bytes(psi, n) / 1e9:>10.2f}" for formula in (*formulas.values(), whole))
        lines.append(f"{stage:<6}{cells}  {whole}")
    return "\n".join(lines)


def compared(title: str, expected: Mapping[str, Formula], psi: int, ranks: Sequence[Memory]) -> str:
    """A row for each kind: its formula, that formula's bytes, and what each rank holds.

    Args:
        title: the first line.
        expected: by kind, ``by_stage`` for one.
        psi: how many parameters.
        ranks: every rank's.
    """
    n = len(ranks)
    rows: list[tuple[str, tuple[str, ...]]] = [(kind, (kind,)) for kind in _STATE]
    rows += [("state, these three", _STATE), ("gradients", ("gradients",)), ("state and gradients", (*_STATE, "gradients"))]
    lines = [
        f"{title}\nΨ = {psi:,} parameters on n = {n} ranks; bytes on each rank\n",
        f"{'':<22}{'formula':>13}{'bytes':>16}" + "".join(f"{f'rank {i}':>16}" for i in range(n)),
    ]
    for label, kinds in rows:
        formula = sum((expected[kind] for kind in kinds), Formula())
        found = "".join(f"{sum(getattr(rank, kind) for kind in kinds):>16,}" for rank in ranks)
        lines.append(f"{label:<22}{formula!s:>13}{formula.bytes(psi, n):>16,.0f}{found}")
    if any(rank.peak for rank in ranks):
        lines.append(f"{'peak of the process':<51}" + "".join(f"{rank.peak:>16,}" for rank in ranks))
    return "\n".join(lines)
