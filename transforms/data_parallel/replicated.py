"""Data parallelism with replicated params and a custom reduction of gradients."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from functional_ds import comm
from functional_ds.base.marks import trainable
from functional_ds.base.weighted import Weighted
from functional_ds.step.compose import wrap
from functional_ds.step.phases import Trait
from functional_ds.step.state.state import State
from functional_ds.step.step import Step, Transform
from functional_ds.transforms.zero.combine import Combine

from .replicas import Replicas


def replicated(
    group: comm.Group | None = None,
    *,
    reduce: Callable[[list[Tensor], Any, comm.Group], tuple[Sequence[Tensor], Any]],
    init: Callable[[list[Tensor], comm.Group], Any] | None = None,
    slot: str = "replicated",
    name: str | None = None,
) -> Transform:
    """Data parallelism with replicated params, in which ``reduce`` combines the ranks' gradients.

    ``reduce`` must satisfy what ``T.Combine`` documents; ``T.zero(stage, aggregate=T.Combine(reduce, init=init))`` is the same
    with sharded states. Its memory is the slot ``slot`` of the state. Transforms that wrap ``update``, such as ``clip``, get
    the combined gradient. ``init`` uses rank 0's params. Before ``zero`` over another axis, ``reduce`` gets flat shards, so it
    must be elementwise.

    Args:
        group: the ranks; None for the whole world.
        reduce: ``(gradients, memory, group) -> (gradients, memory)``, as for ``T.Combine``.
        init: ``(trained tensors, group) -> memory``, a pytree; None for no memory.
        slot: the name of the memory in ``state.slots``.
        name: the transform's name in errors.

    Raises:
        ValueError: the ranks' params differ in structure; another transform divides the batch over these ranks.
        TypeError: ``group`` is not a ``comm.Group``, or ``reduce`` not a function.

    >>> import functional_ds as fds
    >>> def vote(grads, memory, group):  # signSGD with majority vote (Bernstein et al. 2018)
    ...     return [comm.all_reduce(grad.sign(), group).sign() for grad in grads], memory
    >>> def program():
    ...     step = replicated(reduce=vote)(fds.train_step(lambda params, x: (params["w"] * x).sum(), fds.sgd(1.0)))
    ...     state, _ = step(step.init({"w": torch.zeros(2)}), torch.tensor([1.0, -1.0]) * (comm.world().rank - 0.5))
    ...     return step.params(state)["w"].tolist()
    >>> comm.simulate(program, world_size=3)[0]
    [-1.0, 1.0]
    """
    combine, replicas = Combine(reduce, init=init), Replicas(group, summed_in="reduce")
    title = name or f"replicated({getattr(reduce, '__name__', type(reduce).__name__)}, {replicas})"

    def begin(inner: Any, step: Step, params: Any) -> State:
        state: State = inner(step, replicas.same(params))
        leaves, ranks = trainable(state.params), replicas.ranks()
        memory = combine.fresh(leaves, ranks)
        combine.check_separate(step, state, leaves, memory, ranks)
        return state.put(**{slot: memory})

    def combined(inner: Any, step: Step, state: State, grads: Weighted) -> tuple[State, Weighted]:
        state, grads = inner(step, state, grads)
        return combine.combined(step, state, grads, slot, replicas.ranks())

    return wrap(
        title,
        check=lambda step: replicas.alone(step, title),
        slot=slot,
        traits=[Trait.RESIDENT_SLOT],
        options={"reduce": reduce, "init": init},
        axes=[replicas],
        init=begin,
        reduce=combined,
    )
