"""What transforms ask a step at the params of a state, or at others: trained tensors, and forward passes."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from functional_ds import comm
from functional_ds.base import tree
from functional_ds.base.containers import register_containers
from functional_ds.base.marks import is_trainable, like_marked, trainable

from .over_ranks.mesh_axes import FollowsFromAxes
from .pass_scope import evaluated
from .phase_signatures import Phases
from .state.state import State


class AtParams(Phases, FollowsFromAxes):
    """The part of a step that reads, replaces and runs params within a transform.

    Attributes:
        keeps_graph: whether gradients flow through what it returns.
    """

    keeps_graph: bool

    def trained(self, state: State) -> list[Tensor]:
        """The trained tensors as the optimizer holds them, in the order of the gradients and in the dtype of updates.

        In ZeRO 1 to 3 they are this rank's shards; with mixed precision they are the masters. A phase may call it at any place
        among the transforms, also in an inner ``init`` or ``update``.
        """
        return trainable(self.scatter(state).params)

    def with_trained(self, state: State, tensors: Sequence[Tensor]) -> State:
        """The state with other trained params: another point at which to run or differentiate the loss.

        Law: ``step.trained(step.with_trained(state, x))`` is x, and ``with_trained(state, step.trained(state))`` the state.
        Frozen params, the optimizer's state and all slots stay. The result may share memory with the state. Collective in ZeRO
        1 and 2.

        Args:
            state: stays unchanged.
            tensors: as many as ``step.trained(state)``, of the same numbers of elements.

        Raises:
            ValueError: their numbers of elements differ.
        """
        held = self.scatter(state)
        leaves, spec = tree.flatten(held.params)
        places = [place for place, leaf in enumerate(leaves) if is_trainable(leaf)]
        wanted, given = [leaves[place].numel() for place in places], [x.numel() for x in tensors]
        if wanted != given:
            raise ValueError(
                f"with_trained: the tensors have {given} elements, and step.trained(state) has tensors of {wanted}; pass a "
                "list that lines up with it, as gradients do"
            )
        for place, x in zip(places, tensors, strict=True):
            new = x if self.keeps_graph else x.detach()
            leaves[place] = like_marked(new.view_as(leaves[place]).to(leaves[place].dtype), leaves[place])
        return self.publish(tree.replace(held, params=tree.unflatten(spec, leaves)))

    def placed(self, state: State, whole: Any) -> list[Tensor]:
        """This rank's part, as the optimizer holds it, of a tree like the user's, or of a dict of whole tensors by path.

        Law: ``step.params(step.with_trained(state, step.placed(state, whole)))`` is ``whole``. Nothing is sent.

        Raises:
            ValueError: a trained leaf is missing, has another number of elements, or is split by tensor parallelism.
        """
        return self.leaf_map(state).placed(whole, self.trained(state))

    def run(self, state: State, function: Callable[[Any, Any], Any], batch: Any = None) -> Any:
        """``function(params, batch)`` at the params of a state, without gradients: a forward pass within a transform.

        It runs like the loss function, with the casts, gathers and axes of the transforms, and changes neither gradients nor
        module buffers. Law: it equals ``function(step.params(state), batch)``, as exactly as the loss does. Collective if the
        loss is. In an ``update`` before ``zero`` or ``mixed_precision`` pass ``step.publish(state)``.

        >>> import functional_ds as fds
        >>> step = fds.train_step(lambda params, x: (params["w"] * x).sum(), fds.sgd(0.5))
        >>> state = step.init({"w": torch.tensor([1.0, 2.0])})
        >>> step.run(step.with_trained(state, [torch.ones(2)]), lambda params, x: params["w"] * x, torch.tensor([3.0, 4.0]))
        tensor([3., 4.])

        Raises:
            ValueError: ranks have other stages or other positions of a sequence, so none can run a function of all params.
        """
        self._guard("run", state, None)
        register_containers(batch)
        with comm.world().world.step():
            return evaluated(
                self, state, lambda params: self.forward(state, lambda given: function(params, given), batch), apart=True
            )
