"""Checksums of values on the ranks of a group."""

from collections.abc import Sequence

from .op_trace import OpTrace
from .programs import TracedProgram


class GroupBits:
    """The checksums of values on the ranks of a group, by key.

    Attributes:
        parts: the ranks that ran one program, and their checksums by key.
        alike: the keys whose checksums are equal on all ranks.
    """

    def __init__(self, ranks: Sequence[int], programs: Sequence[TracedProgram], traces: Sequence[OpTrace]) -> None:
        self.n_ranks = len(ranks)
        self.parts: list[tuple[list[int], dict[int, tuple[int | None, ...]]]] = []
        for program in dict.fromkeys(programs[rank] for rank in ranks):
            members = [rank for rank in ranks if programs[rank] is program]
            rows = list(zip(*[traces[rank].bits for rank in members], strict=True))
            by_key = dict(zip(program.keys, rows, strict=True))
            for event, keys in zip(program.trace.events, program.input_keys, strict=True):
                by_key.update({key: rows[number] for key, number in zip(keys, event.inputs, strict=False)})
            self.parts.append((members, by_key))
        (_, first), *others = self.parts
        self.alike = {
            key
            for key, row in first.items()
            if row.count(row[0]) == len(row)
            and all(key in rows and rows[key].count(row[0]) == len(rows[key]) for _, rows in others)
        }

    def _pairs(self, key: int) -> list[tuple[int, int]]:
        if key in self.alike:
            return []
        ranks = [(rank, bits) for members, rows in self.parts for rank, bits in zip(members, rows.get(key, ()), strict=False)]
        return sorted([(rank, bits) for rank, bits in ranks if bits is not None])

    def differ(self, key: int) -> str:
        """Two ranks with different bits, as text; empty if there are none."""
        pairs = self._pairs(key)
        for rank, bits in pairs:
            if bits != pairs[0][1]:
                return f"ranks {pairs[0][0]} and {rank}"
        return ""

    def some(self, key: int) -> list[int]:
        """The ranks that have bits for the key, if not all have."""
        pairs = self._pairs(key)
        return [rank for rank, _ in pairs] if len(pairs) < self.n_ranks else []
