"""Training as functions: a step is pure, and every way of making it parallel maps steps to steps."""

from . import checkpointing, comm, interchange, memory, pipelining, saving, tree, units
from .checkpointing import load, save
from .deferring import deferred
from .fitting import fit
from .functional import Apply, functional
from .interchange import export, from_deepspeed, load_params
from .key import Key
from .lamb import lamb
from .layout import Layout, shard, unshard
from .materialise import from_source
from .muon import muon
from .one_bit import one_bit_adam, zero_one_adam
from .optim import Optimizer, adamw, sgd
from .optimizers import adagrad, adam, lion
from .parts import Parts
from .remat import checkpoint_name, remat
from .route import route
from .routing import ByLeaf
from .saved import RematReport, remat_report
from .saving import Saving
from .state import DonatedStateError, State
from .step import Step, Transform, compose, wrap
from .tape import Tape
from .trainable import freeze
from .training import train_step
from .weighted import Weighted

from . import transforms  # isort: skip  (the layer above: it imports the names above)

__all__ = [
    "Apply",
    "ByLeaf",
    "DonatedStateError",
    "Key",
    "Layout",
    "Optimizer",
    "Parts",
    "RematReport",
    "Saving",
    "State",
    "Step",
    "Tape",
    "Transform",
    "Weighted",
    "adagrad",
    "adam",
    "adamw",
    "checkpoint_name",
    "checkpointing",
    "comm",
    "compose",
    "deferred",
    "export",
    "fit",
    "freeze",
    "from_deepspeed",
    "from_source",
    "functional",
    "interchange",
    "lamb",
    "lion",
    "load",
    "load_params",
    "memory",
    "muon",
    "one_bit_adam",
    "pipelining",
    "remat",
    "remat_report",
    "route",
    "save",
    "saving",
    "sgd",
    "shard",
    "train_step",
    "transforms",
    "tree",
    "units",
    "unshard",
    "wrap",
    "zero_one_adam",
]
