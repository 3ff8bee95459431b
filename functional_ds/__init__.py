"""Composable distributed training for PyTorch: training steps as pure functions, and transforms that parallelise them.

- **Make a step**: ``functional``, ``train_step``, ``compose``, ``jit``, ``Weighted``, ``Key``, ``freeze``; ``Apply``, ``Step``,
  ``State``, ``Transform``, ``DonatedStateError``, ``UpdateError``.
- **Strategies**: ``transforms`` (``T.zero``, ``T.mixed_precision``, ``T.accumulate``, ``T.clip`` and others) over the groups
  and meshes of ``comm``; ``units``, ``deferred``, ``from_source``.
- **Memory**: ``remat``, ``RematPolicy``, ``checkpoint_name``, ``remat_report``, ``RematReport``, ``tiled``.
- **Model parallelism**: ``tp``, ``seq``, ``moe``, ``pp`` (``pipelining``).
- **Optimizers**: ``adamw``, ``adam``, ``sgd``, ``adagrad``, ``lion``, ``lamb``, ``muon``, ``one_bit_adam``, ``zero_one_adam``,
  ``param_groups``.
- **Run**: ``fit``, ``Checkpoints``, ``Evaluation``, ``Logging``, ``fitting``; ``save``, ``load``, ``checkpointing``;
  ``export``, ``load_params``, ``interchange``; ``load_job``, ``run_job``, ``Job``, ``jobs``.
- **DeepSpeed**: ``deepspeed``, ``from_ds_config``, ``from_deepspeed``.
- **Look**: ``memory``, ``profile``, ``profiling``, ``record``, ``compile_report``, ``CompileReport``, ``scaling``.
- **Invent**: ``wrap``, ``innermost``, ``outermost``, ``View``, ``OpenPass``, ``Gradients``; ``Optimizer``, ``PerParameter``,
  ``per_leaf``, ``per_matrix``; ``Layout``, ``LeafMap``, ``shard``, ``unshard``, ``tree``; ``hvp``, ``differentiable``;
  ``compiling``; ``testing``. ``functional_ds.step`` has more.
"""

from importlib.metadata import version
from typing import TYPE_CHECKING

from functional_ds.base.package_index import lazy_index

if TYPE_CHECKING:
    from functional_ds.base import tree
    from functional_ds.base.marks import freeze
    from functional_ds.base.prng import Key
    from functional_ds.base.weighted import Weighted
    from functional_ds.checkpointing.load import load
    from functional_ds.checkpointing.save import save
    from functional_ds.compiling.compile_log import CompileReport, compile_report
    from functional_ds.compiling.jitted.jit_step import jit
    from functional_ds.deepspeed.config.ds_plan import from_ds_config
    from functional_ds.fitting.checkpoints import Checkpoints
    from functional_ds.fitting.fit import fit
    from functional_ds.fitting.loggers import Logging
    from functional_ds.fitting.run import Evaluation
    from functional_ds.interchange.deepspeed import from_deepspeed
    from functional_ds.interchange.export import export
    from functional_ds.interchange.load_params import load_params
    from functional_ds.jobs.job import Job
    from functional_ds.jobs.job_file import load_job
    from functional_ds.jobs.run_job import run_job
    from functional_ds.modules.deferred_init import deferred
    from functional_ds.modules.functional import Apply, functional
    from functional_ds.optim.adagrad import adagrad
    from functional_ds.optim.adam import adam, adamw
    from functional_ds.optim.lamb import lamb
    from functional_ds.optim.lion import lion
    from functional_ds.optim.matrix.muon import muon
    from functional_ds.optim.matrix.per_matrix import per_leaf, per_matrix
    from functional_ds.optim.one_bit import one_bit_adam, zero_one_adam
    from functional_ds.optim.optimizer import Optimizer, PerParameter
    from functional_ds.optim.param_groups import param_groups
    from functional_ds.optim.sgd import sgd
    from functional_ds.parallel import experts as moe
    from functional_ds.parallel import sequence as seq
    from functional_ds.parallel import tensor as tp
    from functional_ds.parallel.sequence.tiling.tiled import tiled
    from functional_ds.profiling.profiler import profile
    from functional_ds.profiling.record import record
    from functional_ds.remat.policy import RematPolicy
    from functional_ds.remat.remat import checkpoint_name, remat
    from functional_ds.remat.report import RematReport, remat_report
    from functional_ds.second_order.hvp import hvp
    from functional_ds.sharding import grouping as units
    from functional_ds.sharding.layout import Layout, shard, unshard
    from functional_ds.sharding.leaf_map import LeafMap
    from functional_ds.sharding.sources import from_source
    from functional_ds.step.compose import compose, wrap
    from functional_ds.step.open_pass import OpenPass
    from functional_ds.step.pass_gradients import Gradients
    from functional_ds.step.phases import innermost, outermost
    from functional_ds.step.state.state import DonatedStateError, State, UpdateError
    from functional_ds.step.step import Step, Transform
    from functional_ds.step.train_step import train_step
    from functional_ds.step.views.view import View
    from functional_ds.transforms.differentiation.differentiable import differentiable

    from . import (
        checkpointing,
        comm,
        compiling,
        deepspeed,
        fitting,
        interchange,
        jobs,
        memory,
        pipelining,
        profiling,
        scaling,
        testing,
        transforms,
    )
    from . import pipelining as pp

__all__ = [
    "Apply",
    "Checkpoints",
    "CompileReport",
    "DonatedStateError",
    "Evaluation",
    "Gradients",
    "Job",
    "Key",
    "Layout",
    "LeafMap",
    "Logging",
    "OpenPass",
    "Optimizer",
    "PerParameter",
    "RematPolicy",
    "RematReport",
    "State",
    "Step",
    "Transform",
    "UpdateError",
    "View",
    "Weighted",
    "__version__",
    "adagrad",
    "adam",
    "adamw",
    "checkpoint_name",
    "checkpointing",
    "comm",
    "compile_report",
    "compiling",
    "compose",
    "deepspeed",
    "deferred",
    "differentiable",
    "export",
    "fit",
    "fitting",
    "freeze",
    "from_deepspeed",
    "from_ds_config",
    "from_source",
    "functional",
    "hvp",
    "innermost",
    "interchange",
    "jit",
    "jobs",
    "lamb",
    "lion",
    "load",
    "load_job",
    "load_params",
    "memory",
    "moe",
    "muon",
    "one_bit_adam",
    "outermost",
    "param_groups",
    "per_leaf",
    "per_matrix",
    "pipelining",
    "pp",
    "profile",
    "profiling",
    "record",
    "remat",
    "remat_report",
    "run_job",
    "save",
    "scaling",
    "seq",
    "sgd",
    "shard",
    "testing",
    "tiled",
    "tp",
    "train_step",
    "transforms",
    "tree",
    "units",
    "unshard",
    "wrap",
    "zero_one_adam",
]

__version__ = version("functional-ds")

lazy_index(__name__)
