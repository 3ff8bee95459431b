"""Propagates variance through a traced program, and finds the first contradiction.

Each group is checked separately. A value's variance follows from declarations, from collectives (``Collective.takes`` and
``gives``), and through operations from their inputs; a result whose bits differ between ranks is varying.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import attrs

from functional_ds.comm.table.collective import Variance

from .declarations import Contradiction
from .group_bits import GroupBits
from .linearity import DRAWN_INTO, KEEPS, MOVES, PRODUCTS, SCALES, SUMS, SUMS_OF_PRODUCTS, TERMS, makes_constants
from .op_trace import OpTrace, Scalar, TracedEvent, TracedGroup, Values
from .programs import TracedProgram, programs

# "constant": made from plain numbers; "unknown": equal so far, without a declaration.
_Variance = Literal["constant", "unknown"] | Variance
_R, _I, _V, _P = Variance.REPLICATED, Variance.INVARIANT, Variance.VARYING, Variance.PARTIAL

_TOKENS = ("randint", "random", "randperm")  # drawn as data, not as masks
_HOMOGENEOUS = SUMS | MOVES | SCALES | PRODUCTS
_MANY = 32  # elements of a draw from which on equal bits are not a coincidence


@attrs.frozen
class _ValueState:
    """What is known of a value along the group.

    Attributes:
        variance: its variance, "constant" or "unknown".
        since: the reason.
        drawn: the source line, if it is a random draw with equal bits on all ranks.
        repeated: where a replicated value was added to it, which a sum over ranks counts n times.
        by_rows: the same for a value that was added to each row, such as a bias.
    """

    variance: _Variance
    since: str = ""
    drawn: str = ""
    repeated: str = ""
    by_rows: str = ""

    @property
    def claimed(self) -> bool:
        """Whether it is equal on all ranks by a declaration or a collective."""
        return self.variance in (_R, _I)


_CONSTANT, _UNKNOWN = _ValueState("constant"), _ValueState("unknown")


class _ContradictionError(Exception):
    """Ends a walk at a contradiction."""

    def __init__(self, text: str, since: str = "") -> None:
        super().__init__(text)
        self.text, self.since = text, since


class _ApartError(Exception):
    """Ends a walk for several ranks where they must be followed one by one."""


def contradictions(traces: Sequence[OpTrace]) -> list[Contradiction]:
    """The first contradiction in each of the ranks' programs, for each group."""
    by_rank = programs(traces)
    groups: dict[tuple[int, ...], TracedGroup] = {}
    for program in dict.fromkeys(by_rank):
        for event in program.trace.events:
            if event.group is not None and len(event.group.ranks) > 1:
                groups.setdefault(event.group.ranks, event.group)
    firsts: list[Contradiction] = []
    for group in groups.values():
        bits = GroupBits(group.ranks, by_rank, traces)
        for program in dict.fromkeys(by_rank[rank] for rank in group.ranks):
            ranks = [rank for rank in group.ranks if by_rank[rank] is program]
            try:
                firsts += _GroupWalk(group, ranks[0], program, bits).run()
            except _ApartError:
                firsts += [one for rank in ranks for one in _GroupWalk(group, rank, program, bits, traces[rank]).run()]
    return firsts


class _GroupWalk:
    """A walk through a program, for one group: for all ranks that ran it, or for that with the trace ``alone``."""

    def __init__(
        self, group: TracedGroup, rank: int, program: TracedProgram, bits: GroupBits, alone: OpTrace | None = None
    ) -> None:
        self.group, self.rank, self.program, self.bits = group, rank, program, bits
        self.trace, self.together = alone or program.trace, alone is None
        self.members = frozenset(group.ranks)
        self.states: dict[int, _ValueState] = {}
        self.event: TracedEvent
        self.input_keys: Sequence[int] = ()
        self.steps: Mapping[str, Callable[[], None]] = {
            "first use": self._first_use,
            "draw": self._draw,
            "operator": self._operator,
            "write": self._operator,
            "call": self._call,
            "declaration": self._declaration,
            "gradient": self._gradient,
        }

    def run(self) -> list[Contradiction]:
        """The first contradiction, if there is one."""
        for index, event in enumerate(self.trace.events):
            self.event, self.input_keys = event, self.program.input_keys[index]
            try:
                self.steps[event.kind]()
            except _ContradictionError as error:
                return [Contradiction(index, self.rank, error.text, error.since)]
        return []

    # -- events --------------------------------------------------------------------------------------------------------

    def _first_use(self) -> None:
        (number,) = self.event.outputs
        self.states[number] = self._unless_different(number, _UNKNOWN, "pass different", "pass", "values")

    def _draw(self) -> None:
        self._check_partial()
        for number in self.event.outputs:
            size = math.prod(self.trace.shapes[number])
            alike = _ValueState("constant", drawn=self.event.site if size >= _MANY and self.event.name not in _TOKENS else "")
            self.states[number] = self._unless_different(number, alike, "draw different", "draw", "numbers")

    def _operator(self) -> None:
        state = self._combined()
        for number in self.event.outputs:
            self.states[number] = self._unless_different(number, state, "get different values from", "call", self.event.name)

    def _call(self) -> None:
        event, group, takes, gives = self.event, self.event.group, self.event.takes, self.event.gives
        if group is None or gives is None:
            return
        inputs = [self.states[number] for number in event.inputs]
        if not self.members <= set(group.ranks):
            return self._other_group(inputs, overlaps=len(self.members & set(group.ranks)) > 1)
        for place, (number, state) in enumerate(zip(event.inputs, inputs, strict=True)):
            if takes is _P:
                self._check_summed(state, number, self._where(), self.input_keys[place])
            elif takes is _I:
                self._check_invariant(place, state)
            elif state.variance is _P:
                self._fail(f"{self._where()} takes a value of each rank's own, and gets a term of a partial sum", state)
        for number in event.outputs:
            self.states[number] = _ValueState(gives, self._where())

    def _other_group(self, inputs: Sequence[_ValueState], *, overlaps: bool) -> None:
        """A collective of other ranks, such as another mesh axis, is treated as an operation."""
        for place, number in enumerate(self.event.outputs):
            state = inputs[min(place, len(inputs) - 1)] if inputs else _UNKNOWN
            if state.variance is _P and overlaps:
                state = _ValueState(_V, f"{self._where()} has summed some of its terms")
            self.states[number] = self._unless_different(number, state, "get different values from", "call", self.event.name)

    def _declaration(self) -> None:
        event, variance = self.event, self.event.takes
        ranks = set() if event.group is None else set(event.group.ranks)
        for number, made in zip(event.inputs, event.outputs, strict=True):
            state = self.states[number]
            if not self.members <= ranks or variance is None:
                some = variance is _V and len(self.members & ranks) > 1  # perhaps of the terms
                self.states[made] = _ValueState(_V, f"comm.varying at {event.site}") if some and state.variance is _P else state
                continue
            if variance.equal and self._differ(made):
                raise _ContradictionError(
                    "", state.since if state.variance is _V else ""
                )  # the comparison of the ranks says more
            if variance is _P:
                self._check_summed(state, number, f"comm.partial at {event.site}", self.program.keys[made])
            self.states[made] = _ValueState(variance, f"comm.{variance.value} at {event.site}")

    def _gradient(self) -> None:
        event, variance = self.event, self.event.takes
        concerned = event.group is not None and self.members <= set(event.group.ranks)
        for number, made in zip(event.inputs, event.outputs, strict=True):
            if concerned and variance is not None:
                self.states[made] = _ValueState(variance.dual, f"as the gradient of comm.{variance.value} at {event.site}")
            else:
                self.states[made] = self.states[number]

    def _unless_different(self, number: int, state: _ValueState, differ: str, some: str, what: str) -> _ValueState:
        """The state; varying if the ranks' bits differ, or if some ranks compute something else."""
        if state.variance in (_V, _P):
            return state
        key, site = self.program.keys[number], self.event.site
        if pair := self.bits.differ(key):
            return _ValueState(_V, f"{pair} {differ} {what} at {site}")
        if ranks := self.bits.some(key):
            return _ValueState(_V, f"of {self._name()} only ranks {ranks} {some} {what} at {site}")
        return state

    # -- operations ----------------------------------------------------------------------------------------------------

    def _combined(self) -> _ValueState:
        """The state of an operator's results, from its inputs and before their bits are compared."""
        event = self.event
        if makes_constants(event.name):
            return _CONSTANT
        numbers = event.operands[1] if event.name == "copy" and isinstance(event.operands[1], Values) else event.inputs
        states = [self.states[number] for number in numbers]
        variances = [state.variance for state in states]
        if _P in variances:
            return self._check_partial()
        if _V in variances:
            return self._varying(numbers, states)
        drawn = next((state.drawn for state in states if state.drawn), "")
        if variances.count("constant") == len(variances):
            return _ValueState("unknown") if event.backward else _ValueState("constant", drawn=drawn)
        if "unknown" in variances or (event.backward and "constant" in variances):  # a gradient of ones is not declared
            return _UNKNOWN
        return next(state for variance in (_R, _I) for state in states if state.variance is variance)

    def _varying(self, numbers: Sequence[int], states: Sequence[_ValueState]) -> _ValueState:
        event, name = self.event, self.event.name
        pairs = zip(numbers, states, strict=True)  # ranks may take different parts of one draw, as of a batch
        drawn = next((state.drawn for number, state in pairs if state.drawn and not self._taken(number)), "")
        since = next(state.since for state in states if state.variance is _V)
        if drawn and name in DRAWN_INTO and not event.backward:
            raise _ContradictionError(
                f"{name} at {event.site} brings a random draw with equal bits on all ranks of {self._name()}, made at {drawn}, "
                f"into a value that differs between them ({since}): draw by global position (fds.Key), or seed ranks apart"
            )
        if event.backward:
            return _ValueState(_V, since)
        return _ValueState(_V, since, repeated=self._repeated(numbers, states), by_rows=self._by_rows(numbers, states))

    def _repeated(self, numbers: Sequence[int], states: Sequence[_ValueState]) -> str:
        """Where a replicated value was added to a varying one."""
        name = self.event.name
        if name not in _HOMOGENEOUS:
            return ""
        before = next((state.repeated for state in states if state.repeated), "")
        if name in SUMS or name in ("cat", "stack", "write"):
            shapes = {self.trace.shapes[number] for number in numbers}
            if name in ("cat", "stack", "write") or len(shapes) == 1:  # ``by_rows`` has biases
                for number, state in zip(numbers, states, strict=True):
                    if state.claimed and not self._zero(number) and not self._taken(number):
                        return before or f"{name} at {self.event.site} ({state.since})"
        elif name in PRODUCTS | SCALES and any(state.variance is _V and not state.repeated for state in states):
            return ""
        return before

    def _by_rows(self, numbers: Sequence[int], states: Sequence[_ValueState]) -> str:
        """Where a replicated value was added to each row of a varying one, as a bias is."""
        name, shape = self.event.name, self.trace.shapes[self.event.outputs[0]]
        terms = numbers if name in SUMS else numbers[:1] if name in SUMS_OF_PRODUCTS else ()
        for number, state in zip(numbers, states, strict=True):
            whole = self.trace.shapes[number] == shape and name in SUMS  # ``repeated`` has these
            if number in terms and state.claimed and not whole and not self._zero(number) and not self._taken(number):
                return f"{name} at {self.event.site} ({state.since})"
        before = next((state.by_rows for state in states if state.by_rows), "")
        scaled = name in ("mul", "div") and not any(state.variance is _V and not state.by_rows for state in states)
        return before if name in KEEPS or name in SUMS or scaled else ""

    def _check_partial(self) -> _ValueState:
        """The state of an operator's results from partial sums; it must be linear in them, and the same on all ranks."""
        event, name = self.event, self.event.name
        states = [self.states[number] for number in event.inputs]
        partial = next((state for state in states if state.variance is _P), None)
        if partial is None or event.backward:  # a derivative is linear
            return partial or _UNKNOWN
        self._check_terms(partial)
        if name in SUMS:
            return partial
        if name in SUMS_OF_PRODUCTS:
            first, *others = [operand for operand in event.operands if isinstance(operand, Values)]
            factors = [number for operand in others for number in operand]
            product_is_partial = any(self.states[number].variance is _P for number in factors)
            self._check_added(first if product_is_partial else factors, partial)
            self._check_scaled(factors)
            return partial
        if name in MOVES:
            repeated = self._repeated(event.inputs, states) if name in ("cat", "stack", "write") else partial.repeated
            return attrs.evolve(partial, repeated=repeated)
        if name in PRODUCTS or (name in SCALES and self.states[event.inputs[0]].variance is _P):
            self._check_scaled(event.inputs)
            return partial
        self._fail(f"{name} at {event.site} is not linear, and acts on a partial sum", partial)
        return partial

    def _check_terms(self, partial: _ValueState) -> None:
        """Numbers and replicated values must not become terms or elements of a partial sum; masks must not differ."""
        event = self.event
        for place in TERMS.get(event.name, ()):
            operand = event.operands[place] if place < len(event.operands) else None
            if isinstance(operand, Values):
                self._check_added(operand, partial)
            elif isinstance(operand, Scalar) and (scalar := self._scalar(operand)) != 0:
                self._fail(f"{event.name} at {event.site} adds {scalar} to each rank's term of a partial sum", partial)
        if event.name == "where":
            terms = [number for number in event.inputs if self.states[number].variance is _P]
            self._check_scaled([event.inputs[0], terms[-1]])

    def _check_added(self, numbers: Sequence[int], partial: _ValueState) -> None:
        """Replicated values must not be added to a partial sum."""
        for number in numbers:
            state = self.states[number]
            # Uninitialized memory will be overwritten.
            empty = state.variance == "constant" and self.trace.bits[number] is None
            if state.variance not in (_P, _V) and not empty and not self._zero(number) and not self._taken(number):
                since = f" ({state.since})" if state.since else ""
                text = f"{self.event.name} at {self.event.site} adds a value that all ranks have{since} to a partial sum"
                self._fail(text, partial, f"the sum counts it {len(self.group.ranks)} times: sum first, and add it then")

    def _check_scaled(self, numbers: Sequence[int]) -> None:
        """At most one factor may be partial, and no other may differ between ranks."""
        states = [self.states[number] for number in numbers]
        partial = [state for state in states if state.variance is _P]
        since = next((state.since for state in states if state.variance is _V), "")
        since = since or next((f"{taken} take other ones" for number in numbers if (taken := self._taken(number))), "")
        text = f"{self.event.name} at {self.event.site} multiplies"
        if len(partial) > 1:
            self._fail(f"{text} two partial sums", partial[0], "a product of sums is not a sum of products")
        if partial and since:
            self._fail(f"{text} a value that differs between ranks ({since}) by a partial sum", partial[0])

    # -- collectives ---------------------------------------------------------------------------------------------------

    def _check_summed(self, state: _ValueState, number: int, what: str, key: int) -> None:
        """A value to be summed must not be replicated; ``key`` has its bits, as ranks may pass different replicated values."""
        n = len(self.group.ranks)
        if state.claimed and not self._zero(number) and not self.bits.differ(key):
            subject = "a gradient" if self.event.backward else "a value"
            raise _ContradictionError(
                f"{what} sums {subject} that all ranks of {self._name()} have alike ({state.since}), so it is {n} times too "
                "large: use it as it is, op='avg', or comm.varying first if others count it as often"
            )
        if (state.repeated or state.by_rows) and not self._zero(number):
            raise _ContradictionError(
                f"{what} sums what {state.repeated or state.by_rows} made of a value that all ranks of {self._name()} have and "
                f"one that differs, so the former counts {n} times: add it after the sum, or comm.varying first if that is "
                "meant"
            )

    def _check_invariant(self, place: int, state: _ValueState) -> None:
        differ = self.bits.differ(self.input_keys[place])
        if state.variance is _P:
            self._fail(f"{self._where()} takes a value that is the same on all ranks, and gets a partial sum", state)
        if not differ:
            return
        if forward := self.event.transpose_of:
            raise _ContradictionError(
                f"the gradient of what {forward} gave differs between {differ} of {self._name()}: the ranks use the "
                "result in different ways, so put comm.copy_to before that use, which sums their gradients"
            )
        why = f" ({state.since})" if state.variance is _V else ""
        raise _ContradictionError(
            f"{self._where()} takes a value that is the same on all ranks of {self._name()}, and {differ} have different ones"
            f"{why}"
        )

    # -- words ---------------------------------------------------------------------------------------------------------

    def _fail(
        self, text: str, state: _ValueState, advice: str = "sum it first, with comm.reduce_from or comm.all_reduce"
    ) -> None:
        since = f" (partial since {state.since})" if state.since else ""
        raise _ContradictionError(f"{text} along {self._name()}{since}; {advice}")

    def _zero(self, number: int) -> bool:
        """Whether all bytes of a value are zero."""
        if self.together and number in self.program.zeros_differ:
            raise _ApartError
        return self.trace.zero[number]

    def _scalar(self, place: Scalar) -> float:
        if self.together and place in self.program.scalars_differ:
            raise _ApartError
        return self.trace.scalars[place]

    def _differ(self, number: int) -> str:
        return self.bits.differ(self.program.keys[number])

    def _taken(self, number: int) -> str:
        """Two ranks with different bits in an input of the event that is not partial.

        Ranks may pass different ones of several replicated values, such as pieces of one.
        """
        if self.states[number].variance is _P or not self.input_keys:
            return ""
        return self.bits.differ(self.input_keys[self.event.inputs.index(number)])

    def _where(self) -> str:
        event = self.event
        return f"the backward pass of {event.transpose_of}" if event.transpose_of else f"{event.name} at {event.site}"

    def _name(self) -> str:
        return f"group {self.group.name.partition('/')[0]!r} {list(self.group.ranks)}"  # not a channel of it
