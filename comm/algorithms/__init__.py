"""All-reduce as rings, trees and halvings, and what each algorithm costs."""

from .allreduce import double_tree, halving_doubling, hierarchical, recursive_doubling, ring, tree

__all__ = ["double_tree", "halving_doubling", "hierarchical", "recursive_doubling", "ring", "tree"]
