"""All-reduce algorithms (ring, trees, recursive doubling, halving-doubling, hierarchical), and their costs."""

from typing import TYPE_CHECKING

from functional_ds.base.package_index import lazy_index

if TYPE_CHECKING:
    from . import cost
    from .allreduce import double_tree, halving_doubling, hierarchical, recursive_doubling, ring, tree

__all__ = ["cost", "double_tree", "halving_doubling", "hierarchical", "recursive_doubling", "ring", "tree"]

lazy_index(__name__)
