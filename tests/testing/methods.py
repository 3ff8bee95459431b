"""The library's transforms and optimizers, and those that the docs work out, with what ``holds`` says of them."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import attrs

import functional_ds as fds
from functional_ds import comm
from functional_ds import transforms as T
from tests.step.worked import worked

__all__ = ["METHODS", "Tested"]


@attrs.frozen
class Tested:
    """A method, what ``holds`` is told, and each law that is neither ok nor without a condition that the problem meets."""

    make: Any
    options: Mapping[str, Any] = attrs.field(factory=dict)
    but: Mapping[str, str] = attrs.field(factory=dict)


def mean(grads: Any, memory: Any, group: comm.Group) -> Any:
    return comm.all_reduce(grads, group, op="avg"), memory


def top_k() -> fds.Transform:
    return T.compressed_gradients(comm.codecs.TopK(1.0))


def warmup() -> fds.Transform:
    return T.schedule(T.warmup(3))


def muon() -> Any:
    return fds.muon(0.05, fds.adamw(0.05))


HALF = ("skipped steps", "bf16", "fp16")  # refused: it has a precision, or must come after it
CLIPS = ("clip before", "clip after")  # not applicable: the gradient's length does not matter
OWN_REDUCTION = dict.fromkeys(("replicated", "pipelines"), "not applicable")
KEPT_BY_RANK = dict.fromkeys(("slots", "checkpoints"), "refused")  # what a rank owes cannot be given to another

LIBRARY = {
    "accumulate": Tested(partial(T.accumulate, 2)),
    "clip": Tested(partial(T.clip, 0.1)),
    "compressed_gradients": Tested(top_k, {}, OWN_REDUCTION | KEPT_BY_RANK),
    "ema": Tested(partial(T.ema, 0.9)),
    "mixed_precision": Tested(
        partial(T.mixed_precision, "bf16"), {"order": "before", "within": 0.05}, dict.fromkeys(HALF, "refused")
    ),
    "offload": Tested(partial(T.offload, "cpu"), {}, dict.fromkeys(HALF, "refused")),
    "remat": Tested(partial(T.remat, "")),
    "replicated": Tested(partial(T.replicated, reduce=mean), {}, OWN_REDUCTION),
    "schedule": Tested(warmup),
    **{f"zero {stage}": Tested(partial(T.zero, stage), {}, OWN_REDUCTION) for stage in range(4)},
    "adagrad": Tested(partial(fds.adagrad, 0.05)),
    "adam": Tested(partial(fds.adam, 0.05)),
    "adamw": Tested(partial(fds.adamw, 0.05)),
    "lamb": Tested(partial(fds.lamb, 0.05)),
    "lion": Tested(partial(fds.lion, 0.01), {}, dict.fromkeys(CLIPS, "not applicable")),
    "muon": Tested(muon),
    "sgd": Tested(partial(fds.sgd, 0.1, momentum=0.5)),
}


def documented(name: str) -> fds.Transform:
    """The docs' transform; a function of this module, so that processes can make it."""
    return worked()[name]


DOCS: dict[str, dict[str, str]] = {
    "count_rows": {"slots": "wrong"},  # each rank counts its own rows, as the page says
    "ema": {"slots": "refused"},  # after zero its slot is a tree of flat tensors, of which no checkpoint knows the leaves
    "power_sgd": OWN_REDUCTION | KEPT_BY_RANK,
    "diagonal": {
        "accumulate after": "wrong",  # the curvature of a micro-batch
        "pipelines": "refused",  # a stage has not all of them
    },
    "ridge": {"pipelines": "refused"},  # the penalty would be of the last stage's params alone
    "sam": {"accumulate after": "wrong"},  # the sharpness of a micro-batch
    "scaled_input": {"pipelines": "refused"},  # the last stage's input is no batch
    "sign_gradient": {"clip after": "not applicable", "bf16": "wrong"},  # signs of rounded zeros
    "unit_gradient": {"clip after": "not applicable"},
}
METHODS = LIBRARY | {f"docs {name}": Tested(partial(documented, name), {}, DOCS.get(name, {})) for name in worked()}
