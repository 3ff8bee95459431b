"""Mixed-precision training: the dtypes of storage, computation, updates and reductions, and what happens on overflow."""

import math
import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from itertools import accumulate
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor, nn

from functional_ds.base import tree
from functional_ds.base.marks import is_trainable, like_marked, mark_stored, module_of, stored_in
from functional_ds.base.weighted import Weighted, weight_dtype
from functional_ds.step.compose import wrap
from functional_ds.step.over_ranks.mesh_axes import AxisRole
from functional_ds.step.pass_scope import current_pass
from functional_ds.step.phase_signatures import Metrics
from functional_ds.step.phases import Trait, outermost
from functional_ds.step.state.slots import Role
from functional_ds.step.state.state import State
from functional_ds.step.step import Step, Transform

from .kept_states import KeptStates, rounded, rounds
from .loss_scale import DynamicScale, LossScale, NoScale, StaticScale
from .policy import Policy
from .stochastic_rounding import Draws

_SLOT = "mixed_precision"


def mixed_precision(
    policy: str | Policy = "bf16",
    loss_scale: LossScale | float | None = None,
    *,
    autocast: bool = False,
    states: torch.dtype | None = None,
    stochastic: bool = False,
) -> Transform:
    """Mixed-precision training: computes in half precision and updates fp32 master weights.

    With the policy ``"bf16"`` the stored params, and so the loss, the gathers and the gradients, are bf16; fp32 masters are
    stored, and sharded, like the optimizer's state. With Adam that is 2 + 2 + 12 bytes a parameter for params, gradients and
    optimizer. Floating leaves of a batch are cast; the loss is returned in fp32, and ``step.params`` returns the
    masters. ``"fp16"`` is the same with fp16 and a loss scale.

    A loss scale multiplies both the loss and its weight, so gradients need no unscaling. If a gradient is not finite
    on any rank, all ranks skip the step: params, optimizer state and step count stay unchanged, and the metric
    ``skipped`` is 1.0. The metric ``loss_scale`` is the scale that the step used. The host does not wait for the device.

    Put it before ``zero``. Integer and complex leaves stay as they are, as do frozen leaves in the stored dtype. Buffers keep
    their dtype, and batch-norm weights stay fp32, unless an exception names them.

    Args:
        policy: a ``Policy``, or text for ``Policy.parse``.
        loss_scale: a loss scale, or a number for a static one; by default ``DynamicScale()`` for fp16, else none. A scale that
            is not a power of two gives a warning, since it rounds gradients.
        autocast: runs the loss in ``torch.autocast``, which chooses the dtype of each operation; batches are then not cast.
        states: the dtype of the optimizer's state between updates, scalars excepted; None for the optimizer's own. Updates
            compute in fp32.
        stochastic: rounds to bf16 stochastically, for params without masters and for ``states``, so that small updates are not
            lost. Draws depend on seed, step and place in the tree.

    Raises:
        ValueError: an unknown policy; autocast to fp32; ``states`` neither bf16 nor fp32; ``stochastic`` where nothing is
            rounded to bf16, or after ``zero``; a second ``mixed_precision``.
        TypeError: ``policy`` or ``loss_scale`` has another type.

    >>> import functional_ds as fds
    >>> step = mixed_precision("fp16", 8.0)(fds.train_step(lambda params, x: (params["w"] * x).sum(), fds.sgd(0.5)))
    >>> state, metrics = step(step.init({"w": torch.ones(2)}), torch.tensor([1.0, 60000.0]))
    >>> metrics["skipped"].item(), step.params(state)["w"].tolist(), state.step.item()
    (1.0, [1.0, 1.0], 0)
    """
    chosen = Policy.parse(policy) if isinstance(policy, str) else policy
    if not isinstance(chosen, Policy):
        raise TypeError(f"policy={policy!r} is neither a Policy nor a string")
    half = chosen.compute in (torch.float16, torch.bfloat16)
    if autocast and not half:
        raise ValueError(f"autocast=True: the policy {chosen} computes in {chosen.compute}; use compute=bf16 or compute=f16")
    if states not in (None, torch.float32, torch.bfloat16):
        raise ValueError(f"states={states}: optimizer states can be torch.bfloat16 or torch.float32")
    rounds = states == torch.bfloat16 or (chosen.compute == torch.bfloat16 and not chosen.masters)
    if stochastic and not rounds:
        raise ValueError(f"stochastic=True: nothing is rounded to bf16 with the policy {chosen} and states={states}")
    return _MixedPrecision(chosen, _scale(loss_scale, chosen), autocast, KeptStates(states), stochastic).transform()


def _scale(given: Any, policy: Policy) -> LossScale:
    if given is None:
        return DynamicScale() if policy.compute == torch.float16 else NoScale()
    scale = StaticScale(float(given)) if isinstance(given, int | float) else given
    if not all(hasattr(scale, name) for name in ("scale", "unscale", "adjust")):
        raise TypeError(
            f"loss_scale={given!r} is not a loss scale; use DynamicScale(...), StaticScale(...), NoScale() or 2.0**k"
        )
    for name in ("value", "initial", "factor", "minimum", "maximum"):
        number = getattr(scale, name, None)
        if isinstance(number, int | float) and math.frexp(number)[0] != 0.5:
            warnings.warn(f"loss_scale: {name}={number} is not a power of two, so scaling rounds gradients", stacklevel=3)
    return scale


def _wide_norm(leaf: Tensor) -> Tensor:
    """The leaf, marked to stay fp32 if it belongs to a batch norm, whose kernels need weights in their statistics' dtype."""
    module = None if stored_in(leaf) is not None else module_of(leaf)
    if module is None:
        return leaf
    apply, name = module
    owner = apply.module.get_submodule(name.rpartition(".")[0])
    norms = isinstance(owner, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm))
    return mark_stored(leaf, torch.float32) if norms and owner.running_mean is not None else leaf


@tree.record
class Mixed:
    """mixed_precision's slot in the state.

    Attributes:
        masters: for each stored leaf the param as the optimizer has it; None where the stored leaf is as wide.
        loss_scale: the factor of the next loss.
        stored: the stored params and optimizer state, while ``scatter`` has replaced them by wide ones.
    """

    masters: list[Tensor | None]
    loss_scale: LossScale
    stored: tuple[list[Tensor], Any] | None = None

    roles: ClassVar[Mapping[str, Role]] = {"masters": Role.MASTER, "loss_scale": Role.SETTING}


@attrs.frozen(eq=False)
class _MixedPrecision:
    policy: Policy
    scale: LossScale
    autocast: bool
    states: KeptStates
    stochastic: bool

    def transform(self) -> Transform:
        """The phases that mixed precision wraps."""
        return wrap(
            str(self),
            check=self.check,
            slot=_SLOT,
            traits=[Trait.CASTS, Trait.COPIES_PARAMS, Trait.HEEDS_SKIPS],
            prepare=self.prepare,
            init=self.init,
            loss=self.loss,
            forward=self.forward,
            comm_dtype=self.comm_dtype,
            scatter=self.scatter,
            reduce=outermost(self.reduce),
            update=self.update,
            publish=self.publish,
            params=self.params,
        )

    def check(self, step: Step) -> None:
        """Raises an error for a step that casts or offloads already; warns if its shards would not include the masters."""
        if step.has(Trait.CASTS):
            raise ValueError(f"{self}: this step has a mixed precision already ({step})")
        if self.stochastic and step.wraps("view"):
            raise ValueError(f"{self}: stochastic rounding needs the tensors that the optimizer gets; put it before zero")
        sharded = step.has(Trait.SHARDS_STATE)
        if sharded:
            warnings.warn(
                f"{self}: put it before {sharded}, compose({self}, {sharded}); after it, every rank stores masters of all "
                "params, and not of its shards alone",
                stacklevel=3,
            )
        offloading = step.has(Trait.OFFLOADS)
        if offloading:
            raise ValueError(f"{self}: put it before {offloading}, so that the masters are offloaded, too ({step})")

    def __str__(self) -> str:
        options = "".join(f", {name}={value}" for name, value in self._options() if value)
        return f"mixed_precision({str(self.policy)!r}{options})"

    def _options(self) -> list[tuple[str, Any]]:
        scale = None if isinstance(self.scale, NoScale) else self.scale
        states = self.states.dtype
        return [("loss_scale", scale), ("autocast", self.autocast), ("states", states), ("stochastic", self.stochastic)]

    # -- what is stored ------------------------------------------------------------------------------------------------

    def prepare(self, inner: Any, step: Step, params: Any) -> Any:
        """Marks the exceptions while leaves still have paths."""
        marked = self.policy.mark(params)
        return inner(step, tree.map(_wide_norm, marked) if self.policy.compute.itemsize == 2 else marked)

    def init(self, inner: Any, step: Step, params: Any) -> State:
        """The optimizer's state for wide params, which become the masters or are dropped."""
        state: State = inner(step, tree.map(self._widen, params))
        leaves, spec = tree.flatten(state.params)
        stored = [self._store(leaf) for leaf in leaves]
        keeps = [self.policy.masters and new.dtype != old.dtype for old, new in zip(leaves, stored, strict=True)]
        masters = [mark_stored(leaf, None) if kept else None for leaf, kept in zip(leaves, keeps, strict=True)]
        scale = tree.map(lambda x: x.to(state.step.device), self.scale)
        kept = tree.map(self.states.narrow, state.optimizer)
        state = tree.replace(state, params=tree.unflatten(spec, stored), optimizer=kept)
        return state.put(mixed_precision=Mixed(masters, scale))

    def params(self, inner: Any, step: Step, state: State) -> Any:
        """The masters."""
        if _slot(state).stored is None:  # else they are in place, perhaps moved
            state = tree.replace(state, params=_with(state.params, _slot(state).masters))
        return inner(step, state)

    def _stored_dtype(self, leaf: Tensor) -> torch.dtype:
        return stored_in(leaf) or self.policy.compute

    def _widen(self, leaf: Tensor) -> Tensor:
        """The leaf in the optimizer's dtype."""
        stored = self._stored_dtype(leaf)
        if not leaf.is_floating_point() or not (is_trainable(leaf) or leaf.dtype != stored):
            return leaf
        wide = torch.promote_types(leaf.dtype, self.policy.params) if self.policy.masters else stored
        return like_marked(leaf.detach().to(torch.promote_types(wide, torch.float32)), leaf)

    def _store(self, leaf: Tensor) -> Tensor:
        """The leaf in the loss's dtype, without the mark."""
        dtype = self._stored_dtype(leaf) if leaf.is_floating_point() else leaf.dtype
        return mark_stored(like_marked(leaf.detach().to(dtype), leaf), None)

    # -- what the loss sees --------------------------------------------------------------------------------------------

    def loss(self, inner: Any, step: Step, state: State, params: Any, batch: Any) -> tuple[Weighted, dict[str, Weighted]]:
        """The inner loss, scaled if it is differentiated."""
        loss, further = inner(step, state, params, batch)
        pass_, parts = current_pass(), 1
        if pass_ is not None and pass_.trains and pass_.slots["mean"] and self.policy.compute == torch.float16:
            parts = 1 if step.has(AxisRole.STAGES) else step.batch_shard(state)[1] * step.micro_batches(state)
        loss, metrics = self._share(loss, parts), {name: self._output(metric) for name, metric in further.items()}
        if torch.is_grad_enabled():
            scale = _slot(state).loss_scale
            loss = scale.unscale(tree.replace(loss, sum=scale.scale(loss.sum)))
        return loss, metrics

    def forward(self, inner: Any, step: Step, state: State, function: Any, batch: Any) -> Any:
        """The function on a cast batch, or under autocast."""
        with torch.autocast(state.step.device.type, self.policy.compute) if self.autocast else nullcontext():
            return inner(step, state, function, batch if self.autocast else tree.map(self._cast, batch))

    def _cast(self, leaf: Any) -> Any:
        smooth = isinstance(leaf, Tensor) and leaf.is_floating_point()
        if smooth and leaf.requires_grad:  # computed by another step's functions, whose params the loss may train
            return leaf.to(self.policy.compute)
        return like_marked(leaf.detach().to(self.policy.compute), leaf) if smooth else leaf

    def _share(self, value: Weighted, parts: int) -> Weighted:
        """A micro-batch's part of the mean over the whole batch.

        Its fp16 gradients equal a single device's, so they overflow where those do, and so do their sums.
        """
        loss = self._output(value)
        if parts == 1:
            return loss
        return Weighted(_Share.apply(value.sum, parts, loss.sum.dtype), loss.weight / parts)

    def _output(self, mean: Weighted) -> Weighted:
        output = self.policy.output
        return Weighted(mean.sum.to(output), mean.weight.to(weight_dtype(output)))  # in bf16, 257 tokens would be 256

    # -- what moves ----------------------------------------------------------------------------------------------------

    def comm_dtype(self, inner: Any, step: Step, state: State, dtype: torch.dtype) -> torch.dtype:
        """Maps ``compute`` to ``reduce``; wider sums stay as they are."""
        return inner(step, state, self.policy.reduce if dtype == self.policy.compute else dtype)  # type: ignore[no-any-return]

    def reduce(self, inner: Any, step: Step, state: State, grads: Weighted) -> tuple[State, Weighted]:
        """The inner sums, and whether they are finite: computed here, so that every transform's update knows of a skip."""
        state, grads = inner(step, state, grads)
        if isinstance(_slot(state).loss_scale, NoScale):
            return state, grads
        finite, skip = self._asked(step, state, grads)
        return tree.replace(state, finite=finite, skip=skip), grads

    def _asked(self, step: Step, state: State, grads: Weighted) -> tuple[Tensor, Tensor]:
        """Whether these gradients, and earlier ones, are finite, and whether the step is skipped."""
        finite = step.finite(state, grads.sum).to(state.step.device)
        finite = finite if state.finite is None else finite & state.finite
        skip = finite.logical_not()
        return finite, skip if state.skip is None else skip | state.skip

    def update(self, inner: Any, step: Step, state: State, grads: Weighted) -> tuple[State, Metrics]:
        """The inner update, skipped if gradients are not finite."""
        scale = _slot(state).loss_scale
        if isinstance(scale, NoScale):
            return self._move(inner, step, state, grads)
        finite, skip = state.finite, state.skip
        if finite is None or skip is None or step.wraps("update", without=Trait.HEEDS_SKIPS):  # which may have made others
            finite, skip = self._asked(step, state, grads)
        state, metrics = self._move(inner, step, tree.replace(state, finite=finite, skip=skip), grads)
        state = state.put(mixed_precision=tree.replace(_slot(state), loss_scale=scale.adjust(finite)))
        return state, {**metrics, "loss_scale": torch.as_tensor(scale.now), "skipped": skip.float()}

    def _move(self, inner: Any, step: Step, state: State, grads: Weighted) -> tuple[State, Metrics]:
        """The inner update of wide values, rounded into the stored ones."""
        state = self._widened(state)
        key = state.key if self.stochastic else None
        draws = None if key is None else Draws.of(step.leaf_map(state), key, state.step)
        state, metrics = inner(step, state, grads)
        return self._narrowed(state, draws), metrics

    def scatter(self, inner: Any, step: Step, state: State) -> State:
        """Replaces the stored params by the masters."""
        return inner(step, self._widened(state))  # type: ignore[no-any-return]

    def publish(self, inner: Any, step: Step, state: State) -> State:
        """The stored params, rounded to nearest, in new memory."""
        state = inner(step, state)
        slot = _slot(state)
        if slot.stored is None:
            raise ValueError(f"{self}: publish takes a state that scatter gave, and this one has its stored params in place")
        fresh = tree.replace(slot, stored=tree.map(lambda x: torch.empty_like(x) if isinstance(x, Tensor) else x, slot.stored))
        return self._narrowed(state.put(mixed_precision=fresh), None)

    def _widened(self, state: State) -> State:
        """The state as the optimizer sees it; the stored values move to the slot."""
        slot, (stored, spec) = state.slots.get(_SLOT), tree.flatten(state.params)
        if slot is None or slot.stored is not None:  # in an inner ``init`` or ``update``, where they are wide already
            return state
        wide = [_wide(leaf) if master is None else master for leaf, master in zip(stored, slot.masters, strict=True)]
        slot = tree.replace(slot, stored=(stored, state.optimizer))
        widened = tree.replace(state, params=tree.unflatten(spec, wide), optimizer=self.states.wide(state.optimizer))
        return widened.put(mixed_precision=slot)

    def _narrowed(self, state: State, draws: Draws | None) -> State:
        """The inverse, in the memory of the stored values."""
        slot, (moved, spec) = _slot(state), tree.flatten(state.params)
        stored, kept = slot.stored or (moved, state.optimizer)
        masters = [None if master is None else new for master, new in zip(slot.masters, moved, strict=True)]
        uniforms: list[Tensor | None] = [None] * len(stored)
        if draws:
            uniforms = [
                draws.for_param(place, new) if master is None and rounds(old, new) else None
                for old, new, master, place in zip(stored, moved, masters, _trained_places(stored), strict=True)
            ]
        params = tree.unflatten(spec, rounded(stored, moved, uniforms))
        state = tree.replace(state, params=params, optimizer=self.states.kept(kept, state.optimizer, draws))
        return state.put(mixed_precision=tree.replace(slot, masters=masters, stored=None))


class _Share(torch.autograd.Function):
    """``loss.to(dtype) / parts``. Its backward pass casts first: a scale that the loss's dtype cannot represent is infinite."""

    generate_vmap_rule = True  # losses of single rows, as in DP-SGD

    @staticmethod
    def forward(loss: Tensor, parts: int, dtype: torch.dtype) -> Tensor:
        return loss.to(dtype) / parts

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        loss, ctx.parts, _ = inputs
        ctx.dtype = loss.dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.to(ctx.dtype) / ctx.parts, None, None


def _slot(state: State) -> Mixed:
    slot: Mixed = state.slots[_SLOT]
    return slot


def _with(params: Any, masters: list[Tensor | None]) -> Any:
    """The params, with masters in place of their copies."""
    leaves, spec = tree.flatten(params)
    return tree.unflatten(spec, [leaf if wide is None else wide for wide, leaf in zip(masters, leaves, strict=True)])


def _wide(leaf: Tensor) -> Tensor:
    half = leaf.dtype in (torch.float16, torch.bfloat16) and is_trainable(leaf)
    return leaf.float() if half else leaf


def _trained_places(leaves: list[Tensor]) -> list[int]:
    """For each leaf, how many trained leaves precede it."""
    return [0, *accumulate(map(is_trainable, leaves))][:-1]
