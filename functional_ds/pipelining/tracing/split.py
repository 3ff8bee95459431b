"""A program cut into parts: what each does, and which tensors go from one to the next."""

from collections.abc import Iterable, Sequence

import attrs

from .program import Instruction, Part, Program

__all__ = ["cut_program"]


def cut_program(program: Program, cuts: Sequence[int]) -> tuple[Part, ...]:
    """The parts of a program that begin at its start and at these places.

    A tensor that is made before a cut and used after it is sent, by way of all parts in between. What follows from the
    inputs alone (masks, positions) is made anew by each part that needs it, because every rank has the batch.

    Raises:
        ValueError: a tensor and a view of it are both sent, and one is written into afterwards; an input is written into.
    """
    return _Slicer.of(program, [0, *cuts, len(program.instructions)]).parts()


@attrs.frozen(eq=False)
class _Slicer:
    program: Program
    bounds: Sequence[int]

    free: Sequence[bool]
    free_tensors: frozenset[int]  # those that every part can make by itself

    @staticmethod
    def of(program: Program, bounds: Sequence[int]) -> "_Slicer":
        free = _free(program)
        each = zip(program.instructions, free, strict=True)
        return _Slicer(program, bounds, free, frozenset(n for one, is_free in each if is_free for n, _ in one.results))

    def parts(self) -> tuple[Part, ...]:
        """From the last to the first: a part's arriving tensors are what the part before has to send."""
        parts: list[Part] = []
        live = self._sent(self.program.outputs)
        wanted = set(self.program.outputs)
        for stage in reversed(range(len(self.bounds) - 1)):
            last = stage == len(self.bounds) - 2
            part = self._part(stage, wanted, () if last else tuple(sorted(live)), last)
            parts.append(part)
            live = set(part.arriving)
            wanted = set(live)
        return tuple(reversed(parts))

    def _part(self, stage: int, wanted: set[int], leaving: tuple[int, ...], last: bool) -> Part:
        begin, end = self.bounds[stage], self.bounds[stage + 1]
        chosen, needed = self._chosen(begin, end, wanted)
        arriving = tuple(sorted(self._sent(needed)))
        instructions = [self.program.instructions[place] for place in chosen]
        used = needed | {number for each in instructions for number in each.reads}
        sources = tuple((number, source) for number, source in self.program.sources.items() if number in used)
        written = {self.program.memory[number] for each in instructions for number in each.writes}
        theirs = [*arriving, *(number for number, source in sources if source.kind in ("input", "constant"))]
        copied = tuple(number for number in theirs if self.program.memory[number] in written)
        self._refuse_torn_views(arriving, begin)
        output = self.program.output if last else None
        ends = self.program.outputs if last else leaving
        spent = _spent(instructions, ends)
        return Part(arriving, leaving, copied, sources, tuple(instructions), spent, output)

    def _chosen(self, begin: int, end: int, wanted: Iterable[int]) -> tuple[list[int], set[int]]:
        """The places of the instructions that a part needs, and the tensors that it does not make itself."""
        memory = self.program.memory
        live = set(wanted)
        chosen: list[int] = []
        for place in reversed(range(end)):
            instruction = self.program.instructions[place]
            free = self.free[place]
            if place < begin and not free:
                continue
            made = {number for number, _ in instruction.results}
            changed = {memory[number] for number in instruction.writes}
            alive = {memory[number] for number in live}
            if made & live or changed & alive or not instruction.pure:
                chosen.append(place)
                live = (live - made) | instruction.reads
        return chosen[::-1], live

    def _sent(self, numbers: Iterable[int]) -> set[int]:
        """Those of these tensors that are neither the batch's nor each rank's own."""
        return {number for number in numbers if number not in self.program.sources and number not in self.free_tensors}

    def _refuse_torn_views(self, arriving: Sequence[int], begin: int) -> None:
        memory = self.program.memory
        for instruction in self.program.instructions[begin:]:
            for torn in {memory[number] for number in instruction.writes}:
                if sum(memory[number] == torn for number in arriving) > 1:
                    raise ValueError(
                        f"{instruction.site}: writes in place into a tensor of which a view crosses a cut, too; on the next "
                        "stage they would be two tensors. Write x = x + y for x += y, or cut elsewhere"
                    )


def _free(program: Program) -> list[bool]:
    """For each instruction, whether it follows from the inputs alone."""
    lasting = {program.memory[n] for n, source in program.sources.items() if source.kind in ("param", "buffer")}
    free = [
        each.pure and not program.params(each) and not any(program.memory[n] in lasting for n in each.writes)
        for each in program.instructions
    ]
    maker = {number: place for place, each in enumerate(program.instructions) for number, _ in each.results}
    writers: dict[int, set[int]] = {}
    for place, each in enumerate(program.instructions):
        for number in each.writes:
            writers.setdefault(program.memory[number], set()).add(place)
    changed = True
    while changed:  # what hangs on something that is not free is not free either, nor is who else writes there
        changed = False
        for place, each in enumerate(program.instructions):
            numbers = {*each.reads, *each.writes, *(number for number, _ in each.results)}
            behind = {maker[number] for number in numbers if number in maker}
            behind |= {writer for number in numbers for writer in writers.get(program.memory[number], ())}
            if free[place] and not all(free[other] for other in behind):
                free[place] = False
                changed = True
    _refuse_written_inputs(program, free)
    return free


def _refuse_written_inputs(program: Program, free: Sequence[bool]) -> None:
    inputs = {program.memory[number] for number, source in program.sources.items() if source.kind == "input"}
    for each, is_free in zip(program.instructions, free, strict=True):
        if not is_free and any(program.memory[number] in inputs for number in each.writes):
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
