"""Programs that use DeepSpeed's names and are refused: what they ask for would be dropped silently."""

import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from functional_ds.deepspeed import UsageError, initialize, zero
from tests.refusals.refusal import Refusal


def engine_of(module: nn.Module | None = None, *, stage: int = 2, optimizer: Any = None) -> Any:
    sgd = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}} if optimizer is None else {}
    config = {"train_batch_size": 4, "zero_optimization": {"stage": stage}, **sgd}
    module = nn.Linear(3, 2) if module is None else module
    return initialize(model=module, optimizer=optimizer, config=config)[0]


def changed(change: Callable[[nn.Linear], Any], stage: int = 2) -> Callable[[], Any]:
    """A forward pass after a change of the engine's module."""

    def run() -> None:
        engine = engine_of(stage=stage)
        change(engine.module)
        engine(torch.ones(4, 3))

    return run


def optimizer_with(prepare: Callable[[torch.optim.Optimizer], Any]) -> Callable[[], Any]:
    """An engine with an optimizer that the program has used before."""

    def run() -> None:
        module = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        module(torch.ones(4, 3)).sum().backward()
        prepare(optimizer)
        engine_of(module, optimizer=optimizer)

    return run


def assign(module: nn.Linear) -> None:
    module.weight.data = torch.ones(2, 3)


def replace(module: nn.Linear) -> None:
    module.weight = nn.Parameter(torch.ones(2, 3))


def gathered_by_nobody() -> None:
    module = engine_of(stage=3).module
    with zero.GatheredParameters(module.weight, modifier_rank=1):
        module.weight.data.zero_()


def frozen() -> None:
    engine = engine_of(nn.Linear(3, 2).requires_grad_(False))
    engine.backward(engine(torch.ones(4, 3)).sum())


REFUSALS = [
    Refusal(
        what="`engine.module.double()`, `half()` and the like",
        error=RuntimeError,
        says=r"'weight' of engine\.module is now torch\.float64 .* the step has torch\.float32",
        advises="before initialize, or the dtype by bf16 or fp16",
        why="The step trains what it stores, in its dtype.",
        instead="Change the module before `initialize`, or enable `bf16` or `fp16` in the config.",
        program=changed(lambda module: module.double()),
    ),
    Refusal(
        what="a parameter of `engine.module` that is replaced",
        error=RuntimeError,
        says="'weight' of engine.module is not the parameter that it was",
        advises=r"parameter\.data\.copy_",
        why="The step trains the parameter from `initialize`; the new one would never be used.",
        instead="Write into the parameter: `parameter.data.copy_(value)`.",
        program=changed(replace),
    ),
    Refusal(
        what="`parameter.data = value` in stage 3, outside of `GatheredParameters`",
        error=RuntimeError,
        says="'weight' was assigned a value, and its values are in shards",
        advises=r"within zero\.GatheredParameters",
        why="No shard would get the value.",
        instead="Assign it within `zero.GatheredParameters(parameter, modifier_rank=0)`.",
        program=changed(assign, stage=3),
    ),
    Refusal(
        what="`GatheredParameters(modifier_rank=)` of a rank that does not exist",
        error=ValueError,
        says="modifier_rank=1, and there are 1 ranks",
        advises="ranks from 0 on",
        why="No rank's values would count.",
        instead="Pass the rank whose values count.",
        program=gathered_by_nobody,
    ),
    Refusal(
        what="an optimizer that has made updates, in `initialize`",
        error=UsageError,
        says="this SGD has made updates",
        advises="pass a new one",
        why="The engine's moments begin at zero; DeepSpeed keeps the optimizer's in stage 0 and drops them in others.",
        instead="Pass a new optimizer, and load its state with `engine.load_checkpoint` or `safe_set_full_optimizer_state`.",
        program=optimizer_with(lambda optimizer: optimizer.step()),
    ),
    Refusal(
        what="an optimizer with hooks, in `initialize`",
        error=UsageError,
        says="this SGD has hooks",
        advises=r"around engine\.step\(\)",
        why="The engine never calls its `step()`, so the hooks would not run.",
        instead="Call the functions around `engine.step()`.",
        program=optimizer_with(lambda optimizer: optimizer.register_step_post_hook(lambda *_: None)),
    ),
    Refusal(
        what="`engine.optimizer.add_param_group`",
        error=RuntimeError,
        says="add_param_group",
        advises="pass all groups to initialize",
        why="Parameters of a further group would have no optimizer state.",
        instead="Pass all groups to `initialize`; those of rate 0 stay unchanged.",
        program=lambda: engine_of().optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]}),
    ),
    Refusal(
        what="a model on the meta device, in `initialize`",
        error=UsageError,
        says="tensors on the meta device",
        advises=r"within zero\.Init",
        why="It has no values.",
        instead="Build it within `zero.Init()`, or give it values by `to_empty` and `load_state_dict`.",
        program=lambda: engine_of(nn.Linear(3, 2, device="meta")),
    ),
    Refusal(
        what="`engine.backward` of a model whose parameters are all frozen",
        error=UsageError,
        says="no parameter of the model requires a gradient",
        advises=r"requires_grad_\(\) before initialize",
        why="It would train nothing.",
        instead="Call `requires_grad_()` on what is to be trained before `initialize`.",
        program=frozen,
    ),
    Refusal(
        what="an engine's checkpoint with the tag `latest`",
        error=ValueError,
        says="tag='latest'",
        advises="other than `latest`",
        why="The file `latest` names the newest checkpoint.",
        instead="Pass another tag.",
        program=lambda: engine_of().save_checkpoint(tempfile.mkdtemp(), tag="latest"),
    ),
    Refusal(
        what="a function or a lock in `client_state`",
        error=ValueError,
        says="a builtins.function cannot be saved",
        advises="keep plain values, tensors and arrays",
        why="It cannot be pickled.",
        instead="Keep what it was made from.",
        program=lambda: engine_of().save_checkpoint(tempfile.mkdtemp(), client_state={"f": lambda: None}),
    ),
]
