"""Module buffers within one pass: copies of those that may be written, and which were."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from functional_ds.base import tree
from functional_ds.base.torch_private import version_of

from .buffers import AttributePath, Buffers, HasBuffers, OtherAttribute, OtherAttributes, plain_copy

_SMALL = 1 << 16  # bytes of a buffer that each pass copies without asking whether it is ever written


@attrs.define(eq=False)
class ModuleValues:
    """The buffers of one module within a pass.

    Attributes:
        values: its buffers by name; those that may be written are copies.
        attributes: tensors and numbers that passes have set on it.
        others: what else they have set, which no tree can hold.
        same: the paths in these at which there is one object, each with the first; None before the first pass of a state.
        looks: whether to compare bits, because it is not known yet what the module writes.
        complete: whether it includes the buffers that a state omits.
    """

    values: dict[str, Any]
    attributes: dict[str, Any]
    looks: bool
    others: dict[str, OtherAttribute] = attrs.field(factory=dict, init=False)
    same: Mapping[AttributePath, AttributePath] | None = attrs.field(default=None, init=False)
    complete: bool = attrs.field(default=False, init=False)
    _before: dict[str, Any] = attrs.field(factory=dict)  # as the state has them
    _versions: dict[str, int] = attrs.field(factory=dict)

    @staticmethod
    def of(values: Mapping[str, Any], attributes: Mapping[str, Any], written: Collection[str] | None) -> "ModuleValues":
        """Copies of what may be written: small buffers, those in ``written``, or all where that is None."""
        buffers = {
            name: plain_copy(b) if written is None or name in written or _is_small(b) else b for name, b in values.items()
        }
        return ModuleValues(
            buffers,
            dict(attributes),
            written is None,
            dict(values),
            {n: version_of(b) for n, b in buffers.items() if b is not None},
        )

    def add(self, name: str, buffer: Tensor) -> None:
        """One more buffer, if there is none of this name."""
        if name not in self.values:
            self.values[name] = self._given[name] = plain_copy(buffer) if _is_small(buffer) else buffer
            self._before[name], self._versions[name] = buffer, version_of(self.values[name])

    def is_assigned(self, name: str) -> bool:
        """Whether the pass has replaced a buffer by another tensor."""
        return self.values[name] is not self._given.get(name)

    def written(self) -> frozenset[str]:
        """The buffers that changed; with ``looks``, also by their bits, because kernels of norms leave no other trace."""
        changed = {n for n, b in self.values.items() if n not in self._versions and b is not None}
        changed |= {n for n in self._versions if self._is_other(n)}
        if self.looks:
            rest = [n for n in self._versions if n not in changed and self.values[n] is not self._before[n]]
            changed |= {n for n in rest if not bit_equal(self.values[n], self._before[n])}
        return frozenset(changed)

    def set_anew(self, before: Mapping[str, Any]) -> frozenset[str]:
        """The attributes that a state did not have before; with ``looks``, also those with other values."""
        return frozenset(n for n, x in self.attributes.items() if n not in before or (self.looks and not _same(x, before[n])))

    def _is_other(self, name: str) -> bool:
        now = self.values[name]
        return now is not self._given[name] or version_of(now) != self._versions[name]

    _given: dict[str, Any] = attrs.field(init=False, default=attrs.Factory(lambda self: dict(self.values), takes_self=True))

    def spoilt(self) -> str | None:
        """A buffer of the state itself that was written in place, because it was not known to be written.

        Kernels of norms leave no other trace than a sibling that was written.
        """
        shared = {n for n in self._versions if self._given[n] is self._before[n] and self._before[n] is not None}
        changed = (n for n in shared if version_of(self._before[n]) != self._versions[n])
        beside = shared & _with_siblings(self.written(), shared) if shared else frozenset()
        return next(changed, None) or next((n for n in sorted(beside) if self.values[n] is self._before[n]), None)


@attrs.define(eq=False)
class BufferScope:
    """The modules' buffers within one forward pass and its backward.

    Attributes:
        buffers: those of the state that the pass was given.
        keeps: whether writes are kept; an evaluation drops them.
    """

    buffers: Buffers | None
    keeps: bool = True
    _held: dict[str, ModuleValues] = attrs.field(factory=dict)

    def of(self, module: HasBuffers) -> ModuleValues | None:
        """A module's buffers in this pass; None if the state does not have the module."""
        if self.buffers is None or module not in self.buffers.known.keys:
            return None
        known = self.buffers.known
        key = known.keys[module]
        if key not in self._held:
            self.buffers.check_changes(module)
            if self.keeps and known.modes.get(key) != module.modes:  # others of its modules may write now
                known.written.pop(key, None)
                known.modes[key] = module.modes
            self._held[key] = ModuleValues.of(self.buffers.values[key], self.buffers.attributes[key], known.written.get(key))
            self._held[key].others.update(self.buffers.others.by_key.get(key, {}))
            self._held[key].same = self.buffers.others.same.get(key)
        return self._held[key]

    def collect(self) -> Buffers | None:
        """The buffers after the pass."""
        if self.buffers is None or not self.keeps:
            return self.buffers
        values, attributes, known = dict(self.buffers.values), dict(self.buffers.attributes), self.buffers.known
        others = dict(self.buffers.others.by_key)
        for key, held in self._held.items():
            spoilt = held.spoilt()
            if spoilt is not None:
                raise RuntimeError(
                    f"the buffer {spoilt!r} was written in place, and was not in the first step; let the module assign a new "
                    f"tensor instead (self.{spoilt.rpartition('.')[2]} = ...), so that the state before stays as it was"
                )
            written = held.written()
            known.written[key] = known.written.get(key, frozenset()) | _with_siblings(written, held.values)
            known.sets[key] = known.sets.get(key, frozenset()) | held.set_anew(attributes[key])
            kept = values[key].keys() | known.written[key]
            values[key], attributes[key] = {n: b for n, b in held.values.items() if n in kept}, held.attributes
            others[key] = held.others
        versions = {key: module.version for module, key in known.keys.items() if key in self._held}
        before = self.buffers.others
        rest = OtherAttributes(
            {key: held for key, held in others.items() if held},
            {**before.versions, **versions},
            {**before.same, **{key: held.same for key, held in self._held.items()}},
        )
        return tree.replace(self.buffers, values=values, attributes=attributes, others=rest)


def _with_siblings(written: Collection[str], values: Iterable[str]) -> frozenset[str]:
    """The written buffers and all others of their modules: a write may leave the same bits."""
    owners = {name.rpartition(".")[0] for name in written}
    return frozenset(name for name in values if name in written or name.rpartition(".")[0] in owners)


def _same(one: Any, other: Any) -> bool:
    """Whether structures have equal numbers and bits."""
    if tree.structure(one) != tree.structure(other):
        return False
    pairs = zip(tree.leaves(one), tree.leaves(other), strict=True)
    return all(bit_equal(x, y) if isinstance(x, Tensor) and isinstance(y, Tensor) else x is y for x, y in pairs)


def _is_small(buffer: Tensor | None) -> bool:
    return buffer is None or buffer.layout != torch.strided or buffer.nbytes <= _SMALL


def bit_equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same bits."""
    if (one.shape, one.dtype, one.device) != (other.shape, other.dtype, other.device):
        return False
    if one.layout != torch.strided or other.layout != torch.strided:
        return one.layout == other.layout and bit_equal(one.to_dense(), other.to_dense())
    return one.is_meta or torch.equal(*(x.contiguous().reshape(-1).view(torch.uint8) for x in (one, other)))
