"""Where stages begin, and what each of them runs, receives and sends."""

import difflib
import fnmatch
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import attrs
from torch import nn

from functional_ds.pipelining.stages.balance import balanced, uniformly

from .program import Instruction, ModuleCall, Program, StageProgram


def candidates(module: nn.Module, at: Any, blocks: str | None) -> list[list[ModuleCall]]:
    """The calls that each entry of ``at`` may mean; for a number of stages, the first calls of all blocks.

    Args:
        module: the module that is split.
        at: module paths, patterns or (path, n) pairs; or a number of stages.
        blocks: a pattern of the blocks' paths.

    Raises:
        ValueError: an entry names no module; the message suggests the nearest paths.
        TypeError: ``at`` is neither a number nor a list.
    """
    paths = {path for path, _ in module.named_modules(remove_duplicate=False) if path}
    if isinstance(at, int):
        return [_blocks(module, at) if blocks is None else _found(paths, blocks, "blocks")]
    if isinstance(at, str) or not isinstance(at, Iterable):
        raise TypeError(f"at={at!r}: give a number of stages, or a list of modules' paths")
    entries = [(entry, 0) if isinstance(entry, str) else entry for entry in at]
    return [[(path, times) for path, _ in _found(paths, name, "at")] for name, times in entries]


def _found(paths: set[str], name: str, argument: str) -> list[ModuleCall]:
    if name in paths:
        return [(name, 0)]
    matches = sorted(fnmatch.filter(paths, name)) if "*" in name or "[" in name else []
    if not matches:
        near = difflib.get_close_matches(name, paths, n=3, cutoff=0.3)
        raise ValueError(
            f"{argument}: {name!r} is not a module of this one; the nearest are {', '.join(near) or sorted(paths)}"
        )
    return [(path, 0) for path in matches]


def _blocks(module: nn.Module, stages: int) -> list[ModuleCall]:
    """The entries of the ModuleList or Sequential with the most parameters and enough entries."""
    rows = [(path, part) for path, part in module.named_modules() if isinstance(part, (nn.ModuleList, nn.Sequential))]
    fitting = [(path, part) for path, part in rows if len(part) >= stages]
    if not fitting:
        longest = max((len(part) for _, part in rows), default=0)
        raise ValueError(
            f"at={stages}: the longest ModuleList or Sequential has {longest} entries; name the blocks: blocks='pattern'"
        )
    path, part = max(fitting, key=lambda row: sum(p.numel() for p in row[1].parameters()))
    return [(f"{path}.{name}" if path else name, 0) for name, _ in part.named_children()]


def modules_around(starts: Sequence[Sequence[ModuleCall]]) -> frozenset[str]:
    """The modules that contain a module that may begin a stage; their forwards are traced call by call."""
    paths = [path for calls in starts for path, _ in calls]
    return frozenset(path[:end] for path in paths for end, letter in enumerate(path) if letter == ".") | {""}


def named_split(program: Program, starts: Sequence[Sequence[ModuleCall]]) -> tuple[ModuleCall, ...]:
    """The calls that begin stages, in order.

    Raises:
        ValueError: a module is not called (so often), begins the model, or is called before one that is named earlier.
    """
    calls: list[ModuleCall] = []
    for several in starts:
        called = [call for call in several if call in program.calls]
        if not called:
            path, times = several[0]
            raise ValueError(f"at: {path!r} is not called {'' if not times else f'{times + 1} times '}with this example")
        calls.extend(sorted(called, key=lambda call: program.calls[call]))
    last: ModuleCall = ("", 0)
    for call in calls:
        if program.calls[call] == 0:
            raise ValueError(f"at: nothing is computed before {call[0]!r}; leave it out, as the first stage needs no name")
        if calls.count(call) > 1:
            raise ValueError(f"at: {call[0]!r} is listed twice; a call of a module begins one stage")
        if program.calls[call] < program.calls[last]:
            raise ValueError(
                f"at: {last[0]!r} comes before {call[0]!r}, but is called after it; list the modules in the order of their "
                "calls"
            )
        last = call
    return tuple(calls)


def balanced_split(
    program: Program,
    module: nn.Module,
    blocks: Sequence[ModuleCall],
    *,
    stages: int,
    by: Any,
    timed: Callable[[Sequence[ModuleCall]], Sequence[float]],
) -> tuple[ModuleCall, ...]:
    """The calls of blocks that begin stages of equal cost; operations around the blocks count with their neighbours.

    Args:
        program: the traced module.
        module: the module itself.
        blocks: the first calls of all blocks.
        stages: how many.
        by: what stages share equally, as for ``cut``.
        timed: seconds of each section of the program that begins with one of these calls.

    Raises:
        ValueError: too few blocks are called, or ``by`` has another number of costs.
    """
    paths = {path for path, _ in blocks}
    rows = sorted((call for call in program.calls if call[0] in paths), key=lambda call: program.calls[call])
    if len(rows) < stages:
        raise ValueError(f"at={stages}: only {len(rows)} blocks are called with this example; each stage needs one")
    if isinstance(by, str) and by == "blocks":
        return tuple(rows[start] for start in uniformly(len(rows), stages)[1:])
    costs = _costs(program, module, rows, by, timed)
    if len(costs) != len(rows):
        raise ValueError(f"by has {len(costs)} costs for {len(rows)} blocks: {', '.join(path for path, _ in rows)}")
    return tuple(rows[start] for start in balanced(costs, stages)[1:])


def _costs(program: Program, module: nn.Module, rows: Sequence[ModuleCall], by: Any, timed: Callable[..., Any]) -> list[float]:
    if by == "parameters":
        sizes = {path: parameter.numel() for path, parameter in module.named_parameters()}
        return [float(sum(sizes[path] for path in paths)) for paths in _params(program, rows)]
    if by == "measured":
        return list(timed(rows))
    if callable(by):
        return [float(by(path, module.get_submodule(path))) for path, _ in rows]
    if isinstance(by, (list, tuple)):
        return [float(cost) for cost in by]
    raise ValueError(f"by={by!r} is unknown; use 'blocks', 'parameters', 'measured', a list of costs or a function")


def _params(program: Program, rows: Sequence[ModuleCall]) -> list[set[str]]:
    """The parameters of each block's section of the program."""
    bounds = [0, *(program.calls[call] for call in rows[1:]), len(program.instructions)]
    stretches = [program.instructions[begin:end] for begin, end in pairwise(bounds)]
    return [{path for instruction in stretch for path in program.params(instruction)} for stretch in stretches]


def split_program(program: Program, cuts: Sequence[int]) -> tuple[StageProgram, ...]:
    """The stages of a program that begin at its start and at these places.

    A tensor that is made before a split and used after it is sent, through all stages in between. What depends only on the
    inputs (masks, positions) is recomputed by each stage that needs it, because every rank has the batch.

    Raises:
        ValueError: a tensor and a view of it are both sent, and one is written into afterwards; an input is written into.
    """
    splitter = _Splitter.of(program)
    stages: list[StageProgram] = []
    wanted = set(program.outputs)
    for begin, end in reversed(list(pairwise([0, *cuts, len(program.instructions)]))):
        stages.append(splitter.stage(begin, end, wanted, last=not stages))
        wanted = set(stages[-1].arriving)
    return tuple(reversed(stages))


@attrs.frozen(eq=False)
class _Splitter:
    """A program, and what every stage can compute by itself.

    Attributes:
        free: for each instruction, whether it depends only on the inputs.
        local: the tensors that are never sent: the sources, and what free instructions make.
    """

    program: Program
    free: Sequence[bool]
    local: frozenset[int]

    @staticmethod
    def of(program: Program) -> "_Splitter":
        free = _free(program)
        _refuse_written_inputs(program, free)
        made = {
            n
            for instruction, is_free in zip(program.instructions, free, strict=True)
            if is_free
            for n, _ in instruction.results
        }
        return _Splitter(program, free, frozenset({*made, *program.sources}))

    def stage(self, begin: int, end: int, wanted: set[int], *, last: bool) -> StageProgram:
        """The stage of the instructions from ``begin`` to ``end``, which must produce ``wanted``."""
        program = self.program
        instructions, needed = self._chosen(begin, end, wanted)
        used = needed.union(*(instruction.reads for instruction in instructions))
        arriving = tuple(sorted(needed - self.local))
        sources = tuple((number, source) for number, source in program.sources.items() if number in used)
        written = set[int]().union(*map(program.written, instructions))
        foreign = [*arriving, *(number for number, source in sources if source.kind in ("input", "constant"))]
        self._refuse_torn_views(arriving, begin)
        return StageProgram(
            arriving=arriving,
            leaving=() if last else tuple(sorted(wanted)),
            copied=tuple(number for number in foreign if program.storages[number] in written),
            sources=sources,
            instructions=tuple(instructions),
            spent=_spent(instructions, wanted),
            output=program.output if last else None,
        )

    def _chosen(self, begin: int, end: int, wanted: Iterable[int]) -> tuple[list[Instruction], set[int]]:
        """The instructions that a stage runs, and the tensors that it needs and does not make."""
        storages, live, chosen = self.program.storages, set(wanted), list[Instruction]()
        for place in reversed(range(end)):
            instruction = self.program.instructions[place]
            if place < begin and not self.free[place]:
                continue
            made = {number for number, _ in instruction.results}
            changes_live = self.program.written(instruction) & {storages[number] for number in live}
            if made & live or changes_live or not instruction.pure:
                chosen.append(instruction)
                live = (live - made) | instruction.reads
        return chosen[::-1], live

    def _refuse_torn_views(self, arriving: Sequence[int], begin: int) -> None:
        """Raises an error for two views of one memory that are both sent, if a later instruction writes into one of them."""
        arrived = [self.program.storages[number] for number in arriving]
        for instruction in self.program.instructions[begin:]:
            if any(arrived.count(storage) > 1 for storage in self.program.written(instruction)):
                raise ValueError(
                    f"{instruction.site}: writes in place into a tensor of which a view is used on both sides of the split; on "
                    "the next stage they would be two tensors. Write x = x + y for x += y, or split elsewhere"
                )


def _free(program: Program) -> list[bool]:
    """For each instruction, whether it depends only on the inputs.

    It is pure and uses no parameter or buffer, and so do all instructions that make, or write into, what it uses.
    """
    lasting = program.storages_of(("param", "buffer"))
    free = [
        instruction.pure and not program.params(instruction) and not program.written(instruction) & lasting
        for instruction in program.instructions
    ]
    touched = [
        {*instruction.reads, *instruction.writes, *(n for n, _ in instruction.results)} for instruction in program.instructions
    ]
    maker = {number: place for place, instruction in enumerate(program.instructions) for number, _ in instruction.results}
    writers: dict[int, set[int]] = {}  # by storage
    for place, instruction in enumerate(program.instructions):
        for storage in program.written(instruction):
            writers.setdefault(storage, set()).add(place)
    behind = [
        {maker[number] for number in numbers if number in maker}.union(
            *(writers.get(program.storages[number], ()) for number in numbers)
        )
        for numbers in touched
    ]
    changed = True
    while changed:
        changed = False
        for place, others in enumerate(behind):
            if free[place] and not all(free[other] for other in others):
                free[place], changed = False, True
    return free


def _refuse_written_inputs(program: Program, free: Sequence[bool]) -> None:
    inputs = program.storages_of(("input",))
    for instruction, is_free in zip(program.instructions, free, strict=True):
        if not is_free and program.written(instruction) & inputs:
            raise ValueError(
                f"{instruction.site}: writes into one of the module's inputs, which every stage takes from the batch; clone it "
                "first"
            )


def _spent(instructions: Sequence[Instruction], ends: Iterable[int]) -> tuple[tuple[int, ...], ...]:
    """For each instruction, the tensors that are not needed after it."""
    alive = set(ends)
    spent: list[tuple[int, ...]] = []
    for instruction in reversed(instructions):
        numbers = {*instruction.reads, *(number for number, _ in instruction.results)}
        spent.append(tuple(sorted(numbers - alive)))
        alive |= instruction.reads
    return tuple(reversed(spent))
