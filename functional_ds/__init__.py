"""Training as functions: a step is pure, and every way of making it parallel maps steps to steps."""

from . import comm, tree
from .functional import Apply, functional
from .key import Key
from .layout import Layout, shard, unshard
from .optim import Optimizer, adamw, sgd
from .state import DonatedStateError, State
from .step import Step, Transform, compose, wrap
from .tape import Tape
from .trainable import freeze
from .training import train_step
from .weighted import Weighted

from . import transforms  # isort: skip  (the layer above: it imports the names above)

__all__ = [
    "Apply",
    "DonatedStateError",
    "Key",
    "Layout",
    "Optimizer",
    "State",
    "Step",
    "Tape",
    "Transform",
    "Weighted",
    "adamw",
    "comm",
    "compose",
    "freeze",
    "functional",
    "sgd",
    "shard",
    "train_step",
    "transforms",
    "tree",
    "unshard",
    "wrap",
]
