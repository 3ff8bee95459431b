"""Testing tools: property tests for custom transforms and optimizers, Hypothesis strategies, a simulated CUDA device.

The strategies need Hypothesis (the extra ``test``).
"""

from typing import TYPE_CHECKING

from functional_ds.base.package_index import lazy_index

if TYPE_CHECKING:
    from functional_ds.compiling.jitted.check_pass import PassReport, check_pass
    from functional_ds.simulated_cuda.findings import Finding
    from functional_ds.simulated_cuda.gpu import SimulatedGpu
    from functional_ds.simulated_cuda.stand_ins import simulated_cuda

    from .collective_laws import collective_holds
    from .difference import Difference, LeafDifference, difference
    from .holds import BoundLaw, LawResult, LawTable, holds, laws
    from .mutants import Mutant, MutantTable, mutants
    from .problem import Problem
    from .same import assert_like_one_rank, assert_same
    from .strategies import (
        ADDABLE,
        COMPLEX,
        DTYPES,
        FLOATING,
        INTEGRAL,
        Inputs,
        Leaf,
        inputs,
        leaves,
        schedules,
        seeds,
        shapes,
        trees,
        world_sizes,
    )

__all__ = [
    "ADDABLE",
    "COMPLEX",
    "DTYPES",
    "FLOATING",
    "INTEGRAL",
    "BoundLaw",
    "Difference",
    "Finding",
    "Inputs",
    "LawResult",
    "LawTable",
    "Leaf",
    "LeafDifference",
    "Mutant",
    "MutantTable",
    "PassReport",
    "Problem",
    "SimulatedGpu",
    "assert_like_one_rank",
    "assert_same",
    "check_pass",
    "collective_holds",
    "difference",
    "holds",
    "inputs",
    "laws",
    "leaves",
    "mutants",
    "schedules",
    "seeds",
    "shapes",
    "simulated_cuda",
    "trees",
    "world_sizes",
]

lazy_index(__name__)
