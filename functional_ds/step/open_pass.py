"""A step in two halves, for custom training loops: a forward pass and its backward passes as values."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from threading import get_ident
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from functional_ds import comm
from functional_ds.base import tree
from functional_ds.base.containers import register_containers
from functional_ds.base.prng import Key
from functional_ds.base.tree import rows_of
from functional_ds.base.weighted import Weighted

from .pass_gradients import Gradients, RunsPasses
from .pass_scope import Pass, current_pass, detached, differentiated, with_buffers
from .phases import Trait
from .state.buffer_scope import BufferScope
from .state.buffers import BUFFERS
from .state.state import State
from .views.view import NeedsWhole, Pulling


class OpenPass:
    """One forward pass of a step, opened by ``Step.open``: functions run in it as the step runs its loss function.

    ```
    run = step.open(state, batch, grads)       nothing is computed yet
    y = run(function, *args)                   function(params, *args): casts, remat, gathers, buffers as in the step
    grads = run.backward(loss(y))              adds its gradients to those of earlier passes
    ```

    The passes of a step are micro-batches: their weights add up, so the update gets the mean. Several losses of one pass are
    summed, as in ``.grad``. A pass closes with its ``backward``, with ``close``, or at the end of a ``with`` block.

    Passes of several steps may be open at once and share tensors. ``backward`` differentiates only by the params of its own
    pass, also through functions of other open passes.

    Attributes:
        batch: what it was opened with.
        last: whether no further pass of this step has a backward, so that ZeRO stages 0 and 1 reduce during this one's. It must
            be equal on all ranks. It changes no gradient: if it is wrong, two reductions are added; if no pass was the last,
            ``finish`` reduces.

    >>> import torch, functional_ds as fds
    >>> step = fds.train_step(lambda params, x: (params["w"] * x).mean(), fds.sgd(1.0))
    >>> state, grads = step.init({"w": torch.zeros(2)}), None
    >>> for x in (torch.ones(1, 2), torch.full((1, 2), 3.0)):  # two micro-batches
    ...     with step.open(state, x, grads) as run:
    ...         grads = run.backward(run(lambda params, x: params["w"] * x, x).sum())
    >>> grads
    Gradients(2 rows, loss)
    >>> state, metrics = step.finish(state, grads)
    >>> step.params(state)["w"].tolist()  # the mean gradient is 2
    [-2.0, -2.0]
    """

    def __init__(self, step: RunsPasses, so_far: Gradients, batch: Any, *, trains: bool) -> None:
        self._step, self._grads, self.batch, self._trains = step, so_far, batch, trains
        self._state = state = so_far.after()
        self._rows = 0 if batch is None else rows_of(batch)
        self._keyed = False
        self._scope = BufferScope(state.slots.get(BUFFERS), keeps=trains)
        self._pass: Pass | None = None  # None until something runs
        self._pulling: Pulling | None = None  # of a ``loss.backward()`` that other code runs
        self._thread = get_ident()
        self._scaled: tuple[Weighted, dict[str, Weighted]] | None = None  # the loss that other code differentiates
        self._weighed = False  # whether one of its losses has counted
        self._closed = False
        self.last = True

    @staticmethod
    def opened(
        step: RunsPasses, state: State, batch: Any, so_far: Gradients | None, structure: Any, *, trains: bool
    ) -> "OpenPass":
        """A pass of a step.

        Raises:
            ValueError: a transform needs the whole batch; ``so_far`` belongs to another state or was used already.
        """
        for layer in step.layers:
            if "gradients" in layer.phases and Trait.SPLITS_BATCHES not in layer.traits:
                raise ValueError(
                    f"open: {layer.name} runs the passes of a step itself, so the step cannot be run as separate passes "
                    f"({step}); call step(state, batch)"
                )
        if so_far is None:
            so_far = Gradients(state, structure)
        so_far.check(state)
        return OpenPass(step, so_far, batch, trains=trains)

    def __repr__(self) -> str:
        how = "closed" if self._closed else "not run yet" if self._pass is None else "open"
        return f"OpenPass({how}, {self._rows} rows)"

    def __enter__(self) -> "OpenPass":
        return self

    def __exit__(self, raised: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end(error)

    @property
    def key(self) -> Key | None:
        """The key that the loss function would get; None in an evaluation, and for a pass without a batch."""
        if not self._keyed:
            self._keyed = True
            key = None
            if self._trains and self.batch is not None:
                with self._ends_if_it_fails(), comm.world().world.step():  # ranks may exchange their numbers of rows
                    key = self._grads.key_at(self._step, self._grads.state, self._rows)
            self._state = tree.replace(self._state, key=key)
        return self._state.key

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``function(params, *args, **kwargs)``, run as the step runs its loss function.

        Raises:
            RuntimeError: the pass is closed, or its backward pass has begun.
        """
        pass_ = self._opened()
        if pass_.forward_ended:
            raise RuntimeError(
                "this pass has begun its backward pass, so no function can run in it any more: run all of them before, or open "
                "another pass"
            )
        params = pass_.view.params  # type: ignore[union-attr]
        with self._ends_if_it_fails(), comm.world().world.step(), pass_.resumed(), pass_.forward():
            output = self._step.forward(self._state, lambda given: function(params, *given[0], **given[1]), (args, kwargs))
        self._follow(output)
        return output

    def backward(
        self,
        loss: Any = None,
        *,
        last: bool | None = None,
        retain_graph: bool = False,
        close: bool = True,
        weighs: bool | None = None,
    ) -> Gradients:
        """The gradients of a loss, added to those of earlier passes.

        Args:
            loss: as a loss function returns it: a scalar, ``Weighted(sum, weight)``, or a pair of that and further metrics;
                None for the step's own, of the pass's batch.
            last: overrides the attribute.
            retain_graph: whether a later ``backward`` uses this graph again. The pass stays open.
            close: False for further losses of this pass, whose graphs share nothing with this one.
            weighs: whether the loss's weight counts; by default that of the pass's first. False for a loss that is added to
                that of another pass, such as a second loss of one micro-batch.

        Raises:
            RuntimeError: the loss has no graph; the pass is closed.
        """
        self._refuse_untrained()
        if loss is None and self.batch is None:
            raise ValueError("backward: give it a loss, as the pass was opened without a batch for the step's own")
        self.last, _ = self.last if last is None else last, self.key
        with self._ends_if_it_fails(), comm.world().world.step():
            if loss is None and self._pass is None:
                grads = self._grads = self._grads.taken()
                gradients = self._step.base["gradients"]  # without what cuts a batch
                after, total, metrics = gradients(self._step, self._state, self.batch, grads.carry, self.last)
                grads.add(total, metrics, after, self._rows, last=self.last)
                self._closed = True
                return grads
            loss, metrics = self._weighted(loss, weighs)
            return self._add(loss, metrics, close and not retain_graph, retain_graph=retain_graph)

    def scaled(self, loss: Any, *, weighs: bool | None = None) -> Tensor:
        """The loss as ``backward`` would differentiate it; call its ``.backward()``, then ``collect``."""
        self._refuse_untrained()
        with self._ends_if_it_fails(), comm.world().world.step():
            self._scaled = self._weighted(loss, weighs)
        return self._scaled[0].sum  # type: ignore[no-any-return]

    def collect(self, *, close: bool = True) -> Gradients:
        """What ``backward`` would return, after a call of torch's ``loss.backward()``.

        The loss must be a plain mean of what this pass returned, or come from ``scaled``.

        Args:
            close: as for ``backward``.

        Raises:
            RuntimeError: no backward pass went through what the pass returned; the step scales losses, and this one was not.
        """
        self._refuse_untrained()
        self._opened()
        pulling, self._pulling = self._pulling, None
        if pulling is None:
            raise RuntimeError(
                "collect: no backward pass has reached what this pass returned; call loss.backward() first, or "
                "grads = run.backward(loss)"
            )
        with self._ends_if_it_fails(), comm.world().world.step():
            scaled, self._scaled = self._scaled, None
            known = scaled is not None
            if scaled is None:
                one, _ = self._weighted(torch.zeros((), device=self._state.step.device), True)
                if one.weight != 1:
                    raise RuntimeError(
                        f"collect: losses of this step are scaled ({self._step}); differentiate run.scaled(loss), not loss"
                    )
                scaled = tree.replace(one, weight=one.weight * (not self._weighed)), {}
            return self._add(*scaled, close, known=known, pulling=pulling)

    def close(self) -> None:
        """Ends the pass, once; its graph cannot be differentiated afterwards."""
        self._end(None)

    # -- inside ------------------------------------------------------------------------------------------------------------

    def runs_on(self, state: State) -> bool:
        """Whether a graph of this pass may need the params of a state."""
        return self._pass is not None and self._grads.state.step is state.step

    def written(self) -> State:
        """The state after a closed pass."""
        return with_buffers(self._state, self._scope)

    def _refuse_closed(self) -> None:
        if self._closed:
            raise RuntimeError(
                "this pass is closed; open another. It stays open for a further backward with retain_graph=True or close=False"
            )

    def _refuse_untrained(self) -> None:
        self._refuse_closed()
        if not self._trains:
            raise RuntimeError("this pass was opened with trains=False, so there are no gradients")

    def _opened(self) -> Pass:
        self._refuse_closed()
        if self._pass is None:
            with self._ends_if_it_fails(), comm.world().world.step():
                _ = self.key
                self._state.graphs.passes.add(self)
                looks = self._trains and self._step.guarded
                self._pass = Pass(self._trains, self._scope, self._state.graphs if looks else None)
                with self._pass.resumed():
                    self._pass.view = self._step.view(self._state, trains=self._trains)
        return self._pass

    def _weighted(self, loss: Any, weighs: bool | None) -> tuple[Weighted, dict[str, Weighted]]:
        """A loss after the step's ``loss`` phase, with the user's function replaced by the given value."""
        pass_ = self._opened()
        forward = nullcontext() if pass_.forward_ended else pass_.forward()
        with pass_.resumed(), forward, torch.set_grad_enabled(self._trains):
            pass_.loss = loss
            try:
                total, metrics = self._step.loss(self._state, pass_.view.params, self.batch)  # type: ignore[union-attr]
            finally:
                pass_.loss = None
        if weighs is False or (weighs is None and self._weighed):
            total = tree.replace(total, weight=torch.zeros_like(total.weight))
        return total, metrics

    def _add(
        self,
        loss: Weighted,
        metrics: Mapping[str, Weighted],
        close: bool,
        *,
        known: bool = True,
        retain_graph: bool = False,
        pulling: Pulling | None = None,
    ) -> Gradients:
        pass_, grads = self._opened(), self._grads.taken()
        self._grads = grads
        with pass_.resumed():
            self._state, total = differentiated(
                self._step, self._state, pass_, loss, grads.carry, self.last, retain_graph=retain_graph, pulling=pulling
            )
        rows, self._rows, self._weighed = self._rows, 0, True
        grads.add(total, detached(loss, metrics) if known else {}, self._state, rows, last=self.last)
        grads.last_pass = self
        if close:
            self._end(None)
        return grads

    def _follow(self, output: Any) -> None:
        """Hooks what a function returned, so that a backward pass that reaches it resumes this pass."""
        register_containers(output)
        for leaf in tree.leaves(output):
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                leaf.register_hook(self._reached)

    def _reached(self, grad: Tensor) -> None:
        """A backward pass has reached what this pass returned, and continues into it."""
        pass_ = self._pass
        if pass_ is None:
            raise RuntimeError("the loss was computed in a pass that is closed; call backward before it closes")
        if current_pass() is pass_:
            return
        if get_ident() != self._thread:
            raise RuntimeError(
                "loss.backward() runs in a thread of the device, where its pass is not known: call "
                "run.backward(loss), or torch.autograd.set_multithreading_enabled(False) before"
            )
        if self._pulling is None:
            with pass_.resumed():
                carry = self._grads.carry
                self._pulling = pass_.pull(None, None if carry is None else carry.sum, self.last)
        pass_.resume_until_backward_ends()

    @contextmanager
    def _ends_if_it_fails(self) -> Iterator[None]:
        try:
            yield
        except NeedsWhole as error:
            self._end(error)
            raise RuntimeError(str(error)) from error
        except BaseException as error:
            self._end(error)
            raise

    def _end(self, error: BaseException | None) -> None:
        pass_, self._pass, self._closed = self._pass, None, True
        pulling, self._pulling = self._pulling, None
        if pass_ is None:
            return
        if error is not None:
            pass_.end(failed=True)
            return
        with comm.world().world.step():
            if pulling is not None:
                pulling.drop()
            pass_.end()
