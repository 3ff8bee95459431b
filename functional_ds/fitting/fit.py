"""``fit``: a training loop that saves, resumes, watches for hangs and logs."""

from contextlib import ExitStack, closing
from datetime import timedelta
from typing import Any

from functional_ds import comm
from functional_ds.step.state.state import State
from functional_ds.step.step import Step

from .checkpoints import CheckpointManager, Checkpoints
from .checks import check_steps
from .data import as_source
from .loggers import Logging, MeasuredStep, MetricLogger
from .non_finite import OnNonFinite, RollBack, Stop
from .run import Evaluation, Interrupted, TrainingRun
from .signals import Flag, stop_on_signals
from .watchdog import watchdog


def fit(
    step: Step,
    state: State,
    batches: Any,
    *,
    steps: int | None = None,
    checkpoints: Checkpoints | None = None,
    evaluation: Evaluation | None = None,
    logging: Logging = Logging(),  # noqa: B008  # a frozen value
    on_non_finite: OnNonFinite = Stop(after=3),  # noqa: B008
    timeout: timedelta | None = timedelta(minutes=10),
    stop: Flag | None = None,
) -> State:
    """Trains until ``steps`` steps are made in total and returns the state; resumes from the latest checkpoint, if any.

    ``run(k + j) = run(j) ∘ resume ∘ run(k)``, bitwise for equal numbers of ranks, wherever the first run was
    interrupted. Evaluations do not affect torch's generators.

    Call it on every rank of the world. Checkpoints are written asynchronously. SIGTERM and SIGINT end the run after the current
    step, with a checkpoint; a second signal ends the process immediately.

    Args:
        step: from ``fds.train_step`` and transforms.
        state: a fresh run's, from ``step.init``; it is donated.
        batches: this rank's part of each batch: a function of the index, a sequence, a loader with ``state_dict``, or a source
            with ``at(position)``. These resume without replaying; any other iterable is drawn again from its beginning.
            ``fitting.Epochs(batches)`` repeats them.
        steps: the number of steps, earlier runs included; None for as long as all ranks have batches.
        checkpoints: ``Checkpoints(path, every=1000)``: where and when to save; None neither saves nor resumes.
        evaluation: ``Evaluation(function, every=1000)``: from a state to numbers, which are logged.
        logging: ``Logging(loggers, every=10, progress=True)``: where and how often to log; by default rank 0 prints.
        on_non_finite: ``Stop(after)`` or ``RollBack(after)`` for losses that are not finite, checked when a step is logged;
            None ignores them. Checkpoints are made only while losses and params are finite.
        timeout: the longest time for a step, a save or an evaluation, after which ranks are considered hung. None for no
            watchdog.
        stop: a flag to use instead of signal handlers; needed if ranks are threads.

    Cost: an all-reduce of three numbers a step, another of three for each step that is logged or saved.

    Raises:
        Interrupted: a SystemExit with code 128 + the signal's number, after the checkpoint; it has ``state`` and ``done``.
        NonFiniteLossError: by ``on_non_finite``.
        ValueError: the batches end before ``steps``; a number is out of range; ``fit`` did not make the newest checkpoint.
        CheckpointError: a checkpoint cannot be written or read, on some rank; all ranks raise it.
        RankFailedError, TimedOutError: other ranks have died, or hang.

    >>> import functional_ds as fds
    >>> step = fds.train_step(lambda params, x: (params["w"] * x).sum(), fds.sgd(0.5))
    >>> state = fds.fit(step, step.init({"w": torch.ones(2)}), lambda index: torch.ones(2), steps=3)
    step 3: loss 0, seconds_per_step ...
    >>> step.params(state)["w"].tolist()
    [-0.5, -0.5]
    """
    if not isinstance(state, State):
        raise TypeError(f"state={type(state).__name__}: fit takes a state that the step made, as from step.init(params)")
    if not isinstance(on_non_finite, Stop | RollBack | None):
        raise TypeError(f"on_non_finite={on_non_finite!r}: pass fitting.Stop(), fitting.RollBack(), or None")
    _check(steps, checkpoints=checkpoints, evaluation=evaluation, logging=logging, timeout=timeout)
    if checkpoints is None and isinstance(on_non_finite, RollBack):
        raise ValueError(f"on_non_finite={on_non_finite!r} goes back to a checkpoint; pass checkpoints=fds.Checkpoints(path)")
    source = as_source(batches)
    with ExitStack() as open_:
        flag = stop if stop is not None else open_.enter_context(stop_on_signals())
        watch = open_.enter_context(watchdog(timeout))
        measured = None if logging.profile is None else logging.profile.start(step)
        active = comm.world().rank == 0
        metrics = open_.enter_context(closing(MetricLogger(logging, steps, active=active, measured=measured)))
        manager = open_.enter_context(CheckpointManager(checkpoints))
        run = TrainingRun(
            step,
            state,
            steps=steps,
            evaluation=evaluation,
            on_non_finite=on_non_finite,
            source=source,
            checkpoints=manager,
            metrics=metrics,
            watch=watch,
            flag=flag,
        )
        del state
        watch.at(0, "loading a checkpoint")
        if checkpoints is not None and checkpoints.resume:
            run.resume()
        manager.open()
        try:
            trained = run.go()
        except Interrupted:
            _finish(measured)
            raise
        _finish(measured)
        return trained


def _finish(measured: MeasuredStep | None) -> None:
    if measured is not None:
        measured.finish()


def _check(steps: Any, **given: Any) -> None:
    check_steps("steps", steps, least=0)
    kinds = {
        "checkpoints": (Checkpoints, "fds.Checkpoints(path), or None to save nothing"),
        "evaluation": (Evaluation, "fds.Evaluation(function), or None"),
        "logging": (Logging, "fds.Logging(loggers)"),
        "timeout": (timedelta, "timedelta(seconds=...), or None for no watchdog"),
    }
    for name, (cls, instead) in kinds.items():
        value = given[name]
        if not isinstance(value, cls) and not (value is None and name != "logging"):
            raise TypeError(f"{name}={value!r}: pass {instead}")
