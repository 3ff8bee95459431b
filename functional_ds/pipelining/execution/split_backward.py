"""A backward pass in two parts: first the inputs' gradients, which other stages wait for, then the weights'.

A graph with an input x and a weight w that meet at a node N; the arrows are the direction of the gradients::

    output -> ... -> N -> ... -> x      first part: the nodes that lead to an input
                     N -> ... -> w      second part: from the junction N to its weights

In the first part a hook keeps the gradient that arrives at N. The second part starts there and continues only to w. So each
node computes each of its gradients once. From zero bubble pipelines (Qi, Wan, Huang, Lin 2023).
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from functional_ds.base.torch_private import run_backward, storage_id
from functional_ds.step.views.view import in_this_thread

Grads = tuple[Tensor | None, ...]
_NOTHING = frozenset[int]()


@attrs.frozen(eq=False)
class _Junction:
    """A node that leads both to an input and to weights.

    Attributes:
        weights: places of these weights among all weights.
    """

    node: Node
    weights: tuple[int, ...]


@attrs.define(eq=False)
class WeightBackward:
    """The second part of a backward pass, after the inputs have their gradients.

    Attributes:
        weights: all weights, including those that got their gradients in the first part.
    """

    weights: Sequence[Tensor]
    _outputs: Sequence[Any] = ()
    _seeds: Sequence[Tensor] = ()
    _junctions: list[_Junction] = attrs.field(factory=list)
    _arrived: dict[int, Grads] = attrs.field(factory=dict)  # the gradients at each junction

    def run(self) -> None:
        """Adds the remaining weights' gradients to their ``grad``, once."""
        accumulate(self._outputs, self._seeds, self.weights)
        self._outputs = self._seeds = ()
        for place, junction in enumerate(self._junctions):
            self._run(junction, self._arrived.pop(place, ()))
        self._junctions = []

    def _run(self, junction: _Junction, arrived: Grads) -> None:
        """Starts the engine at a junction with zeros, and replaces them by the kept gradients after all other hooks."""
        pairs = [(GradientEdge(junction.node, i), _zeros(grad)) for i, grad in enumerate(arrived) if grad is not None]
        handle = junction.node.register_prehook(lambda grads: arrived)
        try:
            accumulate([edge for edge, _ in pairs], [zeros for _, zeros in pairs], [self.weights[i] for i in junction.weights])
        finally:
            handle.remove()


def accumulate(outputs: Sequence[Any], seeds: Sequence[Tensor], leaves: Sequence[Tensor], *, again: bool = False) -> None:
    """Adds the gradients of outputs to the ``grad`` of leaves, each as soon as it is computed.

    It is ``torch.autograd.backward(outputs, seeds, inputs=leaves)`` without argument checks, which take as long as the backward
    of a small stage.

    Args:
        outputs: tensors or gradient edges.
        seeds: their gradients, of the same shapes and dtypes.
        leaves: tensors that require grad.
        again: keeps the graph for another pass.
    """
    if outputs and leaves:
        with in_this_thread():
            run_backward(outputs, seeds, leaves, keep_graph=again)


def backward_inputs(
    outputs: Sequence[Any], seeds: Sequence[Tensor], inputs: Sequence[Tensor], weights: Sequence[Tensor]
) -> WeightBackward:
    """Adds the inputs' gradients to their ``grad``, and returns the part that will add the weights'.

    Law: both parts together are ``accumulate(outputs, seeds, (*inputs, *weights))``, and no product is computed twice, except
    by checkpoints. A weight with several junctions, or none, gets its gradient in the first part. Without inputs everything is
    left to the second part.

    The gradient kept at a junction includes changes by hooks there. The second part calls such a hook again, with zeros, and
    ignores its result.

    Args:
        outputs: tensors or gradient edges.
        seeds: their gradients, of the same shapes and dtypes.
        inputs: leaves.
        weights: leaves.

    >>> x, w = torch.tensor([2.0], requires_grad=True), torch.tensor([3.0], requires_grad=True)
    >>> rest = backward_inputs([x * w], [torch.ones(1)], [x], [w])
    >>> x.grad.item(), w.grad
    (3.0, None)
    >>> rest.run()
    >>> w.grad.item()
    2.0
    """
    if not inputs:
        return WeightBackward(weights, outputs, seeds)
    junctions = _junctions([_node(output) for output in outputs], inputs, weights)
    later = {i for junction in junctions for i in junction.weights}
    now = [weight for i, weight in enumerate(weights) if i not in later]
    rest = WeightBackward(weights, junctions=junctions)
    handles = [
        junction.node.register_prehook(lambda grads, place=place: rest._arrived.update({place: grads}))
        for place, junction in enumerate(junctions)
    ]
    try:
        accumulate(outputs, seeds, [*inputs, *now], again=bool(junctions))
    finally:
        for handle in handles:
            handle.remove()
    return rest


def _zeros(grad: Tensor) -> Tensor:
    """Zeros of the same shape; those for a plain tensor take no memory."""
    if type(grad) is not Tensor or grad.layout != torch.strided:
        return torch.zeros_like(grad)
    return torch.zeros((), dtype=grad.dtype, device=grad.device).expand(grad.shape)


def _node(output: Any) -> Node | None:
    return output.node if isinstance(output, GradientEdge) else output.grad_fn


def _junctions(roots: Sequence[Node | None], inputs: Sequence[Tensor], weights: Sequence[Tensor]) -> list[_Junction]:
    """The nodes that lead to an input and, by another edge, to weights that have no other junction."""
    nodes = [root for root in roots if root is not None]
    met, beside = _meetings(nodes, {id(tensor) for tensor in inputs}, {id(tensor): i for i, tensor in enumerate(weights)})
    times = Counter(i for _, reached in met for i in reached)
    for root in nodes:  # weights of an output that no input leads to: they get their gradients in the first part
        times.update([*beside.get(root, _NOTHING)] * 2)
    kept = ((node, tuple(sorted(i for i in reached if times[i] == 1))) for node, reached in met)
    return [_Junction(node, reached) for node, reached in kept if reached]


def _meetings(
    roots: Sequence[Node], inputs: set[int], weights: dict[int, int]
) -> tuple[list[tuple[Node, frozenset[int]]], dict[Node, frozenset[int]]]:
    """The nodes that lead to an input and by another edge to weights; and the weights behind each node that leads to no input.

    Args:
        roots: the nodes of the outputs.
        inputs: ids of the inputs.
        weights: the index of each weight, by id.
    """
    to_inputs: set[Node] = set()
    beside: dict[Node, frozenset[int]] = {}
    met: list[tuple[Node, frozenset[int]]] = []
    for node in _postorder(roots):  # a node comes after all nodes that it leads to
        leaf = id(getattr(node, "variable", None))
        following = [next_node for next_node, _ in node.next_functions if next_node is not None]
        reached = _NOTHING.union(*(beside.get(next_node, _NOTHING) for next_node in following))
        if leaf in inputs or any(next_node in to_inputs for next_node in following):
            to_inputs.add(node)
            if reached:
                met.append((node, reached))
        else:
            beside[node] = reached | {weights[leaf]} if leaf in weights else reached
    return met, beside


def _postorder(roots: Sequence[Node]) -> Iterator[Node]:
    seen: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(root, False) for root in roots]
    while stack:
        node, done = stack.pop()
        if done:
            yield node
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack.extend((next_node, False) for next_node, _ in node.next_functions if next_node is not None)


@attrs.define(eq=False)
class InFlightMicroBatch:
    """A micro-batch between a stage's forward and its backward, which adds the weights' gradients to their ``grad``.

    Attributes:
        inputs: leaves whose gradients go to the previous stage.
        edges: the outputs' gradient edges; the outputs themselves may have been freed.
        rest: the weights' backward, after the inputs' backward.
        returned: the storages of the inputs' gradients.
    """

    inputs: list[Tensor]
    edges: list[Any]
    rest: WeightBackward | None = None
    returned: set[int] = attrs.field(factory=set)

    @staticmethod
    def of(inputs: list[Tensor], outputs: Sequence[Tensor]) -> "InFlightMicroBatch":
        """From a stage's inputs, and those of its outputs through which gradients flow."""
        return InFlightMicroBatch(inputs, [get_gradient_edge(output) for output in outputs])

    def backward(self, seeds: Sequence[Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
        """The gradients of the inputs, zero where the outputs do not depend on one; adds the weights' gradients."""
        new = _without(weights)
        accumulate(self.edges, seeds, [*self.inputs, *weights])
        back = self._back()
        self._separate(new)
        return back

    def backward_inputs(self, seeds: Sequence[Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
        """The gradients of the inputs; ``backward_weights`` must follow."""
        new = _without(weights)
        self.rest = backward_inputs(self.edges, seeds, self.inputs, weights)
        back = self._back()
        self._separate(new)
        self.inputs, self.edges = [], []  # ``rest`` holds what it needs
        return back

    def backward_weights(self) -> None:
        """Adds the gradients of the weights, after ``backward_inputs``."""
        if self.rest is None:
            raise RuntimeError("the backward for weights comes after that for inputs")
        new = _without(self.rest.weights)
        self.rest.run()
        self._separate(new)

    def _back(self) -> list[Tensor]:
        """The inputs' gradients; records their storages."""
        back = [torch.zeros_like(x) if x.grad is None else x.grad for x in self.inputs]
        self.returned = {storage_id(grad) for grad in back}
        return back

    def _separate(self, new: Sequence[Tensor]) -> None:
        """Clones first gradients that share memory: autograd may have shared it, and later gradients are added in place."""
        taken = set(self.returned)
        for weight in new:
            if weight.grad is not None:
                if storage_id(weight.grad) in taken:
                    weight.grad = weight.grad.clone()
                taken.add(storage_id(weight.grad))


def _without(weights: Sequence[Tensor]) -> list[Tensor]:
    """The weights that have no gradient yet."""
    return [weight for weight in weights if weight.grad is None]
