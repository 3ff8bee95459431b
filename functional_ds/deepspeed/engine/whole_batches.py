"""``train_batch`` and ``eval_batch`` of an engine whose module has a ``loss_fn``."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from functional_ds import comm
from functional_ds.deepspeed.utils.loaders import RepeatingLoader


class WholeBatches:
    """Calls of an engine that take all micro-batches of an update, or of an evaluation, from an iterator."""

    def train_batch(self: Any, data_iter: Iterator[Any] | None = None) -> Tensor:
        """One update of micro-batches ``(inputs, labels)``, of modules with a ``loss_fn``; errors drop the gradients so far.

        Returns:
            the mean loss over micro-batches and ranks.

        Args:
            data_iter: gives the micro-batches; None for the loader of ``training_data``.
        """
        batches, counts = self._batches(data_iter), self._counts
        before = counts.global_steps, counts.micro_steps
        self.train()
        try:
            for index in range(self._loop.micro_batches):
                self.set_gradient_accumulation_boundary(index == self._loop.micro_batches - 1)
                self.backward(self._loss(next(batches)))
                self.step()
        except BaseException:
            if counts.global_steps == before[0]:
                self._loop.discard()  # or the next update would also sum them
                counts.micro_steps = before[1]
            raise
        finally:
            self.__dict__["_boundary"] = None
        return self.metrics["loss"]  # type: ignore[no-any-return]

    def eval_batch(self: Any, data_iter: Iterator[Any], return_logits: bool = False) -> Any:
        """The mean loss over micro-batches and ranks, without gradients.

        Args:
            data_iter: gives the micro-batches.
            return_logits: whether to return the module's outputs too.
        """
        training, values, losses = self.module.training, [], []
        self.eval()
        try:
            with torch.no_grad():
                for _ in range(self._loop.micro_batches):
                    inputs, labels = next(data_iter)
                    values.append(self._value(inputs))
                    losses.append(self._loss_fn(values[-1], labels))
        finally:
            self.train(training)
        loss = comm.all_reduce(torch.stack(losses).mean(), op="avg")
        return (loss, values) if return_logits else loss

    def _batches(self: Any, data_iter: Iterator[Any] | None) -> Iterator[Any]:
        if self._loss_fn is None:
            raise RuntimeError(
                f"train_batch: {type(self.module).__name__} has no loss_fn; PipelineModule(..., loss_fn=...) has one, other "
                "programs call engine(batch), engine.backward(loss), engine.step()"
            )
        if data_iter is not None:
            return data_iter
        if self.training_dataloader is None:
            raise RuntimeError("train_batch: pass data_iter, or training_data to initialize")
        if "_repeating" not in self.__dict__:
            self.__dict__["_repeating"] = RepeatingLoader(self.training_dataloader)
        return self.__dict__["_repeating"]  # type: ignore[no-any-return]

    def _loss(self: Any, batch: Any) -> Tensor:
        inputs, labels = batch
        return self._loss_fn(self._value(inputs), labels)  # type: ignore[no-any-return]

    def _value(self: Any, inputs: Any) -> Any:
        return self(*inputs) if isinstance(inputs, tuple | list) else self(inputs)

    @property
    def _loss_fn(self: Any) -> Any:
        return getattr(self.module, "loss_fn", None)
