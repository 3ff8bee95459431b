"""Splitting a program into stages: which instructions each stage runs, and which tensors it sends to the next.

From the last stage to the first::

    wanted = the tensors that the next stage needs, or the module's result
    for each instruction before the stage's end, from the last to the first:
        run it if it lies in the stage, or follows from the inputs alone; and if it makes something wanted, writes into
        something wanted, or must not be left out; then its arguments are wanted in place of its results
    arriving = what is still wanted, but for params, buffers and what follows from the inputs alone
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise

import attrs

from .program import Instruction, Program, StageProgram

__all__ = ["split_program"]


def split_program(program: Program, cuts: Sequence[int]) -> tuple[StageProgram, ...]:
    """The stages of a program that begin at its start and at these places.

    A tensor that is made before a cut and used after it is sent, by way of all stages in between. What follows from the
    inputs alone (masks, positions) is recomputed by each stage that needs it, because every rank has the batch.

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
        free: for each instruction, whether it follows from the inputs alone.
        local: the tensors that are never sent: the sources, and what free instructions make.
    """

    program: Program
    free: Sequence[bool]
    local: frozenset[int]

    @staticmethod
    def of(program: Program) -> "_Splitter":
        free = _free(program)
        _refuse_written_inputs(program, free)
        made = {n for each, is_free in zip(program.instructions, free, strict=True) if is_free for n, _ in each.results}
        return _Splitter(program, free, frozenset({*made, *program.sources}))

    def stage(self, begin: int, end: int, wanted: set[int], *, last: bool) -> StageProgram:
        """The stage of the instructions from ``begin`` to ``end``, which has to leave ``wanted`` behind."""
        program = self.program
        instructions, needed = self._chosen(begin, end, wanted)
        used = needed.union(*(each.reads for each in instructions))
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
            each = self.program.instructions[place]
            if place < begin and not self.free[place]:
                continue
            made = {number for number, _ in each.results}
            changes_live = self.program.written(each) & {storages[number] for number in live}
            if made & live or changes_live or not each.pure:
                chosen.append(each)
                live = (live - made) | each.reads
        return chosen[::-1], live

    def _refuse_torn_views(self, arriving: Sequence[int], begin: int) -> None:
        """Refuses two views of one memory that are both sent, if a later instruction writes into one of them."""
        arrived = [self.program.storages[number] for number in arriving]
        for each in self.program.instructions[begin:]:
            if any(arrived.count(storage) > 1 for storage in self.program.written(each)):
                raise ValueError(
                    f"{each.site}: writes in place into a tensor of which a view crosses a cut, too; on the next "
                    "stage they would be two tensors. Write x = x + y for x += y, or cut elsewhere"
                )


def _free(program: Program) -> list[bool]:
    """For each instruction, whether it follows from the inputs alone.

    It is pure and uses no parameter or buffer, and so do all instructions that make, or write into, what it touches.
    """
    lasting = program.storages_of(("param", "buffer"))
    free = [each.pure and not program.params(each) and not program.written(each) & lasting for each in program.instructions]
    touched = [{*each.reads, *each.writes, *(n for n, _ in each.results)} for each in program.instructions]
    maker = {number: place for place, each in enumerate(program.instructions) for number, _ in each.results}
    writers: dict[int, set[int]] = {}  # by storage
    for place, each in enumerate(program.instructions):
        for storage in program.written(each):
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
    for each, is_free in zip(program.instructions, free, strict=True):
        if not is_free and program.written(each) & inputs:
            raise ValueError(
                f"{each.site}: writes into one of the module's inputs, which every stage takes from the batch; clone it first"
            )


def _spent(instructions: Sequence[Instruction], ends: Iterable[int]) -> tuple[tuple[int, ...], ...]:
    """For each instruction, the tensors that nobody needs after it."""
    alive = set(ends)
    spent: list[tuple[int, ...]] = []
    for each in reversed(instructions):
        numbers = {*each.reads, *(number for number, _ in each.results)}
        spent.append(tuple(sorted(numbers - alive)))
        alive |= each.reads
    return tuple(reversed(spent))
