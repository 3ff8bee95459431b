"""Every example in a docstring runs."""

import doctest
import importlib
import pkgutil
from types import ModuleType

import pytest
import torch

import functional_ds


def _modules() -> list[ModuleType]:
    """In a checkout comm and transforms are sub-packages by setuptools' mapping, which no walk from the top follows."""
    packages = [functional_ds, functional_ds.comm, functional_ds.transforms]
    names = {package.__name__ for package in packages}
    for package in packages:
        names |= {module.name for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")}
    return [importlib.import_module(name) for name in sorted(names)]


def _examples(module: ModuleType) -> list[doctest.DocTest]:
    found = doctest.DocTestFinder(exclude_empty=True).find(module, extraglobs={"torch": torch})
    return [test for test in found if test.examples]


_WITH_EXAMPLES = {module.__name__: module for module in _modules() if _examples(module)}


@pytest.mark.parametrize("name", sorted(_WITH_EXAMPLES))
def test_examples(name: str) -> None:
    """All examples of the module, each docstring with fresh globals, give what they show."""
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
