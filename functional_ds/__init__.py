"""Training as functions: a step is pure, and every way of making it parallel maps steps to steps."""

from . import comm, pipelining, tree
from .deferring import deferred
from .functional import Apply, functional
from .key import Key
from .lamb import lamb
from .layout import Layout, shard, unshard
from .materialise import from_source
from .muon import muon
from .one_bit import one_bit_adam, zero_one_adam
from .optim import Optimizer, adamw, sgd
from .optimizers import adagrad, adam, lion
from .parts import Parts
from .route import route
from .routing import ByLeaf
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
    "State",
    "Step",
    "Tape",
    "Transform",
    "Weighted",
    "adagrad",
    "adam",
    "adamw",
    "comm",
    "compose",
    "deferred",
    "freeze",
    "from_source",
    "functional",
    "lamb",
    "lion",
    "muon",
    "one_bit_adam",
    "pipelining",
    "route",
    "sgd",
    "shard",
    "train_step",
    "transforms",
    "tree",
    "unshard",
    "wrap",
    "zero_one_adam",
]
