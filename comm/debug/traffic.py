"""Who sends what to whom: the ledgers of all ranks as matrices, one for each axis of the mesh, and as a picture."""

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from functional_ds.comm.record.ledger import Ledger

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw_traffic", "traffic"]

_COLOURS = ("Blues", "Oranges", "Greens", "Purples", "Reds", "Greys")
_UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0))
_LABELLED = 16  # with more ranks than this, a cell has no room for its number


def traffic(ledgers: Sequence[Ledger]) -> dict[str, Tensor]:
    """The bytes that each rank sent to each other one, by axis: ``traffic(books)["tp"][i, j]`` from rank i to rank j, fp64.

    An axis is the name of a group without its channels. A message and a row of an exchange go to one rank. What a rank sends in
    another collective counts as equal parts to the other ranks of the group, which is so where sizes divide and nothing travels
    twice; a library may take another way between them.

    Law: a matrix's rows add up to the bytes of the ranks' ledgers.

    Args:
        ledgers: of all ranks, in any order: the results of ``simulate`` or ``spawn``, or ``comm.all_gather_object(book)``.

    Raises:
        ValueError: they are not those of ranks 0 to n - 1, one each.

    >>> from functional_ds import comm
    >>> def program():
    ...     mesh = comm.mesh(dp=2, tp=2)
    ...     with comm.ledger() as book:
    ...         comm.all_reduce(torch.ones(4), mesh["tp"])
    ...         comm.permute(torch.ones(1), [(0, 1)], mesh["dp"])
    ...     return book
    >>> found = traffic(comm.simulate(program, world_size=4))
    >>> found["tp"][1].tolist(), found["dp"][1].tolist()
    ([16.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 4.0])
    """
    n = len(ledgers)
    if sorted(book.rank for book in ledgers) != list(range(n)):
        raise ValueError(f"ledgers: of the ranks {[book.rank for book in ledgers]}; pass one of each rank, 0 to n - 1")
    found: dict[str, Tensor] = {}
    for book in ledgers:
        for row in book.rows:
            if not row.bytes:
                continue
            sent = found.setdefault(row.group.partition("/")[0], torch.zeros(n, n, dtype=torch.float64))[book.rank]
            for rank, size in row.sent_to.items():
                sent[rank] += size
            rest = row.bytes - sum(row.sent_to.values())
            others = [rank for rank in row.ranks if rank != book.rank]
            sent[others] += rest / len(others)
    return found


def draw_traffic(ledgers: Sequence[Ledger], *, title: str = "") -> "Figure":
    """``traffic`` as a picture: a square for each axis, from which rank (down) to which rank (across), darker for more bytes.

    Args:
        ledgers: of all ranks.
        title: the figure's title.

    Returns:
        The matplotlib figure.

    Raises:
        ImportError: matplotlib is not installed (the extra ``train``).
        ValueError: as ``traffic``, or nothing was sent.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "pictures need matplotlib: pip install 'functional-ds[train]'; traffic(ledgers) does without"
        ) from error
    found = traffic(ledgers)
    if not found:
        raise ValueError("ledgers: nothing was sent while they were open")
    n = len(ledgers)
    figure = Figure(figsize=(0.5 + 3.1 * len(found), 3.6), layout="constrained")
    panels = figure.subplots(1, len(found), sharey=True, squeeze=False)[0]
    for axes, (axis, sent), colours in zip(panels, found.items(), itertools.cycle(_COLOURS), strict=False):
        most = float(sent.max())
        unit, factor = next((each for each in _UNITS if most >= each[1]), _UNITS[-1])
        cells = sent.where(sent > 0, torch.nan).numpy() / factor
        axes.pcolormesh(cells, cmap=colours, vmin=0, vmax=2 * most / factor, edgecolor="white", linewidth=0.5)
        axes.set_title(f"{axis}\n{float(sent.sum()) / n / factor:.3g} {unit} a rank", fontsize=9)
        axes.set(xlabel="to rank", aspect="equal", xlim=(0, n), ylim=(n, 0))
        if n <= _LABELLED:
            axes.set_xticks([rank + 0.5 for rank in range(n)], range(n), fontsize=8)
            axes.set_yticks([rank + 0.5 for rank in range(n)], range(n), fontsize=8)
            for i, j in sent.nonzero().tolist():
                axes.text(j + 0.5, i + 0.5, f"{cells[i, j]:.3g}", ha="center", va="center", fontsize=7)
    panels[0].set_ylabel("from rank")
    if title:
        figure.suptitle(title, fontsize=10)
    return figure
