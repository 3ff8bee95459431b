"""1-bit Adam and 0/1 Adam: compressed momentum with error feedback."""

import sys
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor

from functional_ds import comm
from functional_ds.base import tree
from functional_ds.base.weighted import Weighted
from functional_ds.comm.record.group import Solo
from functional_ds.sharding.leaf_map import LeafMap

from .adam import AdamState, adam_optimizer
from .kernels import check, check_betas, check_counts, gradients, reals, widest, zeros
from .optimizer import Optimizer, PerParameter, Rate
from .param_groups import PathFilter, by_decay


@attrs.frozen
class UpdateIntervals:
    """A set of update numbers, as ranges.

    Attributes:
        ranges: ascending, without overlaps.

    >>> chosen = UpdateIntervals((range(3), range(3, 9, 2)))
    >>> [t for t in range(12) if t in chosen], chosen.before(4)
    ([0, 1, 2, 3, 5, 7], 4)
    """

    ranges: tuple[range, ...]

    def __contains__(self, update: int) -> bool:
        return any(update in updates for updates in self.ranges)

    def before(self, update: int) -> int:
        """The number of them before an update."""
        return sum(len(range(r.start, min(update, r.stop), r.step)) for r in self.ranges)

    @staticmethod
    def doubling(each: int, stop: int) -> "UpdateIntervals":
        """``each`` updates at interval 1, then ``each`` at interval 2, at 4, and so on, before ``stop``.

        >>> UpdateIntervals.doubling(2, 12).ranges
        (range(0, 2), range(2, 6, 2), range(6, 12, 4))
        """
        ranges, start, interval = [], 0, 1
        while start < stop:
            end = min(start + each * interval, stop)
            ranges.append(range(start, end, interval))
            start, interval = end, 2 * interval
        return UpdateIntervals(tuple(ranges))

    @staticmethod
    def local_steps(start: int, each: int, longest: int) -> "UpdateIntervals":
        """All updates before ``start + each``; then, for ``each`` updates per interval, the last of every 2, 4, ... of them.

        >>> UpdateIntervals.local_steps(3, 4, 4).ranges[:3]
        (range(0, 7), range(8, 11, 2), range(14, 9223372036854775807, 4))
        """
        ranges, begin, interval = [range(start + each)], start + each, 2
        while interval < longest:
            ranges.append(range(begin + interval - 1, begin + each, interval))
            begin, interval = begin + each, 2 * interval
        return UpdateIntervals((*ranges, range(begin + longest - 1, sys.maxsize, longest)))


ALWAYS = UpdateIntervals((range(sys.maxsize),))


@tree.record
class LocalSteps:
    """A rank's local steps since the last synchronization.

    Attributes:
        synced: the parameters at the last synchronization, the same on all ranks.
        moved: the sum of the momenta since then, each times its rate.
        rates: the sum of these rates.
    """

    synced: list[Tensor]
    moved: list[Tensor]
    rates: Tensor


@tree.record
class OneBitState:
    """The state of 1-bit Adam and 0/1 Adam.

    Attributes:
        count: the number of updates; on the host, which decides what to send.
        exp_avg: the momentum, the same on all ranks after each synchronization.
        exp_avg_sq: the variance, the same on all ranks.
        residual: this rank's compression error, which is added to the next message; None without compression.
        local: the steps since the last synchronization; None if ranks synchronize in every update.
    """

    count: Tensor
    exp_avg: list[Tensor]
    exp_avg_sq: list[Tensor]
    residual: comm.codecs.Residual | None
    local: LocalSteps | None

    reduces: ClassVar[bool] = True  # its update sums the gradients over the ranks


def one_bit_adam(
    lr: float,
    *,
    warmup: int,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    codec: comm.codecs.Codec | None = comm.codecs.OneBit(2048),  # noqa: B008  # frozen
    decay: PathFilter | None = None,
) -> PerParameter:
    """1-bit Adam (Tang et al. 2021, arXiv:2102.02888): Adam during a warm-up, then 1-bit momentum with a frozen variance.

    ```
    t < warmup:  g = Σ gᵢ / n, all-reduced;  Adam (decoupled decay) moves m, v and w
    t ≥ warmup:  m = EF(Σ (β₁ m + (1 - β₁) gᵢ) / n);  w ← w - lr m̂ / (√v̂ + eps)        v stays
    ```

    The optimizer reduces the gradients itself: use it with ``T.local_gradients(group)``, which does not reduce them.
    EF is error feedback in both phases of the sum (``comm.codecs.ErrorFeedback``). Params are bitwise equal on all ranks. m̂ and
    v̂ are bias-corrected as in Adam. Elements without gradients in the whole warm-up have zero variance, and are not updated
    afterwards.

    Cost: during the warm-up, an all-reduce of the gradients in the params' dtype; then each rank sends ``2 (n - 1) b`` bytes
    per leaf, where b is the codec's size for ``m = ⌈numel / n⌉`` values: ``⌈m / 8⌉ + 4 ⌈m / 2048⌉``, about 1/32 of an
    all-reduce in fp32. With a loss scale the host waits in each step to learn whether it is skipped.

    Args:
        lr: the learning rate.
        warmup: the number of Adam updates; the paper recommends 15 to 25% of all, until the variance is stable.
        betas: the decay rates of the running means.
        eps: added to the square root.
        weight_decay: decoupled weight decay.
        codec: compresses the momentum; None sends it uncompressed.
        decay: a regular expression or a function of a path that selects the leaves with weight decay; None for all.

    Raises:
        ValueError: a hyperparameter is out of range.

    >>> import functional_ds as fds
    >>> from functional_ds import transforms as T
    >>> def program():
    ...     step = T.local_gradients()(fds.train_step(lambda params, x: (params["w"] * x).sum(), one_bit_adam(0.25, warmup=1)))
    ...     state, x = step.init({"w": torch.ones(2)}), torch.tensor([1.0, -1.0]) * (1 + comm.world().rank)
    ...     for _ in range(2):
    ...         state, _ = step(state, x)
    ...     return step.params(state)["w"].round(decimals=3).tolist()
    >>> comm.simulate(program, world_size=2)
    [[0.5, 1.5], [0.5, 1.5]]
    """
    if decay is not None:
        return by_decay(one_bit_adam, lr, weight_decay, decay, warmup=warmup, betas=betas, eps=eps, codec=codec)
    check_counts(warmup=warmup)
    rule = _Rule(lr, betas, eps, weight_decay, codec, UpdateIntervals((range(warmup),)), ALWAYS, weighs=False)
    return rule.optimizer_for_leaves(
        f"one_bit_adam(lr={lr}, warmup={warmup}, betas={betas}, eps={eps}, weight_decay={weight_decay})"
    )


def zero_one_adam(
    lr: float,
    *,
    freeze: int,
    each: int = 16,
    local: int | None = None,
    longest: int = 16,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    codec: comm.codecs.Codec | None = comm.codecs.OneBit(2048),  # noqa: B008  # frozen
    decay: PathFilter | None = None,
) -> PerParameter:
    """0/1 Adam (Lu et al. 2022, arXiv:2202.06009): 1-bit communication from the start, later skipped in some steps.

    ```
    mᵢ = β₁ m + (1 - β₁) gᵢ;   wᵢ ← wᵢ - lr m̂ᵢ / (√v̂ + eps);   uᵢ ← uᵢ + rate · m̂ᵢ          on each rank
    t in the synchronizing updates:  u = EF(Σ uᵢ / n);  w = w_sync - lr u / (√v̂ + eps);  m = u / Σ rate;  uᵢ ← 0
    t in the updates of v:           Adam's update, with all-reduced gradients
    ```

    The variance v is updated ``each`` times in a row, then ``each`` times in every second update, in every fourth, ... until it
    is frozen. Afterwards, with ``local``, ranks synchronize in every update for ``local`` updates, then in every second one for
    ``local`` updates, ... and finally in every ``longest``-th.

    Otherwise it is like ``one_bit_adam``. With ``local``, params differ between ranks until the next synchronization, also in
    ``step.params`` and ``evaluate``, and two more tensors per leaf are stored. If a schedule's rate is exactly 0, the momentum
    restarts from zero.

    Args:
        lr: the learning rate.
        freeze: the number of updates after which the variance is frozen.
        each: how many updates of the variance use an interval before it doubles.
        local: how many updates use an interval between synchronizations before it doubles, a multiple of ``longest``; None
            to synchronize in every update.
        longest: the largest interval between synchronizations, a power of two.
        betas: the decay rates of the running means.
        eps: added to the square root.
        weight_decay: decoupled weight decay.
        codec: compresses what is sent; None sends it uncompressed.
        decay: a regular expression or a function of a path that selects the leaves with weight decay; None for all.

    Raises:
        ValueError: a hyperparameter is out of range.

    >>> str(zero_one_adam(0.1, freeze=100, local=32))
    'zero_one_adam(lr=0.1, freeze=100, each=16, local=32, longest=16, betas=(0.9, 0.999), eps=1e-08, weight_decay=0.0)'
    """
    if decay is not None:
        further: dict[str, Any] = {"freeze": freeze, "each": each, "local": local, "longest": longest}
        return by_decay(zero_one_adam, lr, weight_decay, decay, betas=betas, eps=eps, codec=codec, **further)
    check_counts(freeze=freeze, each=each, longest=longest)
    if local is not None and (longest & (longest - 1) or local < 1 or local % longest):
        raise ValueError(f"local={local}, longest={longest}: longest must be a power of two, and local a multiple of it")
    syncs = ALWAYS if local is None or longest == 1 else UpdateIntervals.local_steps(freeze, local, longest)
    rule = _Rule(lr, betas, eps, weight_decay, codec, UpdateIntervals.doubling(each, freeze), syncs, weighs=True)
    numbers = f"lr={lr}, freeze={freeze}, each={each}, local={local}, longest={longest}, betas={betas}, eps={eps}"
    return rule.optimizer_for_leaves(f"zero_one_adam({numbers}, weight_decay={weight_decay})")


@attrs.frozen
class _Rule:
    """The update rule of both optimizers.

    Attributes:
        lr: the learning rate.
        betas: the decay rates of the means of gradients and of squared gradients.
        eps: added to the square root of the latter.
        weight_decay: decoupled weight decay.
        codec: compresses what is sent; None sends it uncompressed.
        exact: the updates that update the variance, with all-reduced gradients.
        syncs: the other updates after which all ranks are equal.
        weighs: whether the momentum is multiplied by its rate before it is compressed, as in 0/1 Adam.
    """

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    codec: comm.codecs.Codec | None
    exact: UpdateIntervals
    syncs: UpdateIntervals
    weighs: bool

    def __attrs_post_init__(self) -> None:
        check(lr=self.lr, eps=self.eps, weight_decay=self.weight_decay)
        check_betas(self.betas)

    def optimizer_for_leaves(self, name: str) -> PerParameter:
        """The optimizer, which sums over ``LeafMap.reduce_group``."""

        def make(leaf_map: LeafMap) -> Optimizer:
            cut = leaf_map.group
            if cut is not None and cut.size > 1 and self.codec is not None:
                raise ValueError(
                    f"optimizer: {name} compresses whole tensors, and group {cut.name!r} of {cut.size} splits "
                    "them, so its result would depend on how they are split; use it with T.local_gradients(group) instead of "
                    "zero"
                )
            group = leaf_map.reduce_group or Solo().group((0,), "alone")
            return _At(self, group).optimizer(name)

        return PerParameter(make, name)


@attrs.frozen(eq=False)
class _At:
    """The rule on the ranks of a group."""

    rule: _Rule
    group: comm.Group

    def optimizer(self, name: str) -> Optimizer:
        """The optimizer."""
        return Optimizer(self.init, self.update, name, skips=True)

    def init(self, params: list[Tensor]) -> OneBitState:
        """The state before the first update."""
        real, codec = reals(params), self.rule.codec
        residual = None if codec is None else comm.codecs.ErrorFeedback(codec).init(real, self.group)
        rates = torch.zeros((), dtype=widest(params), device=params[0].device if params else None)
        local = None if self.rule.syncs == ALWAYS else LocalSteps([p.detach().clone() for p in real], zeros(params), rates)
        return OneBitState(torch.zeros((), dtype=torch.int64), zeros(params), zeros(params), residual, local)

    def update(self, params: list[Tensor], grads: Weighted, state: OneBitState, rate: Rate) -> tuple[list[Tensor], OneBitState]:
        """An update; a skipped one does not compute or send anything."""
        if grads.skip is not None and bool(grads.skip):
            return params, state
        done = int(state.count)
        move = self._exactly if done in self.rule.exact else self._compressed
        return params, tree.replace(move(params, grads, state, rate, done), count=state.count + 1)

    # -- updates of the variance -----------------------------------------------------------------------------------------

    def _exactly(self, params: list[Tensor], grads: Weighted, state: OneBitState, rate: Rate, done: int) -> OneBitState:
        rule, real_params = self.rule, reals(params)
        sums = comm.all_reduce(gradients(grads, params), self.group)
        if rule.exact.before(done) == done:  # both means have had equally many updates, as the kernel assumes
            steps = [torch.full((), float(done), dtype=torch.float32, device=p.device) for p in real_params]
            numbers: dict[str, Any] = {"betas": rule.betas, "eps": rule.eps, "weight_decay": rule.weight_decay}
            adam = adam_optimizer("adamw", rule.lr, decoupled=True, **numbers)
            adam.update(real_params, Weighted(sums, grads.weight), AdamState(steps, state.exp_avg, state.exp_avg_sq), rate)
        else:
            self._decay(real_params, rate)
            roots = self._roots(state.exp_avg_sq, rule.exact.before(done) + 1, [total / grads.weight for total in sums])
            step = rule.lr * self._gain(rate, done)
            for p, mean, total, root in zip(real_params, state.exp_avg, sums, roots, strict=True):
                mean.lerp_(total / grads.weight, 1 - rule.betas[0])
                p.sub_((mean / root).mul_(step))
        if state.local is not None:
            for synced, p in zip(state.local.synced, real_params, strict=True):
                synced.copy_(p)
        return state

    # -- all other updates -----------------------------------------------------------------------------------------------------

    def _compressed(self, params: list[Tensor], grads: Weighted, state: OneBitState, rate: Rate, done: int) -> OneBitState:
        rule, real_params = self.rule, reals(params)
        share, gain = self.group.size / grads.weight, self._gain(rate, done)
        local_grads = comm.varying(gradients(grads, params), self.group)  # ranks have different momenta
        for mean, grad in zip(state.exp_avg, local_grads, strict=True):
            mean.lerp_(grad * share.to(grad.dtype), 1 - rule.betas[0])
        roots = self._roots(state.exp_avg_sq, rule.exact.before(done))
        if state.local is None:
            self._decay(real_params, rate)
            moved = [mean * gain for mean in state.exp_avg] if rule.weighs else state.exp_avg
            return self._sync(real_params, real_params, moved, roots, state, gain)
        self._decay(state.local.synced, rate)
        for total, mean in zip(state.local.moved, state.exp_avg, strict=True):
            total.add_(mean * gain)
        local = tree.replace(state.local, rates=state.local.rates + gain)
        if done in rule.syncs:
            state = self._sync(real_params, local.synced, local.moved, roots, state, local.rates)
            for synced, p, total in zip(local.synced, real_params, local.moved, strict=True):
                synced.copy_(p)
                total.zero_()
            return tree.replace(state, local=tree.replace(local, rates=torch.zeros_like(local.rates)))
        self._decay(real_params, rate)
        for p, mean, root in zip(real_params, state.exp_avg, roots, strict=True):
            p.sub_((mean / root).mul_(rule.lr * gain))
        return tree.replace(state, local=local)

    def _sync(
        self, params: list[Tensor], since: list[Tensor], moved: list[Tensor], roots: list[Tensor], state: OneBitState, gain: Any
    ) -> OneBitState:
        """Updates the params of all ranks to those at ``since``, where they were last equal, moved by the mean of ``moved``.

        ``gain`` is the sum of the rates by which ``moved`` was multiplied.
        """
        rule = self.rule
        total, residual = self._mean(moved, state.residual)
        dtype, device = widest(params), params[0].device if params else None  # a stage may have no leaves
        scale = gain if isinstance(gain, Tensor) else torch.full((), gain, dtype=dtype, device=device)  # does not block
        scale = scale.to(dtype)
        step = rule.lr if rule.weighs else rule.lr * scale
        for p, synced, mean, travelled, root in zip(params, since, state.exp_avg, total, roots, strict=True):
            known = torch.where(root.isfinite(), travelled, 0)
            unit = scale.to(mean.device, mean.dtype)
            mean.copy_(torch.where(unit == 0, 0, known / unit) if rule.weighs else known)
            p.copy_(synced - (known / root).mul_(step))
        return tree.replace(state, residual=residual)

    def _mean(
        self, values: list[Tensor], residual: comm.codecs.Residual | None
    ) -> tuple[list[Tensor], comm.codecs.Residual | None]:
        if self.rule.codec is None or residual is None:
            return comm.all_reduce(values, self.group, op="avg"), None
        means: tuple[list[Tensor], comm.codecs.Residual] = comm.codecs.ErrorFeedback(self.rule.codec).all_reduce(
            values, residual, self.group, op="avg"
        )
        return means

    def _gain(self, rate: Rate, done: int) -> Any:
        """The rate, with the momentum's bias correction."""
        return rate / (1 - self.rule.betas[0] ** (done + 1))

    def _decay(self, params: list[Tensor], rate: Rate) -> None:
        if self.rule.weight_decay:
            for p in params:
                p.mul_(1 - self.rule.lr * self.rule.weight_decay * rate)

    def _roots(self, squares: list[Tensor], count: int, grads: list[Tensor] | None = None) -> list[Tensor]:
        """The divisors of the momenta, after the variance is updated with ``grads``; inf where the variance is zero."""
        decay = self.rule.betas[1]
        for square, grad in zip(squares, grads or [], strict=False):
            square.mul_(decay).addcmul_(grad, grad, value=1 - decay)
        return [
            (square / (1 - decay**count)).sqrt_().add_(self.rule.eps).masked_fill_(square == 0, torch.inf) for square in squares
        ]
