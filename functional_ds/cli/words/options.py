"""Options of the command line as values: sizes of bytes, lists of numbers, meshes."""

import math
from collections.abc import Collection
from pathlib import Path

from pydantic import ByteSize, TypeAdapter

from functional_ds.sharding.path_patterns import nearest

from .errors_in_one_line import CommandError

_BYTES = TypeAdapter(ByteSize)
_AXES = ("dp", "pp", "sp", "tp", "ep")


def existing(name: str, *, option: str) -> Path:
    """The file of this name.

    Raises:
        CommandError: it is not there, or is not a file.
    """
    path = Path(name)
    if not path.is_file():
        raise CommandError(f"{option}: there is no file {name}")
    return path


def size(text: str, *, option: str) -> int:
    """Bytes: ``80GB``, ``79.1 GiB``, ``1000``.

    >>> size("80GB", option="--limit"), size("1 GiB", option="--limit")
    (80000000000, 1073741824)
    """
    try:
        count = int(_BYTES.validate_python(text.strip()))
    except ValueError:
        raise CommandError(f"{option}: {text!r} is not a number of bytes, such as 80GB or 79.1GiB") from None
    if count < 1:
        raise CommandError(f"{option}: {text!r} should be above 0")
    return count


def numbers(text: str, *, option: str, low: int = 1, high: int | None = None) -> list[int]:
    """Whole numbers with commas between them, each within bounds.

    >>> numbers("0,2,3", option="--zero", low=0, high=3)
    [0, 2, 3]
    """
    try:
        values = [int(word) for word in text.split(",")]
    except ValueError:
        raise CommandError(f"{option}: {text!r} should be whole numbers with commas between them") from None
    wrong = [value for value in values if value < low or (high is not None and value > high)]
    if wrong:
        raise CommandError(f"{option}: {wrong[0]} should be from {low} {'on' if high is None else f'to {high}'}")
    return list(dict.fromkeys(values))


def choices(text: str, known: Collection[str], *, option: str) -> list[str]:
    """Words with commas between them, each of which is known.

    Raises:
        CommandError: one is not.
    """
    words = text.split(",")
    wrong = [word for word in words if word not in known]
    if wrong:
        raise CommandError(f"{option}: {wrong[0]!r} is not one of {', '.join(known)}; {nearest(wrong[0], known)}")
    return list(dict.fromkeys(words))


def mesh_sizes(text: str) -> dict[str, int]:
    """The ranks of each axis in a mesh ``dp=8,tp=2``; a plain number is dp's.

    >>> mesh_sizes("dp=8,tp=2"), mesh_sizes("4")["dp"]
    ({'dp': 8, 'pp': 1, 'sp': 1, 'tp': 2, 'ep': 1}, 4)

    Raises:
        CommandError: another axis, a size that is not a positive number, or an axis with two sizes.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, equals, count = part.partition("=")
        name, count = (name, count) if equals else ("dp", part)
        if not count.isdigit() or not int(count):
            raise CommandError(f"--mesh: {part!r} should be an axis and its size, such as dp=8")
        if name not in _AXES:
            raise CommandError(f"--mesh: the axis {name!r} is not one of {', '.join(_AXES)}")
        if name in sizes:
            raise CommandError(f"--mesh: the axis {name!r} has two sizes, {sizes[name]} and {count}; give one")
        sizes[name] = int(count)
    if math.prod(sizes.values()) > 2**20:
        raise CommandError(f"--mesh: {text!r} has more than {2**20:,} ranks")
    return {name: sizes.get(name, 1) for name in _AXES}
