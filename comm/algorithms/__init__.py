"""All-reduce algorithms (ring, trees, recursive doubling, halving-doubling, hierarchical) and their costs."""

from .allreduce import double_tree, halving_doubling, hierarchical, recursive_doubling, ring, tree

__all__ = ["double_tree", "halving_doubling", "hierarchical", "recursive_doubling", "ring", "tree"]
