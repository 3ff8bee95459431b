"""The attributes that a user sets on a module whose copies run: each copy takes them over before it runs again."""

import itertools
from collections.abc import Sequence
from contextlib import suppress
from operator import is_
from typing import Any

from torch import nn

from .attributes import ABSENT, put_attribute

__all__ = ["AttributeChanges"]


class AttributeChanges:
    """What has been set on a module and the modules inside of it since it was made.

    Attributes:
        seen: each module's attributes when they were last looked at.
    """

    def __init__(self, module: nn.Module) -> None:
        self._owners = [*module.modules()]
        self._watched = [vars(each) for each in self._owners]
        self.seen = [dict(each) for each in self._watched]
        self._values = [*itertools.chain.from_iterable(map(dict.values, self._watched))]
        self._made: list[tuple[int, str, Any]] = []  # the module's place, attribute, value

    @property
    def modes(self) -> tuple[bool, ...]:
        """Which of the modules are in training mode."""
        return tuple([each.training for each in self._owners])

    def __len__(self) -> int:
        """How many there are so far."""
        return len(self._made)

    def since(self, version: int) -> list[tuple[int, str]]:
        """The places of modules and the attributes of all but the first ``version`` changes."""
        return [(place, key) for place, key, _ in self._made[version:]]

    def notice(self) -> None:
        """Looks for what has been set since the last call."""
        values = [*itertools.chain.from_iterable(map(dict.values, self._watched))]
        with suppress(RuntimeError):  # tensors of many elements are compared only where they are not the same
            if values == self._values:  # quick: what is the same object is equal
                return
        self._values = values
        for place, (now, before) in enumerate(zip(self._watched, self.seen, strict=True)):
            if len(now) == len(before) and all(map(is_, now.values(), before.values())):
                continue
            for key in {**now, **before}:
                if now.get(key, ABSENT) is not before.get(key, ABSENT):
                    self._made.append((place, key, now.get(key, ABSENT)))
            self.seen[place] = dict(now)

    def bring(self, owners: Sequence[nn.Module], version: int) -> int:
        """Makes all but the first ``version`` changes in a copy, too, whose modules are in the same order; their number."""
        for place, key, value in self._made[version:]:
            put_attribute(owners[place].__dict__, key, value)
        return len(self._made)
