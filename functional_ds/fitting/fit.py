"""``fit``: the loop around a step that saves, resumes, watches and reports."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

from functional_ds import comm
from functional_ds.checkpointing import Saver
from functional_ds.step.state import State
from functional_ds.step.step import Step

from .checkpoints import Keeper
from .data import as_source
from .loggers import Journal, Logger, checked
from .non_finite import OnNonFinite, RollBack, Stop
from .rng import Generators
from .run import Plan, Run
from .signals import Flag, noted_here
from .watchdog import watchdog

__all__ = ["fit"]


def fit(
    step: Step,
    state: State,
    batches: Any,
    *,
    steps: int | None = None,
    path: str | Path | None = None,
    every: int | None = None,
    minutes: float | None = None,
    keep_last: int | None = 3,
    keep_every: int | None = None,
    resume: bool = True,
    evaluate: Callable[[State], Mapping[str, Any]] | None = None,
    evaluate_every: int | None = None,
    loggers: Iterable[Logger] = (),
    log_every: int = 10,
    progress: bool = False,
    on_non_finite: OnNonFinite = Stop(after=3),  # noqa: B008  # a frozen value
    timeout: timedelta | None = timedelta(minutes=10),
    stop: Flag | None = None,
) -> State:
    """Makes steps until ``steps`` are made in all, and returns the state; run again with the same ``path``, it goes on.

    Law: ``run(k + j) = run(j) ∘ resume ∘ run(k)``, bit for bit on as many ranks, wherever the first run was ended (37).
    Evaluations leave torch's generators as they were.

    Every rank of the world calls it. Checkpoints are written in the background. SIGTERM and SIGINT end the run after the step
    that it is in, with a checkpoint; a second such signal ends the process at once.

    Args:
        step: what ``fds.train_step`` and transforms make.
        state: of a fresh run, from ``step.init``; it is donated.
        batches: this rank's part of each: a function of the index, a sequence, a loader with ``state_dict``, a source with
            ``at(position)``. These go on where they were, without replaying; any other iterable is drawn from its beginning.
            ``fitting.Epochs(batches)`` goes over them again and again.
        steps: how many, earlier runs included; None for as long as all ranks have batches.
        path: a folder for checkpoints that all ranks see; None saves nothing.
        every: a checkpoint each so many steps. One is made at the end, too.
        minutes: a checkpoint each so many minutes, by rank 0's clock.
        keep_last: how many checkpoints stay; None for all.
        keep_every: those whose number of updates is a multiple of this stay as well.
        resume: whether to go on from the newest checkpoint in ``path``; False starts anew.
        evaluate: from a state to numbers, called on all ranks; it must not step.
        evaluate_every: after each so many steps; before the first and after the last it is called, too.
        loggers: ``CsvLog(path)``, ``TensorBoard(folder)`` or alike; used on rank 0.
        log_every: how many steps lie between two whose numbers are read and logged. Between them nothing waits for the device.
        progress: a bar on rank 0; needs the extra ``fit``.
        on_non_finite: ``Stop(after)`` or ``RollBack(after)`` for losses that are not finite; None for neither. Judged when a
            step is logged. A checkpoint is made with finite losses and params only.
        timeout: how long a step, a save or an evaluation may take before ranks are taken to hang; None for no watchdog.
        stop: a flag of your own instead of signal handlers; needed where ranks are threads.

    Cost: an all-reduce of two numbers a step, another of three for each step that is logged or saved.

    Raises:
        Interrupted: a SystemExit with code 128 + the signal's number, once all is written; it has ``state`` and ``done``.
        NonFiniteLossError: as ``on_non_finite`` says.
        ValueError: the batches end before ``steps``; numbers that make no sense; a checkpoint that ``fit`` did not make.
        CheckpointError: what is wrong with a checkpoint.
        RankFailedError, TimedOutError: other ranks have died, or nothing moves.

    >>> import functional_ds as fds
    >>> step = fds.train_step(lambda params, x: (params["w"] * x).sum(), fds.sgd(0.5))
    >>> state = fds.fit(step, step.init({"w": torch.ones(2)}), lambda index: torch.ones(2), steps=3)
    >>> step.params(state)["w"].tolist()
    [-0.5, -0.5]
    """
    if not isinstance(state, State):
        raise TypeError(f"state={type(state).__name__}: fit takes a state that the step made, as from step.init(params)")
    plan, generators = Plan(steps, evaluate, evaluate_every, on_non_finite), Generators()
    _check(path=path, every=every, minutes=minutes, log_every=log_every, on_non_finite=on_non_finite, timeout=timeout)
    source, kept = as_source(batches), checked(loggers)
    with ExitStack() as open_:
        flag = stop if stop is not None else open_.enter_context(noted_here())
        watch = open_.enter_context(watchdog(timeout))
        keeper = Keeper(None if path is None else Path(path), every, minutes)
        leads = comm.world().rank == 0
        journal = Journal(kept if leads else (), log_every, progress and leads, steps)
        open_.callback(journal.close)
        run = Run(step, plan, source, keeper, journal, watch, flag, generators, state)
        del state
        watch.at(0, "loading a checkpoint")
        if resume:
            run.resume()
        if path is not None:
            keeper.saver = open_.enter_context(Saver(path, keep_last=keep_last, keep_every=keep_every))
        return run.go()


def _check(**given: Any) -> None:
    for name in ("every", "log_every"):
        value = given[name]
        if value is not None and (type(value) is not int or value < 1):
            raise ValueError(f"{name}={value!r}: a number of steps is an int of at least 1")
    if given["timeout"] is not None and not isinstance(given["timeout"], timedelta):
        raise TypeError(f"timeout={given['timeout']!r}: pass timedelta(seconds=...), or None for no watchdog")
    if given["minutes"] is not None and not given["minutes"] > 0:
        raise ValueError(f"minutes={given['minutes']!r}: must be above 0")
    if given["path"] is None:
        for name in ("every", "minutes"):
            if given[name] is not None:
                raise ValueError(f"{name}={given[name]!r} asks for checkpoints; pass path, the folder for them")
        if isinstance(given["on_non_finite"], RollBack):
            raise ValueError(
                f"on_non_finite={given['on_non_finite']!r} goes back to a checkpoint; pass path, the folder for them"
            )
