"""Which updates do what, where not all do the same: data."""

import sys

import attrs

__all__ = ["ALWAYS", "Rounds"]


@attrs.frozen
class Rounds:
    """Some of the updates 0, 1, 2, ..., as stretches of equal distances.

    Attributes:
        stretches: one after the other, none reaching into the next.

    >>> rounds = Rounds((range(3), range(3, 9, 2)))
    >>> [t for t in range(12) if t in rounds], rounds.before(4)
    ([0, 1, 2, 3, 5, 7], 4)
    """

    stretches: tuple[range, ...]

    def __contains__(self, update: int) -> bool:
        return any(update in stretch for stretch in self.stretches)

    def before(self, update: int) -> int:
        """How many of them come before an update."""
        clipped = (range(r.start, min(update, r.stop), r.step) for r in self.stretches)
        return sum(len(stretch) for stretch in clipped)

    @staticmethod
    def sparser(each: int, stop: int) -> "Rounds":
        """``each`` in a row, then as many at twice the distance, and so on, before ``stop``.

        >>> Rounds.sparser(2, 12).stretches
        (range(0, 2), range(2, 6, 2), range(6, 12, 4))
        """
        stretches, start, distance = [], 0, 1
        while start < stop:
            end = min(start + each * distance, stop)
            stretches.append(range(start, end, distance))
            start, distance = end, 2 * distance
        return Rounds(tuple(stretches))

    @staticmethod
    def apart(start: int, each: int, longest: int) -> "Rounds":
        """All up to ``start``; then the last of every one, two, four, ... up to ``longest``, for ``each`` updates of these.

        >>> Rounds.apart(3, 4, 4).stretches[:3]
        (range(0, 7), range(8, 11, 2), range(14, 9223372036854775807, 4))
        """
        stretches, begin, distance = [range(start + each)], start + each, 2
        while distance < longest:
            stretches.append(range(begin + distance - 1, begin + each, distance))
            begin, distance = begin + each, 2 * distance
        return Rounds((*stretches, range(begin + longest - 1, sys.maxsize, longest)))


ALWAYS = Rounds((range(sys.maxsize),))
