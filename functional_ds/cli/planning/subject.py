"""A model as the command line names it: a function or class, a Hugging Face config, or a file of parameter shapes."""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from functional_ds.base import tree
from functional_ds.base.files import parse_json, read_text
from functional_ds.base.marks import without_values
from functional_ds.base.weighted import Weighted
from functional_ds.cli.words.errors_in_one_line import CommandError
from functional_ds.modules.functional import functional
from functional_ds.parallel.experts.experts_registry import register_experts
from functional_ds.parallel.sequence.hugging_face import register_attention
from functional_ds.parallel.tensor.words import plan_of
from functional_ds.pipelining.stages.stages import Stages
from functional_ds.pipelining.tracing.cut import cut
from functional_ds.step.step import Step

from .candidate import Candidate

__all__ = ["LossOfBatch", "Subject", "subject_of"]

LossFn = Callable[[Any, Any], Any]
_KEYS = {"module", "loss", "batch", "tokens", "tp_plan", "sequence", "experts"}


@attrs.frozen(eq=False)
class Subject:
    """A model, and what a step of it needs.

    Attributes:
        name: as it was given.
        params: by name; with values only where it was asked for.
        loss: ``loss(params, batch)``; None where only shapes are known.
        batch: ``batch(rows)``, a micro-batch's tensors; None where only shapes are known.
        tokens: of a row; None where rows have none.
        config: Hugging Face's config of the model, or None.
        tp_plan: how layers are cut over the axis tp, as ``T.tensor_parallel`` takes it; None where nobody said.
        sequence: how sequences are cut over sp: arguments of ``T.sequence``; None where nobody said.
        experts: a pattern for the paths of experts, as ``T.experts`` takes it; None where there are none.
        stages: ``stages(count)``: the stages and params of a pipeline; None where only shapes are known.
    """

    name: str
    params: dict[str, Tensor]
    loss: LossFn | None = None
    batch: Callable[[int], Any] | None = None
    tokens: int | None = None
    config: Any = None
    tp_plan: Mapping[str, Any] | None = None
    sequence: Mapping[str, Any] | None = None
    experts: str | None = None
    stages: Callable[[int], tuple[Any, dict[str, Tensor]]] | None = None

    @property
    def numel(self) -> int:
        """How many parameters."""
        return sum(leaf.numel() for leaf in self.params.values())

    def piped_for(self, candidate: Candidate) -> "Subject":
        """The same, with a pipeline's stages as its loss where the candidate has one.

        Raises:
            CommandError: the model cannot be cut into so many.
        """
        if candidate.pp == 1 or isinstance(self.loss, Stages):
            return self
        count = candidate.axes.pipeline(candidate.micro_batches).stages
        if self.stages is None:
            raise CommandError(f"--pp {candidate.pp}: {self.name} has no loss and no batch, so nothing can be cut into stages")
        try:
            found, params = self.stages(count)
        except (ValueError, TypeError) as error:
            raise CommandError(f"--pp {candidate.pp}: {self.name} cannot be cut into {count} stages: {error}") from error
        return attrs.evolve(self, loss=found, params=params)

    def step(self, candidate: Candidate) -> Step:
        """A candidate's step of it, on a rank of the mesh; of a pipeline's, as ``piped_for`` gives it."""
        return candidate.step(self.loss, tp_plan=self.tp_plan, cut=self.sequence, pattern=self.experts)

    def line(self, candidate: Candidate) -> str:
        """The candidate's transforms of it, as Python."""
        return candidate.line(cut=self.sequence, pattern=self.experts)


def subject_of(name: str, *, seq: int = 1024, device: str = "meta", axes: Collection[str] = ()) -> Subject:
    """The model of a name.

    ``package.module:function`` and ``file.py:function`` name a function without arguments, a class, or a module. It gives an
    ``nn.Module``, or a mapping with ``module``, ``loss(model, batch)`` and ``batch(rows)``, perhaps ``tokens`` of a row,
    ``tp_plan``, ``sequence`` and ``experts``, as above. A folder or file with a Hugging Face config gives a
    model for causal language modelling. A JSON file ``{"name": [sizes]}`` or a safetensors file gives shapes alone.

    Args:
        name: which.
        seq: tokens of a row, for Hugging Face's models.
        device: ``"meta"`` for shapes alone.
        axes: those of several ranks, for which Hugging Face's models get attention, experts and a loss that know them.

    Raises:
        CommandError: there is no such thing, or it is of another kind.
    """
    path = Path(name)
    if (path.is_dir() and (path / "config.json").is_file()) or path.name == "config.json":
        return _hugging_face(name, path / "config.json" if path.is_dir() else path, seq, device, axes)
    if path.suffix in (".json", ".safetensors") or path.is_dir():
        if not path.exists():
            raise CommandError(f"MODEL: there is no file {name}")
        return Subject(name, _shapes(path))
    head, colon, attribute = name.rpartition(":")
    if not colon or not head or not attribute:
        raise CommandError(
            f"MODEL: {name!r} is neither a file nor 'module:function'; name a function, a Hugging Face config.json, or a "
            "file of shapes (.json, .safetensors)"
        )
    return _of_code(name, _attribute(head, attribute), device)


# -- functions and classes ---------------------------------------------------------------------------------------------


def _attribute(head: str, attribute: str) -> Any:
    if head.endswith(".py"):
        file = Path(head)
        if not file.is_file():
            raise CommandError(f"MODEL: there is no file {head}")
        spec = importlib.util.spec_from_file_location(file.stem, file)
        if spec is None or spec.loader is None:
            raise CommandError(f"MODEL: {head} cannot be imported")
        module = importlib.util.module_from_spec(spec)
        sys.modules[file.stem] = module  # records and pickles look their module up there
        sys.path.insert(0, str(file.parent.resolve()))
        load: Callable[[], Any] = lambda: spec.loader.exec_module(module) or module  # type: ignore[union-attr]  # noqa: E731
    else:
        sys.path.insert(0, str(Path.cwd()))
        load = lambda: importlib.import_module(head)  # noqa: E731
    try:
        found = load()
    except Exception as error:
        raise CommandError(f"MODEL: importing {head} raised {type(error).__name__}: {error}") from error
    finally:
        sys.path.pop(0)
    if not hasattr(found, attribute):
        raise CommandError(f"MODEL: {head} has no {attribute!r}")
    return getattr(found, attribute)


def _of_code(name: str, target: Any, device: str) -> Subject:
    try:
        with torch.device(device):
            made = target() if callable(target) and not isinstance(target, nn.Module) else target
    except Exception as error:
        raise CommandError(f"MODEL: {name} raised {type(error).__name__}: {error}") from error
    parts: Mapping[str, Any] = made if isinstance(made, Mapping) else {"module": made}
    unknown = sorted(parts.keys() - _KEYS)
    if unknown or not isinstance(parts.get("module"), nn.Module):
        what = f"the unknown key {unknown[0]!r}" if unknown else f"a {type(parts.get('module', made)).__name__}"
        raise CommandError(f"MODEL: {name} gives {what}; it should give an nn.Module, or a dict of {', '.join(sorted(_KEYS))}")
    if ("loss" in parts) != ("batch" in parts):
        raise CommandError(f"MODEL: {name} gives one of loss and batch; a step needs both: loss(model, batch), batch(rows)")
    if not isinstance(parts.get("tp_plan", {}), Mapping):
        raise CommandError(f"MODEL: {name}: tp_plan should be a dict from paths to words, such as {{'0': 'colwise'}}")
    if not isinstance(parts.get("sequence", {}), Mapping):
        raise CommandError(
            f"MODEL: {name}: sequence should be a dict of arguments of T.sequence, such as {{'layout': 'zigzag'}}"
        )
    if not isinstance(parts.get("experts", ""), str):
        raise CommandError(f"MODEL: {name}: experts should be a regular expression for their paths, such as 'experts'")
    found = _of_module(name, parts["module"], parts.get("loss"), parts.get("batch"), parts.get("tokens"), device=device)
    return attrs.evolve(found, tp_plan=parts.get("tp_plan"), sequence=parts.get("sequence"), experts=parts.get("experts"))


def _of_module(
    name: str,
    module: nn.Module,
    loss: Callable[..., Any] | None,
    batch: Callable[[int], Any] | None,
    tokens: int | None,
    *,
    device: str,
    config: Any = None,
) -> Subject:
    apply, params = functional(module)
    if device == "meta":
        params = without_values(params)
    if loss is None or batch is None:
        return Subject(name, params, tokens=tokens, config=config)
    make, value = batch, loss

    def loss_of(held: Any, rows: Any) -> Any:
        return value(lambda *args, **kwargs: apply(held, *args, **kwargs), rows)

    def rows_of(count: int) -> Any:
        with torch.device("cpu"):
            made = make(count)
        return tree.map(lambda x: x.to(device) if isinstance(x, Tensor) else x, made)

    def stages(count: int) -> tuple[Any, dict[str, Tensor]]:
        found, params = cut(LossOfBatch(module, value), count, example=rows_of(2), inputs=lambda given: {"batch": given})
        return found, without_values(params) if device == "meta" else params

    return Subject(name, params, loss_of, rows_of, tokens, config, stages=stages)


class LossOfBatch(nn.Module):
    """A module that returns the loss of a batch, for a pipeline's last stage.

    Args:
        module: the model.
        loss: ``loss(model, batch)``.
    """

    def __init__(self, module: nn.Module, loss: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self._loss = module, loss

    def forward(self, batch: Any) -> Any:
        """The loss."""
        return self._loss(self.module, batch)


# -- Hugging Face's models ---------------------------------------------------------------------------------------------


def _hugging_face(name: str, path: Path, seq: int, device: str, axes: Collection[str]) -> Subject:
    if not path.is_file():
        raise CommandError(f"MODEL: there is no file {path}")
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise CommandError("MODEL: a Hugging Face config needs transformers: pip install transformers") from error
    if "sp" in axes:
        register_attention()
    try:
        config = AutoConfig.from_pretrained(str(path.parent))
        with torch.device(device):
            module = AutoModelForCausalLM.from_config(config, **({"attn_implementation": "fds_ring"} if "sp" in axes else {}))
        pattern = _experts_of(module)
        if "ep" in axes and pattern is not None:
            module.set_experts_implementation(register_experts())
    except (ValueError, OSError, KeyError, TypeError, AttributeError) as error:
        raise CommandError(f"MODEL: {path} gives no model for causal language modelling: {error}") from error
    config.use_cache = False

    def loss(model: Callable[..., Any], batch: Mapping[str, Tensor]) -> Tensor:
        found: Tensor = model(input_ids=batch["input_ids"], labels=batch["input_ids"], use_cache=False).loss
        return found

    def summed(model: Callable[..., Any], batch: Mapping[str, Tensor]) -> Weighted:
        return _of_tokens(model(**_inputs(batch)), batch)

    def batch(rows: int) -> dict[str, Tensor]:
        tokens = torch.randint(0, config.get_text_config().vocab_size, (rows, seq))
        return {"input_ids": tokens, "labels": tokens} if cuts else {"input_ids": tokens}

    def stages(count: int) -> tuple[Any, dict[str, Tensor]]:
        tokens = torch.zeros(2, seq, dtype=torch.int64, device=device)
        example = dict.fromkeys(("input_ids", "shift_labels", *["position_ids"] * ("sp" in axes)), tokens)
        return cut(module, count, example=example, inputs=_inputs, loss=_of_tokens)

    try:
        plan: dict[str, str] | None = plan_of(module)
    except ValueError:
        plan = None
    cuts = "sp" in axes or "pp" in axes
    found = _of_module(name, module, summed if cuts else loss, batch, seq, device=device, config=config)
    return attrs.evolve(found, tp_plan=plan, sequence={}, experts=pattern, stages=stages)


def _experts_of(module: nn.Module) -> str | None:
    """A pattern for the experts' paths, where a model has stacks of them."""
    stacks = [path for path, leaf in module.named_parameters() if ".experts." in path and leaf.dim() == 3]
    return r"\.experts\." if stacks else None


def _inputs(batch: Mapping[str, Tensor]) -> dict[str, Any]:
    """What a model gets of a batch; positions where the sequence is cut."""
    return {name: leaf for name, leaf in batch.items() if name in ("input_ids", "position_ids")} | {"use_cache": False}


def _of_tokens(output: Any, batch: Mapping[str, Tensor]) -> Weighted:
    """The sum over the next tokens, and their number."""
    logits = output.logits
    labels = batch["shift_labels"] if "shift_labels" in batch else F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    total = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum", ignore_index=-100)
    return Weighted(total, (labels != -100).sum())


# -- files of shapes ---------------------------------------------------------------------------------------------------


def _shapes(path: Path) -> dict[str, Tensor]:
    if path.suffix == ".json" and not path.name.endswith(".index.json"):
        return _written(path)
    from functional_ds.interchange.load_params import open_files  # may be left out

    try:
        return {name: torch.empty(x.shape, dtype=x.dtype, device="meta") for name, x in open_files(path).tensors.items()}
    except (OSError, ValueError, ImportError) as error:
        raise CommandError(f"MODEL: {error}") from error


def _written(path: Path) -> dict[str, Tensor]:
    try:
        rows = parse_json(read_text(path))
    except (OSError, ValueError) as error:
        raise CommandError(f"MODEL: {path} is no JSON: {error}") from error
    if not isinstance(rows, dict) or not rows:
        raise CommandError(
            f'MODEL: {path} should be {{"name": [sizes]}}, or {{"name": {{"shape": [sizes], "dtype": "float32"}}}}'
        )
    found = {}
    for name, row in rows.items():
        shape, word = (row.get("shape"), row.get("dtype", "float32")) if isinstance(row, dict) else (row, "float32")
        dtype = getattr(torch, str(word), None)
        if not isinstance(shape, list) or not all(type(side) is int and side >= 0 for side in shape):
            raise CommandError(f"MODEL: {path}: {name!r} has the shape {shape!r}, which is no list of sizes")
        if not isinstance(dtype, torch.dtype):
            raise CommandError(f"MODEL: {path}: {name!r} has the dtype {word!r}, which torch does not have")
        found[name] = torch.empty(shape, dtype=dtype, device="meta")
    return found
