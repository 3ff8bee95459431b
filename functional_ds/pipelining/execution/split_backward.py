"""A backward pass in two parts: first the inputs' gradients, which others wait for, then the weights'.

The nodes on the way from the outputs to an input make up the first part. Where a weight comes in beside that way, the node
where the two meet keeps the gradient that arrives there; the second part goes on from there, away from the inputs. So each
node computes each of its gradients once (the idea is zero bubble pipelines', Qi, Wan, Huang, Lin 2023).
"""

from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from functional_ds.base.torch_private import run_backward

__all__ = ["Rest", "accumulate", "backward_inputs"]

Grads = tuple[Tensor | None, ...]


@attrs.frozen(eq=False)
class _Junction:
    """A node on the way to an input where weights come in, and which of all weights."""

    node: Node
    weights: tuple[int, ...]


@attrs.define(eq=False)
class Rest:
    """What is left of a backward pass once the inputs have their gradients.

    Attributes:
        weights: whose gradients are to come, or have come already.
    """

    weights: Sequence[Tensor]
    _outputs: Sequence[Any] = ()
    _seeds: Sequence[Tensor] = ()
    _junctions: list[_Junction] = attrs.field(factory=list)
    _arrived: dict[int, Grads] = attrs.field(factory=dict)

    def run(self) -> None:
        """Adds the weights' gradients, where the outputs depend on them; again does nothing."""
        accumulate(self._outputs, self._seeds, self.weights)
        self._outputs = self._seeds = ()
        for place, junction in enumerate(self._junctions):
            arrived = self._arrived.pop(place, ())
            pairs = [(GradientEdge(junction.node, i), _zeros(grad)) for i, grad in enumerate(arrived) if grad is not None]
            edges, seeds = zip(*pairs, strict=True) if pairs else ((), ())
            handle = junction.node.register_prehook(lambda grads, arrived=arrived: arrived)  # after all hooks of others
            try:
                accumulate(edges, seeds, [self.weights[i] for i in junction.weights])
            finally:
                handle.remove()
        self._junctions = []


def accumulate(outputs: Sequence[Any], seeds: Sequence[Tensor], leaves: Sequence[Tensor], *, again: bool = False) -> None:
    """Adds the gradients of outputs to the ``grad`` of leaves, each as soon as it is there.

    It is ``torch.autograd.backward(outputs, seeds, inputs=leaves)`` without the looks at what is given, which take as long
    as the backward of a small stage.

    Args:
        outputs: tensors or gradient edges.
        seeds: their gradients, of the same shapes and dtypes.
        again: keeps the graph for another pass.
    """
    if outputs and leaves:
        run_backward(outputs, seeds, leaves, keep_graph=again)


def backward_inputs(
    outputs: Sequence[Any], seeds: Sequence[Tensor], inputs: Sequence[Tensor], weights: Sequence[Tensor]
) -> Rest:
    """Adds the inputs' gradients, and gives what will add the weights'.

    Law: both together are ``accumulate(outputs, seeds, (*inputs, *weights))``, no product computed twice, but for what
    checkpoints recompute. A weight that comes in at several places, or is not beside the way to an input, gets its gradient
    with the inputs. Without inputs everything is left.

    Hooks on a tensor or a node where weights come in have changed what is kept there; they are called again in the second
    part, with zeros, and what they give then is not used.

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
        return Rest(weights, outputs, seeds)
    junctions = _junctions([_node(output) for output in outputs], inputs, weights)
    beside = {i for junction in junctions for i in junction.weights}
    now = [weight for i, weight in enumerate(weights) if i not in beside]
    rest = Rest(weights, junctions=junctions)
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
    """Zeros like it; those of a plain tensor take no memory."""
    if type(grad) is not Tensor or grad.layout != torch.strided:
        return torch.zeros_like(grad)
    return torch.zeros((), dtype=grad.dtype, device=grad.device).expand(grad.shape)


def _node(output: Any) -> Node | None:
    return output.node if isinstance(output, GradientEdge) else output.grad_fn


def _junctions(roots: Sequence[Node | None], inputs: Sequence[Tensor], weights: Sequence[Tensor]) -> list[_Junction]:
    """Where weights that come in at one place only do so."""
    leaf = {id(tensor): i for i, tensor in enumerate(weights)}
    ends = {id(tensor) for tensor in inputs}
    order = list(_postorder([root for root in roots if root is not None]))
    on_the_way: set[Node] = set()
    behind: dict[Node, frozenset[int]] = {}  # weights that a node beside the way leads to
    met: list[tuple[Node, frozenset[int]]] = []
    for node in order:  # what it leads to comes first
        variable = getattr(node, "variable", None)
        following = [following for following, _ in node.next_functions if following is not None]
        if (variable is not None and id(variable) in ends) or any(f in on_the_way for f in following):
            on_the_way.add(node)
            found = frozenset[int]().union(*(behind[f] for f in following if f not in on_the_way))
            if found:
                met.append((node, found))
        else:
            own = frozenset([leaf[id(variable)]]) if variable is not None and id(variable) in leaf else frozenset[int]()
            behind[node] = own.union(*(behind[f] for f in following))
    times: dict[int, int] = {}
    for _, found in met:
        for i in found:
            times[i] = times.get(i, 0) + 1
    for root in roots:  # an output that hangs on no input at all
        for i in behind.get(root, frozenset()) if root is not None else ():
            times[i] = times.get(i, 0) + 2
    kept = ((node, tuple(sorted(i for i in found if times[i] == 1))) for node, found in met)
    return [_Junction(node, found) for node, found in kept if found]


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
            stack.extend((following, False) for following, _ in node.next_functions if following is not None)
