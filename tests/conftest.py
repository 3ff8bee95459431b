"""Hypothesis profiles: ``default`` for every run, the same few examples each time; ``laws`` (HYPOTHESIS_PROFILE=laws) with many
more, 200 or as many as FUNCTIONAL_DS_EXAMPLES says, drawn anew unless CI is set; and what keeps the tests short: ``sample(n)``
lets n cases of a test run in the default profile.
"""

import gc
import multiprocessing
import os
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import HealthCheck, settings

# Drawing trees of tensors is slow at first, when torch warms up; that says nothing about the strategies.
_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
_MANY = int(os.environ.get("FUNCTIONAL_DS_EXAMPLES", "200"))

# Six random examples would miss a planted bug now and then.
settings.register_profile("default", max_examples=6, derandomize=True, **_COMMON)
settings.register_profile("laws", max_examples=_MANY, derandomize="CI" in os.environ, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_xdist_auto_num_workers() -> int:
    """One more than cores, since workers often wait for processes that they have started."""
    return (os.cpu_count() or 1) + 1


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of the cases of a test with the mark ``sample(n)``, n in the default profile; all in the profile ``laws``."""
    if os.environ.get("HYPOTHESIS_PROFILE", "default") != "default":
        return
    cases: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("sample"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left = {case for found in cases.values() for case in found} - {case for found in cases.values() for case in _sample(found)}
    config.hook.pytest_deselected(items=[item for item in items if item in left])
    items[:] = [item for item in items if item not in left]


def _sample(cases: Sequence[pytest.Function]) -> list[pytest.Function]:
    """As many as the mark says, the same in every run: next is always the case with most values of parameters that are new."""
    chosen, rest, seen = [], [*cases], set()
    marker = cases[0].get_closest_marker("sample")
    assert marker is not None
    for _ in range(min(marker.args[0], len(rest))):
        best = max(rest, key=lambda case: len(case.callspec.indices.items() - seen))
        seen |= best.callspec.indices.items()
        rest.remove(best)
        chosen.append(best)
    return chosen


def pytest_configure() -> None:
    """Imports leave little garbage."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Collections of garbage pass over all that is imported by now, which would be a third of the time of many tests."""
    gc.collect()
    gc.freeze()
    gc.enable()


# What the server of ranks imports before it forks them.
PRELOADED = [
    "hypothesis",
    "pytest",
    "torch._dynamo",
    "torch.distributed.checkpoint.filesystem",
    "functional_ds.checkpointing.writer",
    "functional_ds.comm.worlds.process",
    "functional_ds.compiling",
    "functional_ds.deepspeed",
    "functional_ds.fitting",
    "functional_ds.interchange",
    "functional_ds.jobs",
    "functional_ds.optim.adam",
    "functional_ds.parallel.experts",
    "functional_ds.parallel.sequence",
    "functional_ds.parallel.tensor",
    "functional_ds.pipelining",
    "functional_ds.profiling",
    "functional_ds.testing",
    "functional_ds.transforms.offload",
    "functional_ds.transforms.parallel.experts",
    "functional_ds.transforms.parallel.sequence",
    "functional_ds.transforms.parallel.tensor_parallel",
    "functional_ds.transforms.pipeline",
    "functional_ds.transforms.precision.mixed_precision",
    "functional_ds.transforms.zero.zero",
]


@pytest.fixture(scope="session", autouse=True)
def _ranks_are_forked() -> Iterator[pytest.MonkeyPatch]:
    """Ranks of ``spawn`` come from a server that has imported torch: 20 ms each, where a new interpreter takes 3 s."""
    get_context = multiprocessing.get_context

    def forking(method: str | None = None) -> multiprocessing.context.BaseContext:
        return get_context("forkserver" if method == "spawn" else method)

    multiprocessing.set_forkserver_preload(PRELOADED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiprocessing, "get_context", forking)
        yield patch


@pytest.fixture
def new_interpreters(_ranks_are_forked: pytest.MonkeyPatch) -> Iterator[None]:
    """Ranks of ``spawn`` are started as users' are; what they print goes where pytest looks."""
    forking = multiprocessing.get_context
    _ranks_are_forked.undo()
    yield
    _ranks_are_forked.setattr(multiprocessing, "get_context", forking)
