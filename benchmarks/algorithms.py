"""All-reduce algorithms in the alpha-beta model: predicted seconds against ranks and against sizes, as a picture and a table.

    python benchmarks/algorithms.py
    python benchmarks/algorithms.py --per-node 8 --ranks 16384 --across 5e-6 50e9 --inside 1e-6 300e9

Nothing is measured here. By default the network is Summit's, roughly: nodes of 6 GPUs, 20 µs and 12.5 GB/s (InfiniBand
EDR) from node to node, 0.4 µs and 50 GB/s (NVLink 2) inside. Twice around the ring of its 24,756 GPUs are 8,252 hops
between nodes and 41,258 inside, about 180 ms; up and down a tree there are 30, about 0.6 ms. NCCL 2.4 went from rings to
double trees for that reason (S. Jeaugey, "Massively scale your deep learning training with NCCL 2.4", 2019).

The model flatters in two ways: trees are as fast as they get when a value is cut into many chunks, and every rank has a
link to the network of its own. Where the ranks of a node share one, all but ring have less between nodes than shown here.
"""

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path

from functional_ds.comm.algorithms.cost import ALGORITHMS, Link, Network, best, predict

RESULTS = Path(__file__).parent / "results"
COLOURS = dict(zip(ALGORITHMS, ("#c44e52", "#333333", "#4c72b0", "#55a868", "#8172b2", "#ccb974"), strict=True))
UNITS = ((1, "s"), (1e-3, "ms"), (1e-6, "µs"))


def powers(first: int, last: int) -> list[int]:
    """first, 2 first, 4 first, ... and last."""
    found = []
    while first < last:
        found.append(first)
        first *= 2
    return [*found, last]


def seconds(name: str, nbytes: float, n: int, network: Network) -> float:
    """The prediction; for hierarchical that for as many full nodes as n ranks fill, or NaN where they fill none."""
    if name == "hierarchical":
        n -= n % network.ranks_per_node
    return predict(name, nbytes, n, network).seconds if n else math.nan


def shown(value: float) -> str:
    """Seconds with three digits and a unit.

    >>> shown(0.1815), shown(6e-4)
    ('182 ms', '600 µs')
    """
    if math.isnan(value):
        return "-"
    scale, unit = next((pair for pair in UNITS if value >= pair[0]), UNITS[-1])
    return f"{value / scale:,.3g} {unit}"


def size(nbytes: float) -> str:
    units = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B"))
    return next(f"{nbytes / scale:g} {unit}" for scale, unit in units if nbytes >= scale)


def rows(head: str, labels: list[str], cells: Callable[[int, str], float], chosen: Callable[[int], str]) -> list[str]:
    """A table: a row for each label, a column for each algorithm, and which is best."""
    lines = [f"{head:>10}" + "".join(f"{name:>20}" for name in (*ALGORITHMS, "best"))]
    for i, label in enumerate(labels):
        lines.append(f"{label:>10}" + "".join(f"{shown(cells(i, name)):>20}" for name in ALGORITHMS) + f"{chosen(i):>20}")
    return lines


def table(args: argparse.Namespace, network: Network) -> str:
    ranks = sorted({*powers(2, args.max_ranks)[::3], args.ranks, args.max_ranks})
    sizes = [10**power for power in range(3, 10)]

    def at_ranks(i: int, name: str) -> float:
        return seconds(name, args.bytes, ranks[i], network)

    def at_size(i: int, name: str) -> float:
        return seconds(name, sizes[i], args.ranks, network)

    first = rows("ranks", [f"{n:,}" for n in ranks], at_ranks, lambda i: best(args.bytes, ranks[i], network))
    second = rows("bytes", [size(s) for s in sizes], at_size, lambda i: best(sizes[i], args.ranks, network))
    lines = [describe(network), "", f"{size(args.bytes)} of data", *first, "", f"{args.ranks:,} ranks", *second]
    if any(n % network.ranks_per_node for n in ranks):
        m = network.ranks_per_node
        lines += ["", f"hierarchical: on the ranks that fill nodes of {m}; if some are left over, it is no candidate for best"]
    return "\n".join(lines)


def describe(network: Network) -> str:
    def link(one: Link) -> str:
        return f"{shown(one.latency)} and {one.bandwidth / 1e9:g} GB/s"

    return f"nodes of {network.ranks_per_node}; {link(network.across)} across, {link(network.inside)} inside"


def save_png(path: Path, args: argparse.Namespace, network: Network) -> None:
    """Left: a small value on more and more ranks; right: larger and larger values on one number of ranks."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    ranks, sizes = powers(2, args.max_ranks), [1e3 * 2**power for power in range(20)] + [1e9]
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5), layout="constrained")
    for name, colour in COLOURS.items():
        line = {"color": colour, "label": name, "linestyle": "--" if name == "tree" else "-"}  # others lie on it
        left.plot(ranks, [seconds(name, args.bytes, n, network) for n in ranks], **line)
        left.plot(args.ranks, seconds(name, args.bytes, args.ranks, network), "o", color=colour, markersize=4)
        right.plot(sizes, [seconds(name, s, args.ranks, network) for s in sizes], **line)
    for name, offset in (("ring", (-60, 8)), ("double_tree", (-20, 14))):
        value = seconds(name, args.bytes, args.ranks, network)
        left.annotate(shown(value), (args.ranks, value), offset, textcoords="offset points")
    left.axvline(args.ranks, color="black", linewidth=0.6, linestyle="--")
    left.set(xlabel=f"ranks (dashed: {args.ranks:,})", ylabel="predicted seconds", title=f"{size(args.bytes)} of data")
    right.set(xlabel="bytes", title=f"{args.ranks:,} ranks")
    for axes in (left, right):
        axes.set(xscale="log", yscale="log")
        axes.grid(alpha=0.3)
    left.legend()
    figure.suptitle(f"All-reduce in the alpha-beta model: {describe(network)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    link = {"type": float, "nargs": 2, "metavar": ("SECONDS", "BYTES_PER_SECOND")}
    parser.add_argument("--across", **link, default=(20e-6, 12.5e9), help="the link between nodes")
    parser.add_argument("--inside", **link, default=(0.4e-6, 50e9), help="the link inside a node")
    parser.add_argument("--per-node", type=positive, default=6, help="ranks on a node")
    parser.add_argument("--ranks", type=positive, default=24_756, help="where the sizes are compared")
    parser.add_argument("--bytes", type=positive, default=1000, help="at which the numbers of ranks are compared")
    parser.add_argument("--max-ranks", type=positive, default=65_536)
    parser.add_argument("--png", type=Path, default=RESULTS / "algorithms.png")
    parser.add_argument("--text", type=Path, help="default: next to the picture")
    return parser.parse_args()


def main() -> int:
    args = parse()
    network = Network(Link(*args.across), Link(*args.inside), args.per_node)
    text = table(args, network)
    print(text)
    save_png(args.png, args, network)
    path = args.text or args.png.with_suffix(".txt")
    path.write_text(text + "\n")
    print(f"\nwritten: {args.png}, {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
