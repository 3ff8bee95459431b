"""Every example in a docstring runs, and every public name has one or is shown by that of another."""

import doctest
import importlib
import inspect
import pkgutil
import traceback
from types import ModuleType

import pytest
import torch

import functional_ds as fds

# Public modules; a name that is in several of them counts once.
PACKAGES = (
    *(fds, fds.comm, fds.transforms),
    *(fds.checkpointing, fds.compiling, fds.deepspeed, fds.fitting, fds.interchange, fds.jobs, fds.memory, fds.moe),
    *(fds.pipelining, fds.profiling, fds.scaling, fds.seq, fds.testing, fds.tp, fds.tree, fds.units),
    *(fds.comm.algorithms, fds.comm.algorithms.cost, fds.comm.codecs, fds.comm.debug),
)

# Names without an example of their own, by the name in whose example they are made or used.
SHOWN_BY = {
    "CompileReport": "compile_report",
    "Gradients": "OpenPass",
    "RematReport": "remat_report",
    "comm.Recv": "comm.batch_p2p",
    "comm.debug.Slice": "comm.debug.Chart",
    "comm.Send": "comm.batch_p2p",
    "comm.algorithms.cost.Cost": "comm.algorithms.cost.predict",
    "comm.algorithms.cost.Load": "comm.algorithms.cost.Link",
    "comm.algorithms.cost.Network": "comm.algorithms.cost.predict",
    "comm.algorithms.cost.Sent": "comm.algorithms.cost.sent",
    "comm.codecs.Residual": "comm.codecs.ErrorFeedback",
    "comm.debug.Arrow": "comm.debug.calls_chart",
    "comm.debug.Offsets": "comm.debug.clock_offsets",
    "comm.debug.Spread": "comm.debug.spreads",
    "compiling.CollectiveCall": "compiling.merge",
    "compiling.GraphCost": "compiling.StepGraph",
    "compiling.PredictedStep": "compiling.JitStep",
    "compiling.finished": "compiling.copied",
    "compiling.schedule": "testing.check_pass",
    "deepspeed.ConfigPlan": "from_ds_config",
    "deepspeed.DeepSpeedEngine": "deepspeed.initialize",
    "deepspeed.ExplainedKey": "from_ds_config",
    "deepspeed.Explanation": "from_ds_config",
    "fitting.Watch": "fitting.watchdog",
    "jobs.DataEntry": "run_job",
    "jobs.LogsEntry": "run_job",
    "jobs.PreparedJob": "jobs.prepare",
    "memory.Activations": "memory.activations",
    "moe.ExchangeVolume": "moe.exchange_volume",
    "moe.count_demand": "transforms.balance",
    "moe.router_bias": "transforms.balance",
    "profiling.Profile": "profile",
    "profiling.Profiled": "profile",
    "profiling.Recording": "record",
    "scaling.PredictedRun": "scaling.predict_run",
    "scaling.RankShare": "scaling.rank_share",
    "seq.HeadShares": "seq.head_shares",
    "testing.BoundLaw": "testing.laws",
    "testing.Difference": "testing.difference",
    "testing.Finding": "testing.simulated_cuda",
    "testing.LawResult": "testing.holds",
    "testing.LawTable": "testing.holds",
    "testing.LeafDifference": "testing.difference",
    "testing.PassReport": "testing.check_pass",
    "testing.SimulatedGpu": "testing.simulated_cuda",
    "units.ByBytes": "units.by_bytes",
    "units.ByPath": "units.by_path",
}

# Names without an example, and why.
UNSHOWN = {
    "comm.debug.draw_traffic": "plots",
    "comm.spawn": "starts processes",
    "compiling.bucketing": "tracing a sharded step takes a second",
    "compiling.regather": "tracing a sharded step takes a second",
    "deepspeed.PipelineEngine": "users get it from initialize, for a PipelineModule",
    "deepspeed.init_distributed": "joins a world of processes",
    "deepspeed.log_dist": "writes to a log",
    "fitting.Comet": "needs a package",
    "fitting.TensorBoard": "needs a package",
    "fitting.WandB": "needs a package",
    "fitting.stop_ranks_on_signals": "is for processes",
    "from_deepspeed": "reads files that DeepSpeed wrote",
    "jobs.DeepSpeedEntry": "a table of a job's file",
    "jobs.EvaluationEntry": "a table of a job's file",
    "jobs.ProfileEntry": "a table of a job's file",
    "jobs.SavedEntry": "a table of a job's file",
    "memory.draw_compared": "plots",
    "memory.draw_zero": "plots",
    "moe.ExpertAxis": "a record that the running step makes",
    "moe.register_experts": "needs transformers",
    "pipelining.LossInput": "a record that the running step makes",
    "pipelining.WaitSpan": "a record of a run on processes",
    "pipelining.draw": "plots",
    "profiling.RankProfile": "a part of a profile",
    "profiling.SpanKey": "a part of a profile",
    "seq.SequenceMask": "needs transformers",
    "seq.register_attention": "needs transformers",
    "testing.Mutant": "planting bugs takes seconds",
    "testing.MutantTable": "planting bugs takes seconds",
    "testing.mutants": "planting bugs takes seconds",
    # the example of their module uses such strategies
    **{
        f"testing.{name}": "a strategy" for name in ("inputs", "leaves", "schedules", "seeds", "shapes", "trees", "world_sizes")
    },
}


def _modules() -> list[ModuleType]:
    """In a checkout comm and transforms are sub-packages by setuptools' mapping, which no walk from the top follows."""
    packages = [fds, fds.comm, fds.transforms]
    names = {package.__name__ for package in packages}
    for package in packages:
        names |= {module.name for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")}
    return [importlib.import_module(name) for name in sorted(names)]


def _examples(module: ModuleType) -> list[doctest.DocTest]:
    found = doctest.DocTestFinder(exclude_empty=True).find(module, extraglobs={"torch": torch})
    return [test for test in found if test.examples]


_WITH_EXAMPLES = {module.__name__: module for module in _modules() if _examples(module)}


@pytest.mark.parametrize("name", sorted(_WITH_EXAMPLES))
def test_examples(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All examples of the module, each docstring with fresh globals, give what they show."""
    lines = traceback.format_exception_only
    # doctest of Python 3.11.2 compares the last of these, which may be a note
    monkeypatch.setattr(traceback, "format_exception_only", lambda *error: ["".join(lines(*error))])
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    report: list[str] = []
    for test in _examples(_WITH_EXAMPLES[name]):
        runner.run(test, out=report.append)
    assert not runner.summarize(verbose=False).failed, "".join(report)


def test_every_layer_has_examples() -> None:
    """The walk reaches all three layers: a walk that finds nothing would pass."""
    layers = {
        "functional_ds.comm.api",
        "functional_ds.base.tree",
        "functional_ds.testing.holds",
        "functional_ds.transforms.zero.zero",
    }
    assert layers <= set(_WITH_EXAMPLES)


def _title(package: ModuleType) -> str:
    """How users write it after ``fds.``."""
    short = {fds.seq: "seq", fds.moe: "moe", fds.tp: "tp", fds.tree: "tree", fds.units: "units"}
    return short.get(package, package.__name__.removeprefix("functional_ds").removeprefix("."))


def _public() -> dict[str, object]:
    """Public functions and classes, without exceptions, protocols and type aliases."""
    found: dict[int, tuple[str, object]] = {}
    for package in PACKAGES:
        for name in package.__all__:
            value = getattr(package, name)
            if inspect.isclass(value) and (issubclass(value, BaseException) or getattr(value, "_is_protocol", False)):
                continue
            if inspect.isclass(value) or inspect.isfunction(inspect.unwrap(value)):  # some are cached
                found.setdefault(id(value), (f"{_title(package)}.{name}".removeprefix("."), value))
    return dict(found.values())


def _shows_itself(value: object) -> bool:
    """Whether its docstring, or that of a public method or property, has an example."""
    methods = vars(value).items() if inspect.isclass(value) else ()
    words = [value.__doc__, *(method.__doc__ for name, method in methods if not name.startswith("_"))]
    return any(">>>" in (each or "") for each in words)


def test_public_names_have_examples() -> None:
    """In their docstrings, or in that of the name in SHOWN_BY; or UNSHOWN has the reason."""
    public = _public()
    shown = {name for name, value in public.items() if _shows_itself(value)}
    excused = SHOWN_BY.keys() | UNSHOWN.keys()
    assert sorted(public.keys() - shown - excused) == [], "write an example"
    assert sorted(excused - (public.keys() - shown)) == [], "these have one, or are no public names: take them out of the lists"
    assert sorted({*SHOWN_BY.values()} - shown) == []
