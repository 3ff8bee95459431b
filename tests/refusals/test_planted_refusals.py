"""Checks at the doors that are planted away: the test of each sees it."""

import json
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import functional_ds as fds
from functional_ds import comm
from functional_ds.cli.entry import main
from functional_ds.cli.words.errors_in_one_line import CommandError
from functional_ds.cli.words.options import mesh_sizes
from functional_ds.fitting.data import as_source
from functional_ds.interchange import export
from tests.comm.simulation.test_simulator import test_a_rank_that_exits_as_if_all_were_well_is_an_error as exits_with
from tests.jobs.test_job_file import test_what_is_wrong_is_named_with_its_line as job_is_wrong
from tests.planting import Bug, planted
from tests.refusals import engines, losses, modules, strategies
from tests.refusals.refusal import Refusal
from tests.refusals.test_refusals_table import test_it_is_refused_by_name as is_refused


def row(refusals: list[Refusal], what: str) -> Callable[[Path], None]:
    """The test of a row of docs/troubleshooting.md, which begins so."""
    [refusal] = [refusal for refusal in refusals if refusal.what.startswith(what)]
    return lambda folder: is_refused(refusal)


engine, strategy = partial(row, engines.REFUSALS), partial(row, strategies.REFUSALS)


def raises(error: type[BaseException], says: str, program: Callable[[Path], Any]) -> Callable[[Path], None]:
    def law(folder: Path) -> None:
        with pytest.raises(error, match=says):
            program(folder)

    return law


def ends() -> None:
    raise SystemExit(0)


def file_of(folder: Path, name: str, content: object) -> Path:
    torch.save(content, folder / name) if name.endswith(".pt") else (folder / name).write_text(json.dumps(content))
    return folder / name


def command(says: str, *words: object, content: object = None) -> Callable[[Path], None]:
    """A command is refused in one line that says this; ``FILE`` among its words is a file of the content."""

    def law(folder: Path) -> None:
        found = [str(file_of(folder, str(word), content)) if str(word).startswith("FILE.") else str(word) for word in words]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("FUNCTIONAL_DS_TRACEBACK", "1")
            with pytest.raises(CommandError, match=says):
                main(found)

    return law


def fit_with(**options: Any) -> Callable[[Path], Any]:
    def run(folder: Path) -> Any:
        step = fds.train_step(lambda params, x: (params["w"] * x).sum(), fds.sgd(0.1))
        state = step.init({"w": torch.ones(2)})
        return fds.fit(step, state, lambda index: torch.ones(2), steps=1, timeout=timedelta(seconds=60), **options)

    return run


def program_ends(folder: Path) -> None:
    assert main(["plan", f"{__name__}:ends"]) == 2


CASES: list[tuple[Callable[[Path], None], Bug]] = [
    (
        strategy("an `update` that puts the params themselves"),
        Bug("aliases are values", "step.checks:shared_tensors", "first.name != later.name", "False"),
    ),
    (
        strategy("two transforms that divide a batch over the same ranks"),
        Bug("ranks are divided twice", "step.guards:refuse_ranks_twice", "len(shared) > 1", "False"),
    ),
    (
        row(losses.REFUSALS, "a loss compiled"),
        Bug("a compiled loss is traced", "step.train_step:train_step", "is_compiled(loss_fn)", "False"),
    ),
    (
        row(modules.REFUSALS, "a module compiled"),
        Bug("names have a prefix", "modules.refusals:refuse_compiled", "is_compiled(module)", "False"),
    ),
    (
        row(modules.REFUSALS, "modules that have one"),
        Bug(
            "one dict becomes two",
            "modules.refusals:check_module",
            "(other := with_dict.setdefault(id(vars(owner)), path))",
            "path",
        ),
    ),
    (
        row(modules.REFUSALS, "a list or dict that `forward` writes"),
        Bug("one list becomes two", "modules.skeleton:Skeleton._check_shared", "is_written(*copy)", "False"),
    ),
    (
        row(losses.REFUSALS, "params that the loss writes"),
        Bug("values are not compared", "step.views.graph_checks:WriteGuard.note", "self.sums", "False"),
    ),
    (
        engine("an optimizer that has made updates"),
        Bug(
            "used moments are dropped",
            "deepspeed.engine.common.optimizer_groups:groups_of_optimizer",
            "float(held.get('step', 1))",
            "False",
        ),
    ),
    (
        engine("an optimizer with hooks"),
        Bug(
            "hooks are never called",
            "deepspeed.engine.common.optimizer_groups:groups_of_optimizer",
            "hooks_of_optimizer(optimizer)",
            "()",
        ),
    ),
    (
        engine("a parameter of `engine.module` that is replaced"),
        Bug(
            "a new parameter is never trained",
            "deepspeed.engine.loop.live_module:LiveModule.follow_values",
            "any(held.get(key) is not parameter for (held, key), parameter in zip(homes, self.params.values(), strict=True))",
            "False",
        ),
    ),
    (
        engine("`engine.module.double()`"),
        Bug(
            "values of another dtype are cut",
            "deepspeed.engine.loop.live_module:LiveModule.follow_values",
            "(parameter.shape, parameter.dtype, parameter.device) != (like.shape, dtype, like.device)",
            "False",
        ),
    ),
    (
        engine("`parameter.data = value` in stage 3"),
        Bug(
            "values in shards are assigned in vain",
            "deepspeed.engine.loop.live_module:LiveModule.follow_values",
            "getattr(parameter, 'ds_status', None) is not ZeroParamStatus.AVAILABLE",
            "False",
        ),
    ),
    (
        lambda folder: exits_with(0),
        Bug(
            "the program ends as if all were well",
            "comm.table.errors:of_rank",
            "isinstance(error, SystemExit) and not error.code",
            "False",
            SystemExit,  # type: ignore[arg-type]
        ),
    ),
    (
        raises(ValueError, "timeout=0:00:00: it must be positive", lambda folder: comm.init_distributed(timeout=timedelta(0))),
        Bug("no time is a time", "comm.worlds.process:check_timeout", "timeout <= timedelta(0)", "False"),
    ),
    (
        raises(TypeError, "path=None", lambda folder: fds.Checkpoints(None)),  # type: ignore[arg-type]
        Bug("None is a folder", "base.disk.files:checked_path", "isinstance(path, str | os.PathLike)", "True"),
    ),
    (
        raises(TypeError, "pass a function from an index", lambda folder: as_source({"x": torch.ones(2)})),
        Bug(
            "keys are batches",
            "fitting.data:as_source",
            "isinstance(batches, Iterable) and not isinstance(batches, Mapping)",
            "isinstance(batches, Iterable)",
        ),
    ),
    (
        raises(TypeError, "on_non_finite='stop'", fit_with(on_non_finite="stop")),
        Bug("a policy of another type", "fitting.fit:fit", "isinstance(on_non_finite, Stop | RollBack | None)", "True"),
    ),
    (
        raises(TypeError, "params=None", lambda folder: export(None, folder / "x")),
        Bug("nothing is exported", "interchange.export:export", "params is None", "False"),
    ),
    (
        lambda folder: job_is_wrong(folder, "mesh = {dp = 1048576, tp = 2}", 4, "has more than 1048576 ranks"),
        Bug("a mesh of any size", "jobs.job:Job._agrees", "size > MOST_RANKS", "False"),
    ),
    (
        raises(CommandError, "has more than 1,048,576 ranks", lambda folder: mesh_sizes("dp=1048576,tp=2")),
        Bug("a mesh of any size, in words", "cli.words.options:mesh_sizes", "math.prod(sizes.values()) > 2**20", "False"),
    ),
    (
        command("which no memory holds", "plan", "FILE.json", content={"w": [10**12, 10**12]}),
        Bug(
            "shapes of any size",
            "cli.planning.subject:_written",
            "math.prod(shape) * dtype.itemsize >= 2**63",
            "False",
        ),
    ),
    (
        command("is one checkpoint and has no tags", "inspect", "FILE.pt", "--tag", "1", content={"w": torch.ones(2)}),
        Bug("a tag of what has none", "cli.stored.kinds:open_checkpoint", "opener not in (_ours, _deepspeed)", "False"),
    ),
    (
        program_ends,
        Bug("a program ends the command", "cli.entry:main", "if error.code:\n    ...", "if True:\n    ...", SystemExit),  # type: ignore[arg-type]
    ),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("law", "bug"), [pytest.param(law, bug, id=bug.name) for law, bug in CASES])
def test_a_check_that_is_gone_is_seen(law: Callable[[Path], None], bug: Bug, tmp_path: Path) -> None:
    """The test passes, and does not with the bug: no error, another one, or another message."""
    (tmp_path / "sound").mkdir()
    (tmp_path / "broken").mkdir()
    law(tmp_path / "sound")
    with planted(bug), pytest.raises((AssertionError, pytest.fail.Exception, Exception, bug.shows)):
        law(tmp_path / "broken")
