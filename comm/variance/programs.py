"""The programs that ranks have run, and keys by which their values are compared."""

from collections.abc import Sequence

from .linearity import ARITHMETIC, makes_constants
from .op_trace import OpTrace, TracedEvent


class TracedProgram:
    """What some ranks have run: one of their traces, from which the others differ in checksums, zeros and scalars alone.

    Attributes:
        trace: the trace.
        zeros_differ: the values that are zero on some of the ranks.
        scalars_differ: the scalars that are not the same on all of them.
        keys: of each value, equal on ranks that made it by the same operations on the same inputs at the same lines.
        input_keys: of each input of collectives, declarations and arithmetic, of which ranks may pass different values.
    """

    def __init__(self, trace: OpTrace) -> None:
        self.trace = trace
        self.keys = [0] * len(trace.bits)
        self.zeros_differ: set[int] = set()
        self.scalars_differ: set[int] = set()
        self.input_keys: list[list[int]] = []
        self._times: dict[int, int] = {}
        for event in trace.events:
            self._add_keys(event)

    def joins(self, trace: OpTrace) -> bool:
        """Adds the trace of another rank, if it has run the same."""
        same = self.trace.same_program(trace)
        if same:
            self.zeros_differ |= _differing(self.trace.zero, trace.zero)
            self.scalars_differ |= _differing(self.trace.scalars, trace.scalars)
        return same

    def _add_keys(self, event: TracedEvent) -> None:
        given = tuple([self.keys[number] for number in event.inputs])
        if event.kind == "write":
            self.input_keys.append([])
            self.keys[event.outputs[0]] = hash((event.kind, given))
            return
        key = 0
        if event.group is not None:  # its ranks make these calls in one order
            key = self._new_key(event.kind, event.name, event.group.name)
        elif event.name in ARITHMETIC:
            key = self._new_key(event.kind, event.name, event.site)
        self.input_keys.append([hash((key, "input", place)) for place in range(len(event.inputs))] if key else [])
        if event.group is None:
            alike = event.kind == "draw" or makes_constants(event.name)  # independent of the inputs
            shapes = tuple([self.trace.shapes[number] for number in event.outputs])
            key = self._new_key(event.kind, event.name, event.site, () if alike else given, shapes)
        for place, number in enumerate(event.outputs):
            self.keys[number] = hash((key, place))

    def _new_key(self, *what: object) -> int:
        key = hash(what)
        times = self._times[key] = self._times.get(key, 0) + 1
        return hash((key, times))


def _differing(a: Sequence[float], b: Sequence[float]) -> set[int]:
    return set() if a == b else {place for place, (x, y) in enumerate(zip(a, b, strict=False)) if x != y}


def programs(traces: Sequence[OpTrace]) -> list[TracedProgram]:
    """The program of each rank, one object for ranks with the same."""
    different: list[TracedProgram] = []
    by_rank = []
    for trace in traces:
        program = next((one for one in different if one.joins(trace)), None)
        if program is None:
            different.append(program := TracedProgram(trace))
        by_rank.append(program)
    return by_rank
