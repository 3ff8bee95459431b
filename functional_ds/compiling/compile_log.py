"""Log of torch.compile's work for a step: how often it compiled, and why."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence

import attrs

from functional_ds.step.step import Step


@attrs.frozen
class Compilation:
    """One compilation of a class of blocks.

    Attributes:
        path: the block whose call matched no compiled code.
        graphs: the number of graphs: 1, and one more after each graph break.
        why: what differed from existing code; empty for the first time. Of a region: its size.
        seconds: how long it took; None for a block, whose backward pass torch.compile compiles later.
    """

    path: str
    graphs: int
    why: str = ""
    seconds: float | None = None

    def __str__(self) -> str:
        graphs = "" if self.graphs == 1 else f" ({self.graphs} graphs)"
        took = "" if self.seconds is None else f", {self.seconds:.2f} s"
        return f"{self.path}{graphs}: {self.why or 'the first of its class'}{took}"


@attrs.define(eq=False)
class BlockClass:
    """The blocks of one class.

    Attributes:
        name: the class; of a jitted step, the phase in which regions begin.
        paths: the blocks that ran; of a jitted step, its regions.
        calls: how often they ran as compiled code, including compilations.
        eager: how often they ran eagerly, by the reason.
        own: how many compilations were for calls of this step, on this rank.
    """

    name: str
    paths: tuple[str, ...] = ()
    calls: int = 0
    eager: dict[str, int] = attrs.field(factory=dict)
    own: int = 0
    _shared: list[list[Compilation]] = attrs.field(factory=list)

    def follow(self, compilations: list[Compilation]) -> None:
        """Uses these compilations, now and later, as those of the blocks' function."""
        if not any(compilations is shared for shared in self._shared):
            self._shared.append(compilations)

    @property
    def compilations(self) -> tuple[Compilation, ...]:
        """Those of the functions that blocks of this class share in this process."""
        return tuple(one for shared in self._shared for one in shared)

    @property
    def graphs(self) -> int:
        """The graphs of all compilations."""
        return sum(compilation.graphs for compilation in self.compilations)

    def copy(self) -> "BlockClass":
        """As it is now."""
        return attrs.evolve(self, eager=dict(self.eager), shared=[list(self.compilations)])


@attrs.define(eq=False)
class CompileLog:
    """The log of one ``T.compiled`` in one step.

    Attributes:
        limit: how often one class may be compiled.
        classes: by class.
        changes: in how many compilations a block has set an attribute.
    """

    limit: int
    classes: dict[type, BlockClass] = attrs.field(factory=dict)
    changes: Counter[tuple[type, str]] = attrs.field(factory=Counter)

    def of(self, block_class: type, path: str) -> BlockClass:
        """The row of a block."""
        row = self.classes.setdefault(block_class, BlockClass(block_class.__qualname__))
        if path not in row.paths:
            row.paths = (*row.paths, path)
        return row


class Compiles(ABC):
    """A part that compiles: the step, or the object whose method a layer's ``forward`` is."""

    @abstractmethod
    def compiled_rows(self, step: Step) -> Sequence[BlockClass] | None:
        """What was compiled for a step so far; None if it compiles nothing.

        Ranks that are threads may share a transform; each makes its own step.
        """


@attrs.frozen(eq=False, repr=False)
class CompileReport:
    """What was compiled for a step since it was made, by class of block.

    Ranks that are threads of one process share compiled code, as do steps with the same options: the first that meets a class
    and shape compiles it for all.

    Attributes:
        rows: one for each class.
    """

    rows: Sequence[BlockClass]

    @property
    def compilations(self) -> int:
        """The number of compilations."""
        return sum(len(row.compilations) for row in self.rows)

    @property
    def graphs(self) -> int:
        """The number of graphs."""
        return sum(row.graphs for row in self.rows)

    @property
    def calls(self) -> int:
        """How often a block ran as compiled code."""
        return sum(row.calls for row in self.rows)

    @property
    def eager(self) -> int:
        """How often a block ran eagerly."""
        return sum(sum(row.eager.values()) for row in self.rows)

    @property
    def seconds(self) -> float:
        """How long regions of a jitted step took to compile."""
        return sum(compilation.seconds or 0.0 for row in self.rows for compilation in row.compilations)

    def __str__(self) -> str:
        lines = [f"{'class':<28} {'blocks':>6} {'calls':>8} {'eager':>8} {'compiled':>8} {'graphs':>8}"]
        for row in self.rows:
            numbers = (len(row.paths), row.calls, sum(row.eager.values()), len(row.compilations), row.graphs)
            lines.append(f"{row.name:<28} {numbers[0]:>6,} " + " ".join(f"{number:>8,}" for number in numbers[1:]))
            lines += [f"  compiled at {compilation}" for compilation in row.compilations]
            lines += [f"  eager {times:,} times: {why}" for why, times in row.eager.items()]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"CompileReport({self.compilations} compilations, {self.graphs} graphs, {self.calls} calls, {self.eager} eager)"


def compile_report(step: Step) -> CompileReport:
    """Reports what ``T.compiled``, or ``fds.jit`` with a backend, compiled for this step on this rank, how often and why.

    Raises:
        ValueError: no transform of the step compiles anything.

    >>> import torch, functional_ds as fds
    >>> from functional_ds import transforms as T
    >>> apply, params = fds.functional(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)))
    >>> step = T.compiled(backend="eager")(fds.train_step(lambda p, x: apply(p, x).sum(), fds.sgd(0.1)))
    >>> state, _ = step(step.init(params), torch.ones(3, 2))
    >>> compile_report(step).calls
    2
    """
    owners = [*(getattr(layer.phases.get("forward"), "__self__", None) for layer in step.layers), step]
    tables = [owner.compiled_rows(step) for owner in owners if isinstance(owner, Compiles)]
    if all(rows is None for rows in tables):
        raise ValueError(
            f"compile_report: nothing of the step is compiled ({step}); add T.compiled('blocks'), or fds.jit(..., "
            "backend='inductor'), which compiles in a state's second step"
        )
    return CompileReport([row.copy() for rows in tables for row in rows or ()])
