"""Any module × any strategy = plain PyTorch on one device, written without this library."""

import re
from collections.abc import Callable, Mapping
from tempfile import TemporaryDirectory
from typing import Any

import attrs
import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import functional_ds as fds
from functional_ds import comm
from functional_ds import transforms as T
from tests.zoo import derivatives, generative, hugging_face, sequences, vision
from tests.zoo.program import Program

LAWS = settings.default.max_examples > 100

ZOO: Mapping[str, Program] = {
    **vision.PROGRAMS,
    **sequences.PROGRAMS,
    **derivatives.PROGRAMS,
    **generative.PROGRAMS,
    **hugging_face.PROGRAMS,
}
STEPS = 3
ROWS = 8


@attrs.frozen
class Rule:
    """An optimizer of torch's, and ours."""

    torch: Callable[[Any], torch.optim.Optimizer]
    ours: Callable[[], fds.Optimizer]
    tolerance: float = 2e-4


RULES = {
    "sgd": Rule(lambda p: torch.optim.SGD(p, 0.05), lambda: fds.sgd(0.05)),
    "momentum": Rule(
        lambda p: torch.optim.SGD(p, 0.02, momentum=0.9, weight_decay=0.01),
        lambda: fds.sgd(0.02, momentum=0.9, weight_decay=0.01),
    ),
    "adamw": Rule(  # a large eps: the sign of a gradient of nothing but rounding would decide
        lambda p: torch.optim.AdamW(p, 0.01, eps=1e-3, weight_decay=0.1), lambda: fds.adamw(0.01, eps=1e-3, weight_decay=0.1)
    ),
}


@attrs.frozen
class Strategy:
    """How a program is trained."""

    stage: int | None = None
    ranks: int = 1
    accumulate: int = 1
    clip: float | None = None
    remat: str | None = None
    units: str = "blocks"
    live: int = 2
    prefetch: int = 1
    offload: str | None = None

    def transforms(self, module: nn.Module, folder: str) -> list[fds.Transform]:
        """In an order that is allowed."""
        found: list[fds.Transform] = []
        if self.clip is not None:
            found.append(T.clip(self.clip))
        if self.remat is not None:
            numbered = any(
                part.isdigit()
                for path, each in module.named_modules()
                if any(True for _ in each.parameters())
                for part in path.split(".")
            )
            found.append(T.remat(None if numbered else "", policy=self.remat))
        if self.accumulate > 1:
            found.append(T.accumulate(self.accumulate))
        if self.offload is not None:
            found.append(T.offload(self.offload, path=folder) if self.offload == "disk" else T.offload(self.offload))
        if self.stage is not None:
            unit_of = {"blocks": None, "leaves": str, "one": lambda path: "all"}[self.units]
            options = {"max_live_units": self.live, "prefetch": min(self.prefetch, self.live)} if self.stage == 3 else {}
            found.append(T.zero(self.stage, unit_of=unit_of, **options))
        return found


@st.composite
def strategies(draw: st.DrawFn, by_row: bool) -> Strategy:
    stage = draw(st.sampled_from([None, 0, 1, 2, 3, 3]))
    shared = by_row and stage is not None
    return Strategy(
        stage=stage,
        ranks=draw(st.sampled_from([1, 2, 4])) if shared else 1,
        accumulate=draw(st.sampled_from([1, 2])) if by_row else 1,
        clip=draw(st.none() | st.just(0.5)),
        remat=draw(st.sampled_from([None, None, "recompute", "recompute,matmuls=save", "offload"])),
        units=draw(st.sampled_from(["blocks", "leaves", "one"])),
        live=draw(st.integers(1, 3)),
        prefetch=draw(st.integers(0, 2)),
        offload=draw(st.none() | st.sampled_from(["cpu", "disk"])),
    )


def built(program: Program) -> nn.Module:
    torch.manual_seed(5)
    return program.build()


def plain(program: Program, rule: Rule, clip: float | None) -> tuple[list[float], dict[str, Tensor]]:
    """The oracle: torch's own loop."""
    module = built(program)
    trained = [p for p in module.parameters() if p.requires_grad]
    optimizer, losses = rule.torch(trained), []
    for count in range(STEPS):
        loss = module(program.batch(ROWS, count))
        optimizer.zero_grad()
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(trained, clip)
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: p.detach() for name, p in module.named_parameters()}


def cut(batch: Any) -> Any:
    """This rank's rows."""
    world = comm.world()
    return fds.tree.map(lambda x: x.tensor_split(world.size)[world.rank], batch)


def ours(program: Program, rule: Rule, strategy: Strategy, folder: str) -> tuple[list[float], dict[str, Tensor]]:
    module = built(program)
    apply, params = fds.functional(module)
    step = fds.compose(*strategy.transforms(module, folder))(fds.train_step(apply, rule.ours()))
    state, losses = step.init(params), []
    for count in range(STEPS):
        state, metrics = step(state, cut(program.batch(ROWS, count)))
        losses.append(metrics["loss"].item())
    return losses, dict(step.params(state))


WARNED = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # torch's own, on importing forward mode


@WARNED
@pytest.mark.law(21)
@pytest.mark.parametrize("part", range(4 if LAWS else 1))  # of the examples: workers share them
@settings(max_examples=150 if LAWS else 9)
@given(name=st.sampled_from(sorted(ZOO)), rule=st.sampled_from(sorted(RULES)), data=st.data(), seed=st.integers(0, 99))
def test_any_module_under_any_strategy_is_plain_torch(name: str, rule: str, data: st.DataObject, seed: int, part: int) -> None:
    program = ZOO[name]
    strategy = data.draw(strategies(program.by_row), label="strategy")
    event(f"stage {strategy.stage}, {strategy.ranks} ranks")
    check(program, RULES[rule], strategy, seed)


def check(program: Program, rule: Rule, strategy: Strategy, seed: int = 0) -> None:
    with TemporaryDirectory() as folder:
        try:
            results = comm.simulate(ours, program, rule, strategy, folder, world_size=strategy.ranks, seed=seed)
        except RuntimeError as error:
            if program.refused and re.search(program.refused, str(error)):
                return
            raise
        losses, params = plain(program, rule, strategy.clip)
        for found, trained in results:
            torch.testing.assert_close(found, losses, rtol=rule.tolerance, atol=rule.tolerance)
            assert trained.keys() == params.keys()
            for key, value in params.items():
                torch.testing.assert_close(
                    trained[key], value, rtol=rule.tolerance, atol=rule.tolerance, msg=lambda m, key=key: f"{key}: {m}"
                )


@pytest.mark.sample(16)
@WARNED
@pytest.mark.parametrize("name", sorted(ZOO))
def test_every_module_trains_as_in_torch(name: str) -> None:
    """Without a strategy, and in stage 3 on two ranks."""
    program = ZOO[name]
    check(program, RULES["momentum"], Strategy())
    check(program, RULES["momentum"], Strategy(stage=3, ranks=2 if program.by_row else 1))


@WARNED
@pytest.mark.parametrize(("stage", "ranks"), [(0, 1), (1, 2), (3, 1), (3, 2)])
def test_a_function_that_saves_a_param_under_offload(stage: int, ranks: int) -> None:
    """Its param is a lazy tensor, which has no version."""
    check(ZOO["a backward of its own"], RULES["adamw"], Strategy(stage=stage, ranks=ranks, remat="offload"))
