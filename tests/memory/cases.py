"""Compositions of transforms, each with what it needs to be made anew, and the bytes that a run of it holds."""

from collections.abc import Callable
from typing import Any

import attrs
import torch
from hypothesis import strategies as st

import functional_ds as fds
from functional_ds import comm
from functional_ds import transforms as T
from tests.transforms.rules import ROWS, RULES, fresh, linear

UNITS: dict[str, Callable[[str], str] | None] = {
    "by block": None,
    "each leaf": lambda path: path,
    "all in one": lambda path: "all",
    "by length": lambda path: str(len(path) % 3),
}
PRECISIONS: dict[str, Callable[[], fds.Transform]] = {
    "bf16": lambda: T.mixed_precision("bf16"),
    "fp16": lambda: T.mixed_precision("fp16", 8.0),
    "dynamic": lambda: T.mixed_precision("fp16", T.DynamicScale(8.0)),
    "norms wide": lambda: T.mixed_precision("bf16,*scale*=f32"),
    "bf16 states": lambda: T.mixed_precision("bf16", states=torch.bfloat16),
    "no masters": lambda: T.mixed_precision("params=bf16,compute=bf16"),
}


@attrs.frozen
class Composition:
    """A step as data."""

    rule: str
    stage: int | None
    units: str
    precision: str | None
    micro_batches: int
    ema: bool

    def make(self, *more: fds.Transform) -> fds.Step:
        """The step."""
        chain = [T.ema(0.5)] if self.ema else []
        chain += [PRECISIONS[self.precision]()] if self.precision else []
        chain += [] if self.stage is None else [T.zero(self.stage, unit_of=UNITS[self.units])]
        chain += [T.accumulate(self.micro_batches), *more]
        return fds.compose(*chain)(fds.train_step(linear, RULES[self.rule]))

    def held(self) -> fds.memory.Memory:
        """What a rank holds after some steps."""
        sizes: list[int] = []
        step, here = self.make(fds.memory.noted(sizes)), comm.world()
        state = step.init(fresh())
        for count in range(2):
            rows = torch.arange(ROWS * self.micro_batches) + count
            state, _ = step(state, rows.tensor_split(here.size)[here.rank])
        assert sizes[0] == sizes[1]
        return fds.memory.measured(state, gradients=sizes[0])


def compositions(**fixed: Any) -> st.SearchStrategy[Composition]:
    """Any composition, but for what is given."""
    parts: dict[str, st.SearchStrategy[Any]] = {
        "rule": st.sampled_from(sorted(RULES)),
        "stage": st.sampled_from((0, 1, 2, 3)),
        "units": st.sampled_from(sorted(UNITS)),
        "precision": st.none() | st.sampled_from(sorted(PRECISIONS)),
        "micro_batches": st.sampled_from((1, 2)),
        "ema": st.booleans(),
    }
    return st.builds(Composition, **{**parts, **fixed})
