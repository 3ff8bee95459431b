"""``Job``: a training job as frozen records, each field an entry of its file."""

import math
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, Self

try:
    from pydantic import AfterValidator, PrivateAttr, StrictBool, StrictFloat, StrictInt, StrictStr, model_validator
except ModuleNotFoundError as error:
    raise ImportError("jobs need pydantic and tomlkit: pip install 'functional-ds[jobs]'") from error

from functional_ds.jobs.entries.call_entry import CallEntry
from functional_ds.jobs.entries.job_errors import JobError
from functional_ds.jobs.entries.job_reader import (
    ALWAYS,
    MOST_RANKS,
    AtLeastOne,
    Entries,
    NotNegative,
    Ranks,
    call_of,
    calls_of,
    changed,
    entry,
)
from functional_ds.jobs.entries.job_text import located, toml

BESIDE_DEEPSPEED = ("remat", "pipeline", "sequence", "experts", "tensor_parallel")  # of which its configs have no keys


def _share(value: float) -> float:
    if not 0 < value < 1:
        raise JobError("it must be between 0 and 1", value=value)
    return value


def _seed(value: int) -> int:
    if not 0 <= value < 2**63:
        raise JobError("it must be at least 0 and below 2**63", value=value)
    return value


def module_names(names: Iterable[str]) -> tuple[str, ...]:
    """Names of modules; a single string is an error.

    Raises:
        TypeError: they are one string.
    """
    if isinstance(names, str):
        raise TypeError(f"allow_import={names!r} must be a list of modules' names: [{names!r}]")
    return tuple(names)


class DataEntry(Entries):
    """What the model is trained on: text, as bytes or tokens, in rows of `context` tokens with random starts."""

    rows: AtLeastOne = entry("rows of a step, over all ranks; losses do not depend on the number of ranks", default=32)
    context: AtLeastOne = entry("tokens of a row", default=128)
    files: tuple[StrictStr, ...] = entry(
        "text files and folders; by default the sources of Python's standard library, 8 MB", default=()
    )
    pattern: StrictStr = entry("which files of a folder, as a glob", default="**/*")
    dataset: StrictStr | None = entry(
        "in place of files: a name or folder for Hugging Face's `datasets.load_dataset`", default=None
    )
    dataset_config: StrictStr | None = entry("its configuration", default=None)
    dataset_split: StrictStr = entry("its split", default="train")
    column: StrictStr = entry("its text column", default="text")
    text: Annotated[CallEntry, call_of("text")] | None = entry(
        "in place of files: `module:function` that returns an object with the method `batch` of `fds.jobs.TokenText`",
        default=None,
    )
    tokenizer: StrictStr | None = entry(
        "a name or folder for Hugging Face's `AutoTokenizer.from_pretrained`; by default each byte is a token", default=None
    )
    validation: Annotated[StrictFloat, AfterValidator(_share)] = entry(
        "the fraction of the tokens, at the end, that is held out", default=0.1
    )

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = [name for name in ("files", "dataset", "text") if getattr(self, name)]
        if len(given) > 1:
            raise JobError(f"the text comes from {' and from '.join(given)}; keep one of them", entry=given[1])
        if self.text is not None and self.tokenizer is not None:
            raise JobError("`text` gives tokens itself; leave one of the two out", entry="tokenizer", value=self.tokenizer)
        return self


class DeepSpeedEntry(Entries):
    """A DeepSpeed config instead of `strategy`, and perhaps of `optimizer` and `schedule`."""

    config: StrictStr | dict[str, Any] = entry("the path of a DeepSpeed config, or its keys, which `fds.from_ds_config` reads")
    auto: dict[str, Any] = entry('values for "auto", by path; `train_batch_size` is `data.rows`', default={})


class EvaluationEntry(Entries):
    """The mean loss of some held-out batches, before the first step and after the last."""

    every: AtLeastOne | None = entry("steps between two evaluations; by default only the first and the last", default=None)
    batches: AtLeastOne = entry("number of batches, always the same ones", default=4)


class SavedEntry(Entries):
    """Checkpoints, as by `fds.Checkpoints`: the last step is always saved, others as configured."""

    folder: StrictStr = entry("their folder, which all ranks must see")
    every: AtLeastOne | None = entry("steps between two checkpoints", default=None)
    minutes: StrictFloat | None = entry("minutes between two checkpoints", default=None, gt=0)
    keep_last: NotNegative | None = entry("how many are kept; 0 for all", default=3)
    keep_every: AtLeastOne | None = entry("also keep those after each multiple of this number of steps", default=None)
    resume: StrictBool = entry("whether a run resumes from the newest one", default=True)


class LogsEntry(Entries):
    """Where rank 0 sends losses, norms, learning rates and validation losses."""

    every: AtLeastOne = entry("steps between two that are logged", default=10)
    csv: StrictStr | None = entry("a CSV file with a line for each number", default=None)
    tensorboard: StrictStr | None = entry("a folder of event files; needs the extra `fit`", default=None)
    wandb: StrictStr | None = entry("a project of Weights & Biases; needs the package `wandb`", default=None)
    progress: StrictBool = entry("a bar with the steps made; needs the extra `fit`", default=False)


class ProfileEntry(Entries):
    """Where the time, the operations and the bytes of steps go, measured by `fds.profile`."""

    folder: StrictStr = entry("where profile.txt, profile.json, trace.json and trace.html are written")
    skip: NotNegative = entry("steps at the beginning that are not measured", default=2)
    every: AtLeastOne = entry("one in this many steps is timed in detail", default=10)
    keep: AtLeastOne = entry("how many of these are in the trace", default=2)
    flops: StrictBool = entry("whether operations are counted", default=True)
    peak: StrictFloat | Literal["measured"] | None = entry(
        'operations a second that a rank\'s device can do in fp32, or "measured"; left out, there is no MFU', default=None
    )


class Job(Entries):
    """A training job: data, model, strategy, and what to write; the losses do not depend on the number of ranks.

    Law: ``load_job`` of a file with ``job.to_toml()`` is ``job``.

    >>> print(Job(model="models:MLP", steps=100, optimizer={"adamw": 1e-3}, strategy=[{"zero": 2}, {"clip": 1.0}]))
    steps = 100
    strategy = [
        {zero = {stage = 2}},
        {clip = {limit = 1.0}},
    ]
    folder = "."
    <BLANKLINE>
    [model."models:MLP"]
    <BLANKLINE>
    [optimizer.adamw]
    lr = 0.001
    """

    model: Annotated[CallEntry, call_of("model")] = entry(
        "`huggingface`, or your `module:function`, with its arguments: from tokens [rows, context] to logits"
    )
    steps: NotNegative = entry("total number of steps, including earlier runs")
    seed: Annotated[StrictInt, AfterValidator(_seed)] = entry("random seed of params, sampled rows, and dropout", default=0)
    ranks: Ranks | None = entry(
        "number of ranks; by default 1, or the mesh's size. Under torchrun it is torchrun's", default=None
    )
    simulate: StrictBool = entry("whether the ranks are simulated in one process, for a trial", default=False)
    device: Literal["auto", "cpu", "cuda"] = entry('"auto" is CUDA where each rank of a host has a GPU', default="auto")
    deferred: StrictBool = entry(
        "whether params are initialized when the state is sharded, as by `fds.deferred`: for models larger than memory",
        default=False,
    )
    mesh: dict[str, Ranks] = entry("sizes of axes by name, outermost first, such as {dp = 4, tp = 2}", default={})
    loss: Annotated[CallEntry, call_of("loss")] = entry(
        "`next_token`, `vocab_parallel` for a vocabulary that is sliced, or your `module:function` of (outputs, targets)",
        default=CallEntry("next_token"),
    )
    strategy: Annotated[tuple[CallEntry, ...], calls_of("transform")] = entry(
        "transforms of `functional_ds.transforms`, or your `module:function`, in the order of `fds.compose`", default=()
    )
    deepspeed: DeepSpeedEntry | None = entry("a DeepSpeed config in place of a strategy", default=None)
    optimizer: Annotated[CallEntry, call_of("optimizer")] | None = entry(
        "an optimizer of `fds`, or your `module:function`; may be left out only with a DeepSpeed config", default=None
    )
    schedule: Annotated[CallEntry, call_of("schedule")] | None = entry(
        "a schedule of `functional_ds.transforms`, or your `module:function`; by default the rate is constant", default=None
    )
    on_non_finite: Literal["stop", "roll_back", "ignore"] = entry(
        "what to do after three non-finite losses in a row: stop, or go back to a checkpoint", default="stop"
    )
    timeout: StrictFloat = entry(
        "minutes that a step, a save or an evaluation may take before it counts as a hang; 0 for no watchdog",
        default=10.0,
        ge=0,
    )
    data: DataEntry = entry("the text", default=DataEntry())
    evaluation: EvaluationEntry | None = entry("validation losses; none by default", default=None)
    checkpoints: SavedEntry | None = entry("checkpoints; none by default", default=None)
    logs: LogsEntry = entry("where numbers go", default=LogsEntry())
    profile: ProfileEntry | None = entry("a profile of the steps; none by default", default=None)
    folder: StrictStr = entry(
        "where modules, files of text, configs and tokenizers are looked for; left out of a file, it is the file's folder. "
        "What a run writes is relative to the working directory",
        default=".",
        json_schema_extra=ALWAYS,
    )
    _file: str | None = PrivateAttr(None)
    _allow_import: tuple[str, ...] = PrivateAttr(())

    def __init__(self, /, *, file: str | None = None, allow_import: Iterable[str] = (), **data: Any) -> None:
        super().__init__(**data)
        self._file, self._allow_import = file, module_names(allow_import)

    @property
    def file(self) -> str | None:
        """The file that it was loaded from."""
        return self._file

    @property
    def allow_import(self) -> tuple[str, ...]:
        """Further modules that it may name; not an entry, because a file must not grant itself permissions."""
        return self._allow_import

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        size = math.prod(self.mesh.values())
        if size > MOST_RANKS:
            raise JobError(f"the mesh has more than {MOST_RANKS} ranks", entry="mesh", value=self.mesh)
        if self.mesh and self.ranks not in (None, size):
            raise JobError(f"the mesh has {size} ranks; leave ranks out, or change the mesh", entry="ranks", value=self.ranks)
        if self.deepspeed is not None and any(call.name not in BESIDE_DEEPSPEED for call in self.strategy):
            raise JobError(
                f"a DeepSpeed config is a strategy; keep one of the two, except {', '.join(BESIDE_DEEPSPEED)}", entry="strategy"
            )
        if self.on_non_finite == "roll_back" and self.checkpoints is None:
            raise JobError(
                "it goes back to a checkpoint; name their folder: [checkpoints]", entry="on_non_finite", value="roll_back"
            )
        if self.optimizer is None and self.deepspeed is None:
            raise JobError("it needs optimizer: an optimizer, such as optimizer = {adamw = {lr = 1e-3}}")
        return self

    @property
    def world_size(self) -> int:
        """How many ranks the job asks for."""
        return self.ranks or math.prod(self.mesh.values())

    def transform(self, name: str) -> CallEntry | None:
        """The first transform of this name in the strategy."""
        return next((call for call in self.strategy if call.name == name), None)

    def to_toml(self, *, defaults: bool = False) -> str:
        """The job as the text of a file; entries at their defaults are omitted unless asked for."""
        return toml(self.to_dict(defaults=defaults))

    def changed(self, changes: Mapping[str, Any]) -> "Job":
        """The job with other values at some paths; None restores the default, or removes a transform.

        Raises:
            JobError: a path names no entry, or a value is invalid.

        >>> job = Job(model="models:MLP", steps=100, optimizer={"adamw": 1e-3}, strategy=[{"zero": 2}])
        >>> job.changed({"strategy.zero.stage": 3, "data.rows": 8}).strategy
        (CallEntry('zero', {'stage': 3}),)
        """
        data = self.to_dict()
        with located(self.file):
            for path, value in changes.items():
                changed(data, path, value)
            return Job.read(data, file=self.file, allow_import=self.allow_import)

    def __str__(self) -> str:
        return self.to_toml().rstrip()
