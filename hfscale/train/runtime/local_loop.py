"""The executor of ranks that hold all layers: forward and backward of one microbatch after the other."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .batches import Microbatch
from .objective import Objective
from .runtime import Batch, Executor, Runtime


class LocalLoop(Executor):
    """An executor without pipeline stages. Gradients add up over the microbatches of a step."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def share_out(self, given: Sequence[Batch]) -> list[dict[str, Any]]:
        """Return the microbatches as they were given."""
        return [dict(batch) for batch in given]

    def run(self, model: nn.Module, batches: Sequence[Microbatch], objective: Objective, backward: bool) -> Tensor:
        """Run the microbatches one after the other: see :meth:`.runtime.Executor.run`."""
        run = self._train if backward else self._evaluate
        return self._runtime.sum_of_shares(run(model, batches, objective))

    def _train(self, model: nn.Module, batches: Sequence[Microbatch], objective: Objective) -> Tensor:
        runtime = self._runtime
        total: Tensor | None = None
        with runtime.around(lambda part: part.around_gradients(runtime)):
            for index, batch in enumerate(batches):
                runtime.data.before_backward(last=index == len(batches) - 1)
                loss = objective.loss(model, batch, index)
                (loss * runtime.loss_factor()).backward()
                total = loss.detach() if total is None else total + loss.detach()
        assert total is not None  # a step has a microbatch
        return total

    def _evaluate(self, model: nn.Module, batches: Sequence[Microbatch], objective: Objective) -> Tensor:
        runtime = self._runtime
        total = sum(objective.loss(model, batch, index) for index, batch in enumerate(batches))
        runtime.release()
        return torch.as_tensor(total, device=runtime.mesh.device)
