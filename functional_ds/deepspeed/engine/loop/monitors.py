"""An engine's monitors: TensorBoard, Weights & Biases, Comet, and CSV files as DeepSpeed writes them."""

import csv
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs

from functional_ds import comm
from functional_ds.deepspeed.config.ds_plan import ConfigPlan

MONITORS = ("tensorboard", "wandb", "csv_monitor", "comet")
_COMET = ("api_key", "project", "workspace", "experiment_key", "mode", "online")


@attrs.define(eq=False)
class CsvFiles:
    """A CSV file for each name, with rows of step and value: "Train/Samples/lr" goes to ``Train_Samples_lr.csv``.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     CsvFiles(folder).log(8, {"Train/Samples/lr": 0.5})
    ...     print(Path(folder, "Train_Samples_lr.csv").read_text().split())
    ['step,lr', '8,0.5']
    """

    folder: Path = attrs.field(converter=Path)

    def log(self, done: int, numbers: Mapping[str, float]) -> None:
        """Adds a row to the file of each number."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for name, value in numbers.items():
            path = self.folder / (name.replace("/", "_").replace(" ", "_") + ".csv")
            with path.open("a", newline="", encoding="utf-8") as file:
                rows = csv.writer(file)
                if not file.tell():
                    rows.writerow(("step", name.rpartition("/")[2]))
                rows.writerow((done, value))

    def close(self) -> None:
        """Does nothing: no file stays open."""


@attrs.define(eq=False)
class Monitors:
    """``engine.monitor``: the config's monitors. They write only on rank 0.

    Attributes:
        enabled: whether the config has any.
    """

    enabled: bool
    _sinks: list[Any] = attrs.field(alias="sinks", repr=False)

    @staticmethod
    def of(plan: ConfigPlan) -> "Monitors":
        """The monitors of a config, opened."""
        asked = [block for block in MONITORS if plan.value(f"{block}.enabled")]
        return Monitors(bool(asked), [] if comm.world().rank else [_sink(plan, block) for block in asked])

    def write_events(self, event_list: Iterable[tuple[str, Any, int]]) -> None:
        """Adds a point to the curve of each event ``(name, value, step)``; DeepSpeed's steps are numbers of samples."""
        if self._sinks:
            for name, value, step in event_list:
                for sink in self._sinks:
                    sink.log(int(step), {name: float(value)})

    def close(self) -> None:
        """Closes them; further events are dropped."""
        for sink in self._sinks:
            sink.close()
        self._sinks = []


def _sink(plan: ConfigPlan, block: str) -> Any:
    from functional_ds.fitting.loggers import Comet, TensorBoard, WandB  # may be left out of an installation

    def value(name: str) -> Any:
        return plan.value(f"{block}.{name}")

    if block == "csv_monitor":
        return CsvFiles(Path(value("output_path") or "csv_logs", value("job_name")))
    logger: Any
    if block == "wandb":
        logger = WandB(value("project"), options={"group": value("group"), "entity": value("team")})
    elif block == "comet":
        options = {name: value(name) for name in _COMET}
        logger = Comet(value("experiment_name"), options=options, every=value("samples_log_interval"))
    else:
        logger = TensorBoard(Path(value("output_path") or "runs", value("job_name")))
    logger.begin(0)
    return logger
