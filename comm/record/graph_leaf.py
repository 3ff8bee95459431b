"""What stands in a traced state for leaves that are no tensors."""

from typing import Any

from torch import Tensor


class Outside:
    """What a trace leaves as it is, such as files, and what is in them."""


class GraphLeaf(Outside):
    """A leaf of a state that is no tensor, and a tensor of the graph carries it.

    Attributes:
        kind: what a graph depends on of it.
    """

    kind: Any

    def in_graph(self, token: Tensor) -> "TracedLeaf":
        """What stands for it while its step is traced."""
        raise NotImplementedError


class TracedLeaf:
    """A leaf of a traced state.

    Attributes:
        token: the graph's tensor that carries it.
    """

    token: Tensor
