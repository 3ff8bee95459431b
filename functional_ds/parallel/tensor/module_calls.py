"""Runs a module's layers on slices, in the library's copy of the module, with collectives around each."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from functional_ds import comm
from functional_ds.base.torch_private import parameters_of
from functional_ds.remat.entered import current_region, owner_of
from functional_ds.step.axes import SUMS_EXPERTS
from functional_ds.step.pass_scope import Pass, current_pass

from .leaf_cuts import heads_of, is_transposed, kv_groups
from .pairs import shared, summed
from .vocabulary import local_rows
from .words import WHOLE, WORDS, Packed, Plan, Word, fits, value_at, word_of

_SLOT = "tensor_parallel input"


@attrs.frozen
class _Way:
    """How one module is called.

    Attributes:
        word: the plan's value for it.
        name: the word itself; "tied" for a layer that the plan does not name, and that shares its weight with one that it does.
        sequence: whether it is in a list of layers whose activations are split along the sequence.
        first: whether it is the first of such a list.
        last: whether it is the last.
        block: whether it is in such a list and has layers that are sliced by outputs, so that it needs the whole sequence.
        gathers: whether layers in it gather their outputs, so that its attributes count the whole.
        local: attributes that count sliced features, and are divided by the ranks.
        rope: of ``"mla_kv_a_proj"``: the features that go to the attention directly.
    """

    word: Word = WHOLE
    name: str = ""
    sequence: bool = False
    first: bool = False
    last: bool = False
    block: bool = False
    gathers: bool = False
    local: tuple[str, ...] = ()
    rope: int = 0


@attrs.define(eq=False)
class TensorCalls:
    """Runs the layers of a module that a plan slices, as ``Pass.calls``.

    It holds this rank's group, because a recomputation by torch's own checkpoint may run in a thread without a pass.

    Attributes:
        plan: by path.
        group: the ranks.
        sequence_dim: the dim of activations that ``"sequence_parallel"`` splits.
        seen: whether a module had such layers.
    """

    plan: Plan
    group: comm.Group
    sequence_dim: int = 1
    seen: bool = False
    _ways: "WeakKeyDictionary[nn.Module, _Way]" = attrs.field(factory=WeakKeyDictionary)

    def chosen(self, module: nn.Module) -> list[str]:
        """The paths of the modules that do not run as usual."""
        paths = []
        named = dict(module.named_modules())
        held = {path: set(map(id, parameters_of(child).values())) - {id(None)} for path, child in named.items()}
        cut = {key for path in named if (value := value_at(self.plan, path)) and word_of(value).cuts for key in held[path]}
        lists = [path for path in named if value_at(self.plan, path) == "sequence_parallel"]
        words = {path: word_of(value) for path in named if (value := value_at(self.plan, path)) is not None}
        blocks = {path.rpartition(".")[0] for path, word in words.items() if word.cuts == "outputs"}
        for path, child in named.items():
            way = self._way(module, path, child, lists)
            way = attrs.evolve(way, block=way.sequence and path in blocks)
            if way.block and path.rpartition(".")[0] in lists:
                raise ValueError(
                    f"plan: {path!r} is a layer of a sequence_parallel list and holds split linears itself: its norms take a "
                    "part of the sequence and its linears the whole; put them into modules of their own, an attention or an MLP"
                )
            beside = [other for other in named if held[other] and other.rpartition(".")[0] == path.rpartition(".")[0]]
            whole = [other for other in beside if other not in words or not words[other].cuts]
            if way.sequence and way.word.after == "gather" and whole:
                raise ValueError(
                    f"plan: {path!r} gathers its outputs inside of a sequence_parallel list, where {whole[0]!r} may act on "
                    "them: the gradients of what is whole there would be summed over ranks that have all of them; leave "
                    "'sequence_parallel' out of this plan"
                )
            if way.name == "moe_tp_experts" and self.group.size > 1 and not self._cuts_within(path, child):
                raise ValueError(
                    f"plan: {path!r} is 'moe_tp_experts', and nothing in it is split: the sum over the {self.group.size} ranks "
                    "would count whole experts as often; split them, or leave this entry out"
                )
            if not way.word.cuts and held[path] & cut:
                way = attrs.evolve(way, name="tied")
            gathers = any(other.rpartition(".")[0] == path and word.after == "gather" for other, word in words.items())
            way = attrs.evolve(way, gathers=gathers)
            if way != _Way(sequence=way.sequence, gathers=gathers) or kv_groups(child) is not None:
                self._ways[child] = way
                paths.append(path)
                self.seen |= bool(way.word.cuts)
        return paths

    def _cuts_within(self, path: str, module: nn.Module) -> bool:
        """Whether the plan slices a leaf of the module."""
        owners = {f"{path}.{name}".rstrip("."): parameters_of(child) for name, child in module.named_modules()}
        paths = [
            leaf_path for owner, leaves in owners.items() for leaf_path in (*(f"{owner}.{leaf}" for leaf in leaves), owner)
        ]
        dims = [key for key, value in self.plan.items() if isinstance(value, int)]
        values = [value_at(self.plan, leaf_path) for leaf_path in paths]
        return any(value is not None and word_of(value).cuts for value in values) or any(
            re.search(key, leaf_path) for key in dims for leaf_path in paths
        )

    def _way(self, root: nn.Module, path: str, module: nn.Module, lists: Sequence[str]) -> _Way:
        value = value_at(self.plan, path)
        word = WHOLE if value is None else word_of(value)
        name = "" if value is None else value.word if isinstance(value, Packed) else value
        inside = [listed for listed in lists if path.startswith(f"{listed}.")]
        above = root.get_submodule(path.rpartition(".")[0])
        rope = getattr(above, "qk_rope_head_dim", 0) if name == "mla_kv_a_proj" else 0
        if name == "mla_kv_a_proj" and not rope:
            raise ValueError(f"plan: {path!r} is 'mla_kv_a_proj', and the module that contains it has no qk_rope_head_dim")
        member = next((listed for listed in lists if path.rpartition(".")[0] == listed), None)
        siblings = [] if member is None else [key for key, _ in root.get_submodule(member).named_children()]
        here = path.rpartition(".")[2]
        local = tuple(
            key.rpartition(".")[2]
            for key, entry in self.plan.items()
            if entry == "local"
            and (not (owner := key.rpartition(".")[0]) or fits(owner, path))
            and key.rpartition(".")[2] in vars(module)
        )
        return _Way(
            word=word,
            name=name,
            sequence=bool(inside),
            first=bool(siblings) and here == siblings[0],
            last=bool(siblings) and here == siblings[-1],
            local=local,
            rope=0 if inside else rope,  # where the block's input was gathered, its adjoint sums all gradients
        )

    def run(self, path: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls a module."""
        module = owner_of(forward)
        if module is None:
            raise TypeError(
                f"tensor_parallel: a module's forward is {forward!r}, not a method of it, so its params cannot be slices"
            )
        way = self._ways[module]
        if way.name == "tied":
            way = attrs.evolve(way, word=_tied(module))
        if way.first:
            args, kwargs = _with_input(path, args, kwargs, lambda x: comm.scatter_to(x, self.group, dim=self._dim(x)))
        if way.block:
            args, kwargs = _with_input(path, args, kwargs, lambda x: comm.all_gather(x, self.group, dim=self._dim(x)))
        with _attributes(module, _local(module, way, self.group.size)):
            output = self._call(path, module, way, forward, args, kwargs)
        return _with_output(output, lambda y: comm.gather_from(y, self.group, dim=self._dim(y))) if way.last else output

    def _call(self, path: str, module: nn.Module, way: _Way, forward: Any, args: Any, kwargs: Any) -> Any:
        if way.word.cuts == "rows" and isinstance(module, nn.Embedding):
            return self._embedding(module, forward, *args, **kwargs)
        if way.word.cuts in ("outputs", "rows", "features"):
            return self._column(module, way, forward, *args, **kwargs)
        if way.word.cuts == "inputs":
            return self._row(path, module, way, forward, *args, **kwargs)
        if way.name == "moe_tp_experts":
            return self._experts(path, module, way, forward, *args, **kwargs)
        if way.name == "moe_identity_expert":
            args, kwargs = _with_input(path, args, kwargs, lambda x: x / self.group.size)
        output = forward(*args, **kwargs)
        if way.name == "all_reduce":
            return _with_output(output, lambda y: self._reduced(y, way))
        if way.rope:
            kept, rope = output.split([output.shape[-1] - way.rope, way.rope], -1)
            return torch.cat([kept, shared(rope, self.group)], -1)
        return output

    # -- the layers ------------------------------------------------------------------------------------------------------

    def _column(self, module: nn.Module, way: _Way, forward: Any, x: Tensor) -> Tensor:
        x = self._entered(x, way) if way.word.before == "copy" else x
        bias, outputs = getattr(module, "bias", None), _declared(module, "outputs")
        if not isinstance(module, nn.Linear) or bias is None or len(bias) == len(_own(module)):
            bias = None  # only a tied layer has a whole weight together with a slice
        y = _product(module, forward, x, biased=bias is None)
        if way.word.after == "gather" and y.shape[-1] != outputs:
            y = comm.gather_from(y, self.group, dim=y.dim() - 1)
            if outputs and y.shape[-1] % outputs == 0:  # one head on several ranks: each once
                heads = self.group.size * outputs // y.shape[-1], y.shape[-1] // outputs, -1
                y = y.unflatten(-1, heads)[..., 0, :].flatten(-2)
        return y if bias is None else y + bias

    def _row(self, path: str, module: nn.Module, way: _Way, forward: Any, x: Tensor) -> Tensor:
        self.leave(current_pass())
        inputs = _own(module).shape[0 if is_transposed(module) else 1]
        if self.group.size > 1 and inputs == _declared(module, "inputs"):  # of other params, which are whole
            return forward(x)  # type: ignore[no-any-return]
        x = comm.scatter_to(x, self.group, dim=x.dim() - 1) if way.word.before == "split" else x
        if x.shape[-1] != inputs:
            raise ValueError(
                f"plan: {path!r} is split by its inputs, {inputs} of {inputs * self.group.size} on each rank, and its input "
                f"has {x.shape[-1]} features: let what makes them be split by its outputs, or use 'rowwise_split_input'"
            )
        y = self._reduced(_product(module, forward, x, biased=False), way)
        bias = getattr(module, "bias", None)
        return y if bias is None else y + bias

    def _embedding(self, module: nn.Embedding, forward: Any, ids: Tensor) -> Tensor:
        rows = _own(module).shape[0]
        if rows == module.num_embeddings:  # of other params, which are whole, or there is one rank
            return forward(ids)  # type: ignore[no-any-return]
        index, inside = local_rows(ids, rows, self.group)
        padding = None if module.padding_idx is None else module.padding_idx - self.group.rank * rows
        with _attributes(module, {"padding_idx": padding if padding is not None and 0 <= padding < rows else None}):
            return summed(forward(index).masked_fill(~inside[..., None], 0), self.group)

    def _experts(self, path: str, module: nn.Module, way: _Way, forward: Any, x: Tensor, *routing: Tensor) -> Tensor:
        """Routing is (index, weights); none if the rows are weighted before, as in Llama 4."""
        after = [attribute for attribute in ("has_bias", "has_post_expert_norm") if getattr(module, attribute, False)]
        if after and self.group.size > 1:
            raise ValueError(
                f"plan: {path!r} is 'moe_tp_experts' and has what is added or normed after the product ({after[0]}), which the "
                f"sum over the {self.group.size} ranks would count {self.group.size} times: leave this entry out and use "
                "fds.moe.register_experts(), or leave the experts whole"
            )
        if way.sequence and not routing:
            raise ValueError(
                f"plan: {path!r} is 'moe_tp_experts' in a sequence_parallel list and takes rows sorted by expert, which "
                "cannot be gathered: leave 'sequence_parallel' out of this plan"
            )
        if way.sequence:
            given = tuple(comm.all_gather(tensor, self.group, dim=0) for tensor in (x, *routing))
        else:
            x, *weights = comm.copy_to((x, *routing[1:]), self.group)
            given = (x, *routing[:1], *weights)
        pass_ = current_pass()
        # A registered experts function need not sum over the same ranks again.
        with nullcontext() if pass_ is None else pass_.holding(SUMS_EXPERTS, True):
            output = forward(*given)
        return self._reduced(output, way)

    # -- what they share --------------------------------------------------------------------------------------------------

    def _dim(self, x: Tensor) -> int:
        """The dim of the sequence; rows of tokens have it first."""
        return self.sequence_dim if x.dim() > 2 else 0

    def _reduced(self, y: Tensor, way: _Way) -> Tensor:
        return comm.reduce_scatter(y, self.group, dim=self._dim(y)) if way.sequence else summed(y, self.group)

    def _entered(self, x: Tensor, way: _Way) -> Tensor:
        """The input of sliced layers. Consecutive layers with one input (queries, keys, values) share its collective.

        Along a split sequence the block has gathered it, and the gather's adjoint sums the gradients.
        """
        if way.sequence:
            return x
        pass_, region = current_pass(), current_region()
        known = {} if pass_ is None else pass_.slots.setdefault(_SLOT, {})
        run = region, region is not None and region.replaying, torch.is_grad_enabled()
        if known.get("x") is not x or known.get("run") != run:
            known.update(x=x, run=run, y=shared(x, self.group))
        return known["y"]  # type: ignore[no-any-return]

    def leave(self, pass_: Pass | None) -> None:
        """Drops what consecutive layers have shared."""
        if pass_ is not None:
            pass_.slots.pop(_SLOT, None)


def _tied(module: nn.Module) -> Word:
    """How to run a layer that the plan does not name, because it shares its weight with one that it does."""
    weight = getattr(module, "weight", None)
    if isinstance(module, nn.Embedding) and isinstance(weight, Tensor):
        by_rows, by_features = weight.shape[0] != module.num_embeddings, weight.shape[1] != module.embedding_dim
        return WORDS["vocab"] if by_rows else WORDS["embedding_colwise"] if by_features else WHOLE
    if isinstance(module, nn.Linear) and isinstance(weight, Tensor):
        by_outputs, by_inputs = weight.shape[0] != module.out_features, weight.shape[1] != module.in_features
        return WORDS["colwise_gather_output"] if by_outputs else WORDS["rowwise_split_input"] if by_inputs else WHOLE
    return WHOLE


def _own(module: nn.Module) -> Tensor:
    weight: Tensor = getattr(module, "weight")  # noqa: B009
    return weight


def _declared(module: nn.Module, what: str) -> int | None:
    """The whole layer's size, as it was built."""
    names = {"outputs": ("out_features", "nf", "embedding_dim"), "inputs": ("in_features", "nx")}[what]
    return next((size for name in names if isinstance(size := getattr(module, name, None), int)), None)


def _product(module: nn.Module, forward: Any, x: Tensor, *, biased: bool = True) -> Tensor:
    if is_transposed(module):  # its own forward asks for the whole layer's size
        return F.linear(x, _own(module).t(), getattr(module, "bias", None) if biased else None)
    if biased or getattr(module, "bias", None) is None:
        return forward(x)  # type: ignore[no-any-return]
    with _attributes(parameters_of(module), {"bias": None}):
        return forward(x)  # type: ignore[no-any-return]


def _local(module: nn.Module, way: _Way, n: int) -> dict[str, int]:
    """The attributes of a module that count sliced features, with this rank's values."""
    attributes = {name: vars(module)[name] // n for name in way.local}
    groups = kv_groups(module)
    if groups is not None and n > 1 and not way.gathers:
        heads = heads_of(module)
        kv = heads // groups
        if heads % n == 0 and kv % n and _cut(module):  # fewer key-value heads than ranks
            attributes["num_key_value_groups"] = heads // n
    return attributes


def _cut(attention: nn.Module) -> bool:
    """Whether an attention's queries are a slice."""
    linears = [linear for linear in attention.modules() if isinstance(linear, nn.Linear)]
    return any(_own(linear).shape[0] != linear.out_features for linear in linears)


@contextmanager
def _attributes(owner: Any, changes: Mapping[str, Any]) -> Iterator[None]:
    """A context in which the library's copy of a module, or its dict of parameters, has other entries."""
    into: dict[str, Any] = owner if isinstance(owner, dict) else vars(owner)
    before = {name: into[name] for name in changes}
    into.update(changes)
    try:
        yield
    finally:
        into.update(before)


def _with_input(path: str, args: Any, kwargs: Any, change: Callable[[Tensor], Tensor]) -> tuple[Any, Any]:
    """The arguments of the module at a path, the first tensor of which is changed."""
    if args and isinstance(args[0], Tensor):
        return (change(args[0]), *args[1:]), kwargs
    name = next((name for name, value in kwargs.items() if isinstance(value, Tensor) and value.is_floating_point()), None)
    if name is None:
        raise ValueError(f"plan: {path!r} was called without a tensor of floats; its input is what ranks take their parts of")
    return args, {**kwargs, name: change(kwargs[name])}


def _with_output(output: Any, change: Callable[[Tensor], Tensor]) -> Any:
    return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)
