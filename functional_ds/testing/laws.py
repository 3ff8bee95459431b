"""The laws that ``holds`` checks."""

import pickle
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor

from functional_ds import comm
from functional_ds.base import tree
from functional_ds.comm.debug.explore import explore
from functional_ds.comm.spawn import spawn
from functional_ds.optim.sgd import sgd
from functional_ds.step.state.state import State
from functional_ds.step.step import Step

from .method import ALONG, BF16, NEAR, RANKS, Method, NotApplicableError, WrongError, apart
from .recipe import STEPS, Recipe, Setup, overflowing, started, train
from .same import same_or_nan

_ZERO = tuple(f"T.zero({stage})" for stage in range(4))
_MEAN = "T.replicated(reduce=mean_over_ranks)"
_HYBRID = "T.zero(2, group=mesh['dp'], replicate=mesh['nodes'])"
_ACCUMULATE, _CLIP = "T.accumulate(2)", "T.clip(0.01)"
_FP16 = "T.mixed_precision('fp16', T.DynamicScale(2.0**10, hysteresis=1))"
_CONSTANT = "T.mixed_precision('fp16', T.StaticScale(2.0**10))"
_SKIPPED = 1  # the step that overflows
_WIDE = 4  # ranks along each of the method's axes: with two, both neighbours are the same rank


@attrs.frozen
class Law:
    """A law.

    Attributes:
        name: its name, for ``only=`` and ``excused=``.
        says: what must hold.
        check: raises WrongError or NotApplicableError; may return a remark on "ok".
    """

    name: str
    says: str
    check: Callable[[Method], str | None]


# -- equal to one device -----------------------------------------------------------------------------------------------


def _near(method: Method, found: Any, wanted: Any, words: str, setup: Setup, *, moved: bool = True) -> None:
    """Raises WrongError for a leaf with another value, within the method's part of how far it has moved, or of its size."""
    difference = apart(found, wanted, method.recipe.problem.params if moved else None, method.within)
    if difference is not None:
        raise WrongError(f"{words}: {difference[1]}", setup)


def _oracle(method: Method) -> None:
    if method.oracle is None:
        raise NotApplicableError("no oracle was given: oracle=function of (params, batches)")
    setup, wanted = method.on(1), method.oracle_params()
    for params, _ in method.run(setup):
        _near(method, params, wanted, f"{setup}", setup)


def _ranks(method: Method) -> None:
    if method.by_ranks is None:
        raise NotApplicableError("no oracle of ranks was given: by_ranks=function of (params, batches of each rank)")
    setups = [method.on(ranks) for ranks in RANKS]
    if method.recipe.axes:
        setups = [method.on(1), method.on(2, _ZERO[0]), method.on(2, _ZERO[3])]
    for setup in setups:
        wanted = method.params_of_ranks(setup.parts)
        for rank, (params, _) in enumerate(method.run(setup)):
            _near(method, params, wanted[method.model(setup, rank)], f"{setup}, rank {rank}", setup)


def _stages(method: Method) -> None:
    wide = [method.on(1), method.on(1, _ZERO[3], along=_WIDE)] if method.recipe.shares_model else []
    method.equal([*wide, *(method.on(ranks, zero) for ranks in (2, 3) for zero in _ZERO)], method.alone())


def _replicated(method: Method) -> None:
    if method.combines:
        raise NotApplicableError("it reduces gradients itself")
    if "ep" in method.recipe.axes:
        raise NotApplicableError("T.replicated keeps all params the same on its ranks, which hold different experts")
    method.equal([method.on(ranks, _MEAN) for ranks in (2, 3)], method.alone())


def _accumulated(first: str = "", last: str = "") -> Callable[[Method], None]:
    def check(method: Method) -> None:
        setups = [
            method.on(1, first=first, last=last),
            *(method.on(2, parallel, first=first, last=last) for parallel in (_ZERO[0], _ZERO[3], _MEAN)),
        ]
        method.equal(setups, method.alone())

    return check


def _clipped(first: str = "", last: str = "") -> Callable[[Method], None]:
    def check(method: Method) -> None:
        wanted = method.alone(first=first, last=last)
        method.equal([method.on(2, parallel, first=first, last=last) for parallel in (_ZERO[0], _ZERO[3], _MEAN)], wanted)
        if not method.differs(wanted, method.alone(), 1e-6)[1]:
            raise NotApplicableError(f"{_CLIP} changes nothing here, since the gradient's length does not matter")

    return check


def _unused(method: Method) -> None:
    if method.recipe.problem.unused is None:
        raise NotApplicableError("the problem has no loss that leaves some leaves unused: Problem(unused=)")
    setups = [method.on(2, zero, loss="unused") for zero in _ZERO]
    method.equal(setups, method.alone(loss="unused"))


def _pipelines(method: Method) -> None:
    if method.recipe.problem.layers is None:
        raise NotApplicableError("the problem is not split into layers: Problem(layers=, error=)")
    if method.combines:
        raise NotApplicableError("it reduces gradients itself, over another axis than the pipeline's")
    if method.recipe.axes:
        raise NotApplicableError("its mesh has no axis for a pipeline")
    pipeline = "T.pipeline(one_f_one_b(2, 2), stages)"
    along = "T.zero(1, mesh['dp'])", pipeline.replace("stages)", "stages, mesh['nodes'])")
    method.equal([method.on(2, pipeline, loss="layers"), method.on(4, *along, loss="layers")], method.alone(loss="layers"))


def _half(policy: str) -> Callable[[Method], None]:
    def check(method: Method) -> None:
        setups = [method.on(1, policy), *(method.on(2, policy, parallel) for parallel in (_ZERO[2], _MEAN))]
        method.equal(setups, method.alone(), max(NEAR, method.within))

    return check


# -- states ------------------------------------------------------------------------------------------------------------


def _saving(recipe: Recipe, setup: Setup, first: int, path: str, until: int, save: bool) -> tuple[Any, dict[str, Tensor]]:
    """Trains from step ``first`` to ``until``; returns params and the state's tensors."""
    from functional_ds.checkpointing.load import load
    from functional_ds.checkpointing.save import save as save_state

    step, state = started(recipe, setup)
    if first:
        state = load(path, like=state)
    for index in range(first, until):
        state, _ = step(state, recipe.rows(setup, index))
    if save:
        save_state(state, path)
    return step.params(state), _tensors(state)


def _tensors(state: State) -> dict[str, Tensor]:
    leaves = [(path, leaf) for path, leaf in tree.named(state) if isinstance(leaf, Tensor)]
    return {path: leaf.detach().clone() for path, leaf in leaves if "loss_scale" not in path and not path.startswith("key")}


def _moves(method: Method) -> list[tuple[Setup, Setup]]:
    """Pairs of setups with different stages, world sizes and meshes."""
    if method.counts_ranks:
        return [(setup, setup) for setup in map(method.on, RANKS)]
    pairs = [((2, _ZERO[0]), (3, _ZERO[3])), ((2, _ZERO[3]), (3, _ZERO[1]))]
    if not method.recipe.axes:
        pairs.append(((4, _HYBRID), (2, _ZERO[0])))
    setups = [(method.on(a, one), method.on(b, other)) for (a, one), (b, other) in pairs]
    if method.recipe.shares_model:
        one, two, four = method.alone(), method.on(2, _ZERO[1]), method.on(1, _ZERO[3], along=_WIDE)
        setups += [(two, one), (one, four), (four, two)]
    return list(dict.fromkeys(setups))


def _checkpoints(method: Method) -> None:
    for before, after in _moves(method):
        wanted = method.run(method.on(after.ranks) if method.counts_ranks else method.alone())
        with tempfile.TemporaryDirectory() as path:
            comm.simulate(_saving, method.recipe, before, 0, path, 2, True, world_size=before.ranks)
            results = comm.simulate(_saving, method.recipe, after, 2, path, STEPS, False, world_size=after.ranks)
        for rank, (resumed, _) in enumerate(results):
            words = f"saved after 2 steps of {before}, and loaded into {after}"
            _near(method, resumed, wanted[method.model(after, rank)][0], words, after)


def _slots(method: Method) -> None:
    if method.counts_ranks:
        raise NotApplicableError("it depends on the number of ranks by design")
    alone = method.alone()
    states = comm.simulate(_saving, method.recipe, alone, 0, "", STEPS, False, world_size=alone.ranks)
    for setup in dict.fromkeys(method.on(2, zero) for zero in _ZERO):
        with tempfile.TemporaryDirectory() as path:
            comm.simulate(_saving, method.recipe, setup, 0, path, STEPS, True, world_size=setup.ranks)
            again = comm.simulate(_saving, method.recipe, alone, STEPS, path, STEPS, False, world_size=alone.ranks)
        for (_, loaded), (_, wanted) in zip(again, states, strict=True):
            shared = {name: leaf for name, leaf in loaded.items() if name in wanted}
            words = f"{setup}, its state loaded into {alone}"
            _near(method, shared, {name: wanted[name] for name in shared}, words, setup, moved=False)


def _donation(method: Method) -> None:
    for setup in dict.fromkeys((method.on(1), method.on(2, _ZERO[1]), method.on(2, _ZERO[3]))):
        try:
            kept = comm.simulate(partial(train, method.recipe, setup, keep=True), world_size=setup.ranks)
        except AssertionError as error:
            raise WrongError(f"{setup}: {error}", setup) from None
        _same_bits(kept, method.run(setup), f"{setup}: donate=False and donate=True", setup)
        before, after = (comm.simulate(_left, method.recipe, setup, gives, world_size=setup.ranks) for gives in (False, True))
        _same_bits(before, after, f"{setup}: the states after donate=False and donate=True", setup)


def _left(recipe: Recipe, setup: Setup, donate: bool) -> tuple[dict[str, Tensor]]:
    """The state's tensors after all steps, slots included."""
    step, state = started(recipe, setup)
    for index in range(setup.steps):
        state, _ = step(state, recipe.rows(setup, index), donate=donate)
    return (_tensors(state),)


def _skipping(recipe: Recipe, setup: Setup, skips: bool) -> tuple[dict[str, Tensor], list[Tensor], list[str]]:
    """Trains on all batches but one, which is left out, or which a loss scale skips.

    Returns the state's tensors, the losses, and what is wrong with the skipped step.
    """
    step, state = started(recipe, setup)
    losses, wrong = [], []
    for index in range(setup.steps):
        if index != _SKIPPED:
            state, metrics = step(state, recipe.rows(setup, index))
            losses.append(metrics["loss"])
        elif skips:
            before = _tensors(state)
            state, metrics = overflowing(step)(state, recipe.rows(setup, index))
            if not metrics.get("skipped", torch.zeros(())):
                wrong.append("a step whose gradients overflow on one rank is not skipped")
            after = _tensors(state).items()
            changed = [path for path, leaf in after if path not in before or not same_or_nan(leaf, before[path])]
            wrong += [f"a skipped step changes state.{path}" for path in changed]
    return _tensors(state), losses, wrong


def _skips(method: Method) -> None:
    for setup in (method.on(ranks, _CONSTANT, *parallel) for ranks, *parallel in ((1,), (2, _ZERO[1]), (2, _MEAN))):
        skipped, without = (
            comm.simulate(_skipping, method.recipe, setup, skips, world_size=setup.ranks) for skips in (True, False)
        )
        for rank, (*_, wrong) in enumerate(skipped):
            if wrong:
                raise WrongError(f"{setup}, rank {rank}: {wrong[0]}", setup)
        for which, what in enumerate(("the states", "the losses")):
            after, alone = ([(result[which],) for result in results] for results in (skipped, without))
            _same_bits(after, alone, f"{setup}: {what} after a skipped step, and without it,", setup)


# -- worlds ------------------------------------------------------------------------------------------------------------


def _same_bits(results: list[Any], others: list[Any], words: str, setup: Setup) -> None:
    for rank, (one, other) in enumerate(zip(results, others, strict=True)):
        for (path, x), y in zip(tree.named(one[0]), tree.leaves(other[0]), strict=True):
            if not same_or_nan(x, y):
                apart_by = (x.double() - y.double()).abs().max()
                raise WrongError(f"{words} differ in {path!r} on rank {rank} by {apart_by:.1e}", setup)


def _variance(method: Method) -> None:
    for setup in dict.fromkeys(
        (method.on(2, _ZERO[0], steps=2), method.on(2, _ZERO[3], steps=2), method.on(2, _MEAN, steps=2))
    ):
        comm.simulate(train, method.recipe, setup, world_size=setup.ranks, variance=True)


def _interleavings(method: Method) -> None:
    setup = method.on(3, _ZERO[3], steps=2)
    explore(lambda: train(method.recipe, setup)[0], world_size=setup.ranks, seeds=6)


def _processes(method: Method) -> None:
    setup = method.on(2, _ZERO[2])
    try:
        pickle.dumps(method.recipe)
    except Exception as error:
        raise NotApplicableError(
            f"other processes cannot import it ({error}); give holds a function of a module that makes it"
        ) from None
    results = spawn(_in_process, method.recipe, setup, world_size=setup.ranks)
    _same_bits(results, method.run(setup), "processes and simulated ranks", setup)


def _in_process(recipe: Recipe, setup: Setup) -> tuple[Any, list[Tensor]]:
    return train(recipe, setup)[:2]


def _jit(method: Method) -> str | None:
    from functional_ds.compiling.jitted.jit_step import JitWarning, jit

    reasons: list[str] = []
    for setup in dict.fromkeys((method.on(1), method.on(2, _ZERO[3]))):

        def jitted(setup: Setup = setup) -> tuple[Any, Any, int, Step]:
            return train(method.recipe, setup, changed=jit)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", JitWarning)
            results = comm.simulate(jitted, world_size=setup.ranks)
        _same_bits(results, method.run(setup), f"{setup}: fds.jit(step) and step", setup)
        reasons += getattr(results[0][3], "reasons", [])
    return f"runs eagerly: {reasons[0]}" if reasons else None


def _bytes(method: Method) -> None:
    if method.sends is None:
        raise NotApplicableError("no formula was given: sends=function of (stage, ranks)")

    def sent(recipe: Recipe, setup: Setup) -> int:
        return max(result[2] for result in comm.simulate(train, recipe, setup, world_size=setup.ranks))

    plain = attrs.evolve(method.recipe, make=partial(sgd, 0.1)) if method.recipe.is_optimizer else method.recipe
    stages: dict[int | None, str] = {None: ""} if method.combines else dict(enumerate(_ZERO))
    shared = method.recipe.shares_model
    for ranks in (ALONG, _WIDE) if shared else RANKS:
        for stage, zero in stages.items():
            setup = method.on(1, zero, steps=2, along=ranks) if shared else method.on(ranks, zero, steps=2)
            without = attrs.evolve(setup, transforms=tuple(text for text in setup.transforms if text != "method"))
            more, expected = sent(method.recipe, setup) - sent(plain, without), method.sends(stage, ranks)
            if more != expected:
                raise WrongError(f"{setup}: a rank sends {more} bytes more than without it, not {expected}", setup)


LAWS = (
    Law("oracle", "on one device it computes what the oracle does", _oracle),
    Law("ranks", "on 2 and 3 ranks it computes what the oracle of all ranks' rows does", _ranks),
    Law("stages", "in ZeRO stages 0 to 3, on 2 and 3 ranks, it is the step on one device", _stages),
    Law("replicated", "so it is with T.replicated and the mean", _replicated),
    Law("accumulate before", "listed after T.accumulate(2) it is the step on the whole batch", _accumulated(first=_ACCUMULATE)),
    Law("accumulate after", "listed before T.accumulate(2) it is the step on the whole batch", _accumulated(last=_ACCUMULATE)),
    Law("clip before", "listed after T.clip it is the same on any ranks", _clipped(first=_CLIP)),
    Law("clip after", "listed before T.clip it is the same on any ranks", _clipped(last=_CLIP)),
    Law("slots", "its state in any stage, loaded on one device, is that of one device", _slots),
    Law("checkpoints", "saved and loaded in another stage, world size and mesh, it goes on as one run", _checkpoints),
    Law("donation", "donate=False gives the same bits and leaves the old state as it was", _donation),
    Law("skipped steps", "a step that a loss scale skips changes nothing, and later steps are as without it", _skips),
    Law("bf16", "under the policy bf16 it is near the step in fp32", _half(BF16)),
    Law("fp16", "under the policy fp16 with a loss scale it is near the step in fp32", _half(_FP16)),
    Law("unused leaves", "leaves that the loss does not use are treated alike in all stages", _unused),
    Law("pipelines", "in a pipeline of two stages it is the step on one device", _pipelines),
    Law("variance", "no value is equal on ranks where it should differ, or the reverse", _variance),
    Law("interleavings", "the order in which ranks run changes no bit", _interleavings),
    Law("jit", "fds.jit(step) gives the step's bits", _jit),
    Law("bytes", "a rank sends what the formula says", _bytes),
    Law("processes", "processes give the simulated ranks' bits", _processes),
)
