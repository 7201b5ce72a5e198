"""Train without a flush: PipeDream (Narayanan et al. 2019) and PipeDream-2BW (Narayanan et al. 2021).

A step does not wait for its own microbatches. A call of ``train_step`` feeds its batch into the pipeline, and returns
the gradients that became complete meanwhile. So the usual loop, ``train_step`` and ``optimizer.step``, runs the papers'
one-forward-one-backward schedule::

    call k on stage s of p, m microbatches a call

    forward  k m,  backward k m - (p-1-s),  forward k m + 1,  backward k m + 1 - (p-1-s),  ...

    pipedream      m = 1; .grad belongs to batch k - (p-1-s), which differs between stages
    pipedream_2bw  m >= p; .grad belongs to batch k - 1 on all stages

``.grad`` stays empty while the pipeline fills; :meth:`AsynchronousPipeline.drain` returns the remaining gradients.

The backward pass of a microbatch needs the weights of its forward pass, but optimizers change weights in place. So each
call computes with its own leaf tensors, which share the parameters' memory. If some of the call's microbatches are
still in flight when it ends, the parameters move to new memory, which the optimizer changes, while the leaves keep the
old memory: the weight stash. Stage ``s`` has ``p - s`` versions in PipeDream and two in PipeDream-2BW, the newest
included.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..._compat.replaced import attribute_replaced, entries_replaced
from ..._compat.torch import own_parameters
from ..._compat.torch_device import device_module, is_accelerator
from ...distributed.ops.shared_casts import Casts, sharing
from ...errors import ConfigError
from ...parallel.pipeline.microbatches import Batch, share_out
from ...parallel.pipeline.orders import order
from ...parallel.pipeline.run import Pipeline
from ...parallel.pipeline.timeline import Order
from ...train.runtime import Objective, Runtime
from ...train.runtime.batches import Microbatch


class _Version:
    """Hold the version of the weights with which the microbatches of one ``train_step`` call compute."""

    def __init__(self, model: nn.Module, call: int, microbatches: int) -> None:
        leaves: dict[int, tuple[Tensor, nn.Parameter]] = {}
        self._places: list[tuple[dict[str, Any], str, nn.Parameter]] = []
        for module in model.modules():
            for name, parameter in own_parameters(module).items():
                if parameter is not None and parameter.requires_grad:
                    if id(parameter) not in leaves:
                        leaves[id(parameter)] = parameter, nn.Parameter(parameter.data)
                    self._places.append((own_parameters(module), name, leaves[id(parameter)][1]))
        # Pairs: a parameter, and the leaf tensor with which microbatches compute in its place.
        self.leaves = list(leaves.values())
        self.kept: list[tuple[Tensor, Tensor]] = []
        self._casts = Casts()
        self.call = call
        self.left = microbatches  # number of backward passes that have not run yet

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Make the model compute with this version of the weights inside the ``with`` block."""
        with entries_replaced(self._places), sharing(self._casts):
            yield

    def gradients(self) -> list[Tensor]:
        """Return the gradients that backward passes have computed so far for this version of the weights."""
        made = [leaf.grad for _, leaf in self.leaves] or [gradient for _, gradient in self.kept]
        return [gradient for gradient in made if gradient is not None]

    def retire(self) -> None:
        """Keep this version's gradients, and free its weights, because no microbatch needs these weights any more."""
        self.kept = [
            (parameter, leaf.grad) for parameter, leaf in self.leaves if leaf.grad is not None
        ]
        self.leaves, self._places, self._casts = [], [], Casts()


class AsynchronousPipeline(Pipeline):
    """Run the stages of one rank under a schedule without a flush."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime)
        self._last = self._layout.pp - 1
        self._depth = self._last - self._rank  # microbatches in flight between two calls
        # Whether each update uses gradients of the same batch on all stages.
        self._every = self._layout.pipeline_schedule == "pipedream_2bw"
        self._broken = False
        self._trained: list[str] = []
        self._evaluators = [self._worker(stage) for stage in self._stages.of_rank(self._rank)]
        self._forgotten()

    def _forgotten(self) -> None:
        self._calls = self._backward = self._forward = 0
        self._held: dict[int, Microbatch] = {}  # microbatches in flight, by number
        self._versions: dict[int, _Version] = {}  # microbatch -> the weights of its forward pass
        self._finished: deque[_Version] = deque()  # versions whose backward passes are over
        # Losses of earlier calls, which are being sent to all stages.
        self._reports: deque[tuple[Tensor, Any]] = deque()
        # The last call's loss, which is being copied from the device, and the event of the end of that copy.
        self._unsent: tuple[Tensor, Any] | None = None
        for worker in self.workers:
            worker.reset()

    @property
    def under_way(self) -> bool:  # type: ignore[override]
        """Return whether some gradients may be incomplete: ``train_step`` was called since the last :meth:`drain`."""
        return self._calls > 0

    def share_out(self, given: Sequence[Batch]) -> list[dict[str, Any]]:
        """Split the batches of one ``train_step`` into microbatches. PipeDream allows one microbatch; PipeDream-2BW
        needs as many as stages, or more.
        """
        if not torch.is_grad_enabled():  # an evaluation
            return super().share_out(given)
        if not self._every:
            if len(given) > 1 or (self._layout.num_microbatches or 1) > 1:
                raise ConfigError(
                    f"pipedream updates the weights after every microbatch, but train_step got {len(given)} batches "
                    f"with num_microbatches={self._layout.num_microbatches}: pass one batch per train_step and leave "
                    "num_microbatches out, or use pipedream_2bw, which accumulates gradients"
                )
            return [dict(batch) for batch in given]
        pp_size = self._layout.pp
        towers = self._towers is not None
        return share_out(
            given, self._layout.num_microbatches, pp_size, lambda number: number >= pp_size, towers
        )

    def older_weights(self) -> list[Tensor]:
        """Return the weights of all versions with microbatches in flight; the newest version may share memory with the
        parameters.
        """
        return [leaf for version in self._versions.values() for _, leaf in version.leaves]

    def waiting_gradients(self) -> list[Tensor]:
        """Return the gradients of all weight versions that are not yet in ``.grad``, of microbatches in flight and of
        finished ones.
        """
        return [
            gradient
            for version in (*self._versions.values(), *self._finished)
            for gradient in version.gradients()
        ]

    def run(
        self, model: nn.Module, batches: Sequence[Microbatch], objective: Objective, backward: bool
    ) -> Tensor:
        """Run one call of ``train_step`` or ``eval_step``. Return, on all stages, the loss of the batch whose gradients
        have reached the first stage: the batch of ``p - 1`` calls ago (PipeDream on ``p`` stages) or of the last call
        (2BW); nan while the pipeline fills. An evaluation returns the loss of its own batch.
        """
        # an evaluation uses separate workers, so that microbatches in flight stay untouched
        if not backward:
            with attribute_replaced(self, "workers", self._evaluators):
                return super().run(model, batches, objective, backward=False)
        loss = self._call(batches, objective)
        self._hand_out()
        return loss

    def _hand_out(self) -> None:
        """Add the oldest complete set of gradients to ``.grad``; do nothing while the pipeline fills."""
        if self._finished and (not self._every or self._finished[0].call < self._calls - 1):
            with self._ties.summed():
                for parameter, gradient in self._finished.popleft().kept:
                    parameter.grad = (
                        gradient if parameter.grad is None else parameter.grad.add_(gradient)
                    )

    def _call(self, batches: Sequence[Microbatch], objective: Objective) -> Tensor:
        if self._broken:
            raise ConfigError(
                f"an earlier call of train_step under {self._layout.pipeline_schedule} was interrupted by an error, so "
                "the gradients of its unfinished microbatches are lost: build the model again"
            )
        self._send_report()
        if not self._calls:
            self._set_training_stages(backward=True)
            self._trained = self._what_trains()
        elif self._trained != self._what_trains():
            raise ConfigError(
                "requires_grad of parameters changed while microbatches are in flight: finish these microbatches "
                "first (for loss in hfscale.drain(model): optimizer.step())"
            )
        self._trains, self._losses, (worker,) = True, [], self.workers
        self._tell_workers(backward=True)
        version = _Version(self._runtime.model, self._calls, len(batches))
        try:
            first = self._forward  # microbatches are numbered over all calls
            numbered = replace(
                objective,
                loss=lambda called, batch, index: objective.loss(called, batch, index - first),
            )
            self._batches = self._held
            self._objective = numbered
            for batch in batches:
                index = self._forward
                self._held[index], self._versions[index] = batch, version
                worker.receive_input(index)
                with version.in_use():
                    worker.forward(index)
                if self._depth:
                    worker.send_output(index)
                self._forward += 1
                if index >= self._depth:
                    self._step_back(worker)
        except BaseException:
            self._forgotten()
            self._broken = True  # messages of this call may still arrive
            raise
        finally:
            self._objective = None
        # The weight stash keeps the old memory; the optimizer will change new memory.
        for parameter, _ in version.leaves if version.left else ():
            parameter.data = parameter.data.clone()
        self._calls += 1
        return self._reported()

    def _order(self, num_microbatches: int) -> Order:
        """Return the order of the actions of an evaluation, which runs forward passes only."""
        return order("1f1b", self._layout.pp, num_microbatches)

    def _what_trains(self) -> list[str]:
        return [
            name
            for name, parameter in self._runtime.model.named_parameters()
            if parameter.requires_grad
        ]

    def _step_back(self, worker: Any) -> None:
        """Run the backward pass of the oldest microbatch in flight, with the weights of its forward pass."""
        index = self._backward
        version = self._versions.pop(index)
        if self._depth:
            worker.receive_gradient(index)
        with version.in_use():
            worker.backward(index)
        worker.send_gradient(index)
        del self._held[index]
        self._backward += 1
        version.left -= 1
        if not version.left:
            version.retire()
            self._finished.append(version)

    def _reported(self) -> Tensor:
        """Begin to copy this call's loss to the CPU, and return the loss of an earlier call, which has arrived.

        The next call sends this call's loss to all stages: sending it now would make the CPU wait for this call.
        """
        device = self._mesh.device
        copied = None
        carried = torch.zeros((), dtype=torch.float64, pin_memory=is_accelerator(device))
        if self._losses:  # on the last stage
            carried.copy_(
                sum(self._losses[1:], self._losses[0]),
                non_blocking=True,
            )
            copied = (
                device_module(device).current_stream().record_event()
                if is_accelerator(device)
                else None
            )
        self._unsent = carried, copied
        if len(self._reports) < (1 if self._every else self._last):
            return self._on_device(float("nan"))
        return self._report()

    def _send_report(self) -> None:
        """Send the last call's loss, which has arrived on the CPU, to all stages."""
        if self._unsent is not None:
            (carried, copied), self._unsent = self._unsent, None
            if copied is not None:
                copied.synchronize()
            self._reports.append(
                (carried, dist.all_reduce(carried, group=self._mesh.reports, async_op=True))
            )

    def _report(self) -> Tensor:
        loss, work = self._reports.popleft()
        work.wait()
        return self._on_device(float(loss))

    def _on_device(self, loss: float) -> Tensor:
        return torch.full(
            (),
            loss,
            dtype=self.reports.loss_type,
            device=self._mesh.device,
        )

    def drain(self) -> Iterator[Tensor]:
        """Finish the microbatches in flight. Yield a loss, on all stages, for each update that is left to do; ``.grad``
        then has the gradients of this update, if this stage has any left.
        """
        (worker,) = self.workers
        rounds = min(self._calls, 1 if self._every else self._last)
        self._send_report()
        for _ in range(rounds):
            while self._backward < self._forward and not (self._finished and not self._every):
                self._step_back(worker)
            self._calls += 1
            loss = self._report()
            self._hand_out()
            yield loss
        worker.finish()
        self._forgotten()
