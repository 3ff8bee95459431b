"""Traffic matrices between ranks, one for each mesh axis, from the ledgers of all ranks."""

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from functional_ds.base.package_index import new_figure
from functional_ds.comm.record.ledger import Ledger

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = ("Blues", "Oranges", "Greens", "Purples", "Reds", "Greys")
_UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0))
_LABELLED = 16  # with more ranks than this, a cell has no room for its number


def traffic(ledgers: Sequence[Ledger]) -> dict[str, Tensor]:
    """Bytes sent between ranks, by axis: ``traffic(ledgers)["tp"][i, j]`` from rank i to rank j, in float64.

    An axis is the name of a group without its channels. Messages, permutations, reduce, gather and the rows of an all_to_all
    with splits count for their receivers, other collectives as equal parts to all other ranks of the group or, if hierarchical,
    as they are sent. NCCL may route them differently.

    Law: summed over all axes, row i adds up to the bytes of rank i's ledger.

    Args:
        ledgers: of all ranks, in any order: the results of ``simulate`` or ``spawn``, or ``comm.all_gather_object(ledger)``.

    Raises:
        ValueError: the ledgers are not one for each rank 0 to n - 1.

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
    by_axis: dict[str, Tensor] = {}
    for book in ledgers:
        for row in book.rows:
            if not row.bytes:
                continue
            sent = by_axis.setdefault(row.group.partition("/")[0], torch.zeros(n, n, dtype=torch.float64))[book.rank]
            for rank, size in row.sent_to.items():
                sent[rank] += size
            rest = row.bytes - sum(row.sent_to.values())
            others = [rank for rank in row.ranks if rank != book.rank]
            sent[others] += rest / len(others)
    return by_axis


def draw_traffic(ledgers: Sequence[Ledger], *, title: str = "") -> "Figure":
    """Plots ``traffic``: a heat map for each axis, senders down and receivers across, darker for more bytes.

    Args:
        ledgers: of all ranks.
        title: the figure's title.

    Returns:
        The matplotlib figure.

    Raises:
        ImportError: matplotlib is not installed (the extra ``train``).
        ValueError: nothing was sent, or as for ``traffic``.
    """
    by_axis = traffic(ledgers)
    if not by_axis:
        raise ValueError("ledgers: nothing was sent while they were open")
    n = len(ledgers)
    figure = new_figure(0.5 + 3.1 * len(by_axis), 4.2, needs="pictures need", instead="traffic(ledgers)")
    panels = figure.subplots(1, len(by_axis), sharey=True, squeeze=False)[0]
    for axes, (axis, sent), colours in zip(panels, by_axis.items(), itertools.cycle(_COLOURS), strict=False):
        most = float(sent.max())
        unit, factor = next((scale for scale in _UNITS if most >= scale[1]), _UNITS[-1])
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
