"""``Subject``: what a job trains, made from the model that it names: params, the loss of a batch, and batches."""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from importlib import import_module
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from functional_ds import comm
from functional_ds.base import tree
from functional_ds.jobs.entries.call_entry import CallEntry, parameters_of
from functional_ds.jobs.entries.job_errors import JobError, within
from functional_ds.modules.deferred_init import deferred
from functional_ds.modules.functional import functional
from functional_ds.step.step import Step
from functional_ds.step.train_step import train_step

from .job import Job
from .resolve import Surroundings, function_and_arguments, made
from .strategy import schedule_of, strategy_of

LossFn = Callable[[Any, Any], Any]  # of a model, which is called as a module is, and a batch


@attrs.frozen(eq=False)
class OwnBatches:
    """The batches of a model that provides them, instead of a text."""

    make: Callable[[int], Any]
    whole: int  # rows of a global batch

    def batch(self, split: str, step: int, *, rows: int, context: int, seed: int = 0, first_row: int = 0) -> Any:
        """Rows of a global batch, which is the same on any number of ranks."""
        with _seeded((1_000_003 * seed + 2 * step + (split == "validation")) % 2**63):
            made = self.make(self.whole)
        return tree.map(lambda x: x[first_row : first_row + rows] if isinstance(x, Tensor) and x.dim() else x, made)


@attrs.frozen(eq=False)
class Subject:
    """A model, and what a step needs of it.

    Attributes:
        name: as in the job.
        params: by name; without values on the meta device.
        loss: ``loss(params, batch)``; None if only shapes are known.
        batch: ``batch(rows)``, an example batch of a step; None if only shapes are known.
        apply: the model as a function of its params; None if only shapes are known.
        batches: the model's batches; None if they come from the job's text.
        tokens: of a row; None if rows have none.
        tp_plan: how layers are split over the axis tp, as for ``T.tensor_parallel``; None for the plan of the model's config.
        sequence: how sequences are split over sp: arguments of ``T.sequence``; None if unknown.
        experts: a pattern for the paths of experts, as for ``T.experts``; None if there are none.
        stages: of a pipeline, once the model is split.
    """

    name: str
    params: dict[str, Tensor]
    loss: LossFn | None = None
    batch: Callable[[int], Any] | None = None
    apply: Any = None
    batches: OwnBatches | None = None
    tokens: int | None = None
    tp_plan: Mapping[str, Any] | None = None
    sequence: Mapping[str, Any] | None = None
    experts: str | None = None
    stages: Any = None
    _cut: Callable[[int, Mapping[str, Any], Any], tuple[Any, dict[str, Tensor]]] | None = attrs.field(default=None, alias="cut")

    @property
    def numel(self) -> int:
        """The number of parameters."""
        return sum(leaf.numel() for leaf in self.params.values())

    @property
    def config(self) -> Any:
        """Hugging Face's config of the model, or None."""
        config = getattr(getattr(self.apply, "module", None), "config", None)
        return config if hasattr(config, "get_text_config") else None

    def layer_plan(self) -> Mapping[str, Any]:
        """How layers are split over tp.

        Raises:
            ValueError: it is unknown.
        """
        if self.tp_plan is not None:
            return self.tp_plan
        module = getattr(self.apply, "module", None)
        if module is None:
            raise ValueError("the model does not define how layers are sliced")
        plan: Mapping[str, Any] = import_module("functional_ds.parallel.tensor").plan_of(module)
        return plan

    def piped_for(self, job: Job) -> "Subject":
        """The same, split into the stages of the job's pipeline schedule, if it has one.

        Raises:
            JobError: the model cannot be split so.
        """
        call = job.transform("pipeline")
        if call is None or self.stages is not None:
            return self
        if job.deferred:
            problem = "a pipeline's stages are made from a whole model; leave one of the two out"
            raise JobError(problem, entry="deferred", value=True)
        schedule, arguments = schedule_of(job), call.arguments
        with within("strategy.pipeline", value=arguments):
            options: dict[str, Any] = {name: arguments[name] for name in ("by", "blocks") if name in arguments}
            if self._cut is None:
                raise JobError("only shapes are known, and a pipeline needs the model", value=arguments)
            stages, params = self._cut(schedule.stages, options, job)
        return attrs.evolve(self, loss=stages, params=params, apply=stages.apply, stages=stages)

    def step(self, job: Job) -> Step:
        """The job's step, on a rank of its mesh; for a pipeline, of a subject from ``piped_for``."""
        around = Surroundings(comm.mesh(**job.mesh) if job.mesh else None, self)
        strategy, optimizer = strategy_of(job, around)
        return strategy(train_step(self.loss, optimizer, seed=job.seed))  # type: ignore[arg-type]


def subject_of(job: Job, *, device: str) -> Subject:
    """What a job trains, on a device; ``"meta"`` is for shapes only.

    Raises:
        JobError: the job's model or loss is unsupported.
    """
    parts: dict[str, Any] = {}

    def build() -> nn.Module:
        parts.update(_parts(job, device))
        module: nn.Module = parts["module"]
        return module

    shapes = device == "meta"
    with _seeded(job.seed):
        if job.deferred and not shapes:
            apply, params = deferred(build, device=device)
        else:
            with torch.device("meta") if shapes else nullcontext():
                module = build()
            apply, params = functional(module.to(device))
    bare = import_module("functional_ds.memory.predict").without_values if shapes else lambda held: held
    params = bare(params)
    name, batches = job.model.name, None
    if "loss" in parts:
        loss, batches = parts["loss"], OwnBatches(parts["batch"], job.data.rows)
    else:
        loss = TokenLoss(apply.module, loss_function(job))

    def batch(rows: int) -> Any:
        if batches is None:
            tokens = torch.randint(0, known_tokens(apply.module) or 2, (rows, job.data.context), device=device)
            return {"input_ids": tokens, "shift_labels": tokens}
        with torch.device("cpu"):
            sample = parts["batch"](rows)
        return tree.map(lambda x: x.to(device) if isinstance(x, Tensor) else x, sample)

    def cut(count: int, options: Mapping[str, Any], job: Job) -> tuple[Any, dict[str, Tensor]]:
        module, whole = parts["module"], import_module("functional_ds.pipelining").cut
        if batches is not None:
            pieces = whole(LossOfBatch(module, loss), count, example=batch(2), inputs=lambda x: {"batch": x}, **options)
        else:
            example = batch(2)
            if job.transform("sequence") is not None:
                example |= {"position_ids": example["input_ids"]}
            pieces = whole(module, count, example=example, inputs=loss.inputs, loss=loss.of_output, **options)
        return pieces[0], bare(pieces[1])

    given = Subject(name, params, lambda held, rows: loss(functools.partial(apply, held), rows), batch, apply, batches, cut=cut)
    known: dict[str, Any] = {key: parts.get(key) for key in ("tp_plan", "sequence", "experts")}
    if given.config is not None:
        known = {"tp_plan": None, "sequence": {}, "experts": _experts_of(apply.module)}
    return attrs.evolve(given, tokens=job.data.context if batches is None else parts.get("tokens"), **known)


def known_tokens(module: nn.Module) -> int:
    """The rows of the largest embedding."""
    return max((layer.num_embeddings for layer in module.modules() if isinstance(layer, nn.Embedding)), default=0)


def _experts_of(module: nn.Module) -> str | None:
    """A pattern for the experts' paths, if a model has stacks of them."""
    stacks = [path for path, leaf in module.named_parameters() if ".experts." in path and leaf.dim() == 3]
    return r"\.experts\." if stacks else None


_KINDS: dict[str, tuple[Any, str]] = {
    "module": (nn.Module, "a torch.nn.Module"),
    "loss": (Callable, "loss(model, batch)"),
    "batch": (Callable, "batch(rows)"),
    "tokens": (int, "the tokens of a row"),
    "tp_plan": (Mapping, "a dict from paths to words, such as {'0': 'colwise'}"),
    "sequence": (Mapping, "a dict of arguments of T.sequence, such as {'layout': 'zigzag'}"),
    "experts": (str, "a regular expression for their paths, such as 'experts'"),
}


def _parts(job: Job, device: str) -> Mapping[str, Any]:
    """The parts of the job's model: a module, and what else it provides."""
    call = job.model
    if call.arguments.get("weights") and device == "meta":
        call = CallEntry(call.name, {**call.arguments, "weights": False})
    if job.deferred and call.arguments.get("weights"):
        raise JobError("weights are loaded at once; leave one of the two out", entry="deferred", value=True)
    built = made(call, "model", job, entry="model", seed=job.seed, folder=job.folder)
    parts: Mapping[str, Any] = built if isinstance(built, Mapping) else {"module": built}
    with within(f"model.{call.name}"):
        if not isinstance(parts.get("module"), nn.Module):
            type_name = type(parts.get("module", built)).__name__
            raise JobError(f"it made a {type_name}, and must make a torch.nn.Module, or a dict of {', '.join(_KINDS)}")
        for name, value in parts.items():
            if name not in _KINDS:
                raise JobError(f"it made a dict with the unknown key {name!r}; it should have {', '.join(_KINDS)}")
            if not isinstance(value, _KINDS[name][0]):
                raise JobError(f"its {name} should be {_KINDS[name][1]}")
        if ("loss" in parts) != ("batch" in parts):
            raise JobError("it made one of loss and batch; a step needs both: loss(model, batch), batch(rows)")
    return parts


def loss_function(job: Job) -> Any:
    """A function of logits and targets."""
    with within(f"loss.{job.loss.name}"):
        function, arguments = function_and_arguments(job.loss, "loss", job, Surroundings())
    return lambda logits, targets: function(logits, targets, **arguments)


@attrs.frozen(eq=False)
class TokenLoss:
    """The loss of a model that returns logits of tokens.

    Attributes:
        module: for the names of its inputs.
        function: from logits and targets to a loss.
    """

    module: nn.Module
    function: Callable[[Any, Tensor], Any]

    def __call__(self, model: Callable[..., Any], batch: dict[str, Tensor]) -> Any:
        """Of a batch."""
        given = self.inputs(batch)
        return self.of_output(model(**given) if isinstance(given, dict) else model(given), batch)

    def inputs(self, batch: dict[str, Tensor]) -> Any:
        """Keyword arguments for a model that has ``input_ids``, else the tokens alone."""
        names = parameters_of(self.module.forward)
        arguments = {name: leaf for name, leaf in batch.items() if name in names and name != "shift_labels"}
        return arguments if "input_ids" in names else batch["input_ids"]

    def of_output(self, output: Any, batch: dict[str, Tensor]) -> Any:
        """The loss; logits are the output, or an attribute of it."""
        return self.function(getattr(output, "logits", output), batch["shift_labels"])


class LossOfBatch(nn.Module):
    """A module that returns the loss of a batch, for a pipeline's last stage.

    Args:
        module: the model.
        loss: ``loss(model, batch)``.
    """

    def __init__(self, module: nn.Module, loss: LossFn) -> None:
        super().__init__()
        self.module, self._loss = module, loss

    def forward(self, batch: Any) -> Any:
        """The loss."""
        return self._loss(self.module, batch)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """A context in which torch's default generator starts with this seed; its state is restored afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield
