"""What training with delayed updates computes, in one process: the yardstick for asynchronous pipelines.

PipeDream (Narayanan et al. 2019) with weight stashing, stages numbered from 0::

    w(i+1) = w(i) - lr * gradient of minibatch i at (w_0(i-p+1), w_1(i-p+2), ..., w_{p-1}(i))

PipeDream-2BW (Narayanan et al. 2021)::

    w(t+1) = w(t) - lr * gradient of batch t at w(t-1)

where negative versions are version 0: PipeDream keeps up to ``p - s`` of them on stage ``s``, 2BW two.
Which version a stage really uses comes from the order of its actions
(:func:`weight_versions`), not from these formulas.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from hfscale.extras.asynchronous.schedules import asynchronous_order
from hfscale.parallel.pipeline.timeline import RELEASE, Order, stage_ranks

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class DelayedRun:
    """Outcome of :func:`train_delayed`.

    Attributes:
        losses: per microbatch, a scalar; before the update that it takes part in.
        weights: per stage, per version, name -> tensor; ``weights[s][-1]`` is what training ends with.
        versions: (stage, microbatch) -> the version used.
    """

    losses: list[Tensor]
    weights: list[list[Weights]]
    versions: Mapping[tuple[int, int], int]


def train_delayed(
    schedule: str,
    stages: Sequence[nn.Module],
    microbatches: Sequence[tuple[Tensor, Tensor]],
    loss: Callable[[Tensor, Tensor], Tensor],
    learning_rate: float,
    num_microbatches: int = 1,
) -> DelayedRun:
    """Train a stack of stages by gradient descent with the delays of an asynchronous schedule.

    Pure: the stages keep the weights they came with, which are version 0. Gradients of the microbatches of one update
    are added up, not averaged.

    Args:
        schedule: ``pipedream`` (an update after every microbatch) or ``pipedream_2bw`` (after ``num_microbatches``).
        stages: called one after the other, each with the result of the one before.
        microbatches: (input, target) of all microbatches of all steps; a multiple of ``num_microbatches``.
        loss: of the last stage's result and the target; a scalar.
        learning_rate: of plain gradient descent.
        num_microbatches: microbatches of one step.
    """
    steps, rest = divmod(len(microbatches), num_microbatches)
    if rest or not steps:
        raise ValueError(
            f"{len(microbatches)} microbatches are not whole steps of {num_microbatches}"
        )
    every = update_interval(schedule, num_microbatches)
    order = asynchronous_order(len(stages), num_microbatches, steps, every=every)
    versions = weight_versions(schedule, order, num_microbatches)
    history = [[_copy(dict(stage.named_parameters()))] for stage in stages]
    losses: list[Tensor] = []
    sums: list[Weights] = []
    for index, (value, target) in enumerate(microbatches):
        used = [_copy(history[s][versions[s, index]], leaf=True) for s in range(len(stages))]
        for stage, weights in zip(stages, used, strict=True):
            value = functional_call(stage, weights, (value,))
        found = loss(value, target)
        losses.append(found.detach())
        gradients = torch.autograd.grad(
            found, [tensor for weights in used for tensor in weights.values()]
        )
        flat = iter(gradients)
        part = [{name: next(flat) for name in weights} for weights in used]
        sums = part if index % every == 0 else [_sum(a, b) for a, b in zip(sums, part, strict=True)]
        if (index + 1) % every == 0:
            for versions_of_stage, gradient in zip(history, sums, strict=True):
                newest = versions_of_stage[-1]
                versions_of_stage.append(
                    {n: newest[n] - learning_rate * gradient[n] for n in newest}
                )
    return DelayedRun(losses, history, versions)


def _copy(weights: Weights, leaf: bool = False) -> Weights:
    return {name: tensor.detach().clone().requires_grad_(leaf) for name, tensor in weights.items()}


def _sum(a: Weights, b: Weights) -> Weights:
    return {name: a[name] + b[name] for name in a}


def update_interval(schedule: str, num_microbatches: int) -> int:
    """Return the number of microbatches whose gradients make one update."""
    return 1 if schedule == "pipedream" else num_microbatches


def weight_versions(
    schedule: str, order: Order, num_microbatches: int
) -> dict[tuple[int, int], int]:
    """Return the weight version of each (stage, microbatch), used in its forward and backward.

    Read off the order: PipeDream takes what the updates so far have made; 2BW takes the version before the batch's
    own, and it is an error in the order if that is not there yet.

    Raises:
        ValueError: 2BW would need a version that does not exist at that point of the order.
    """
    every = update_interval(schedule, num_microbatches)
    versions = {}
    for actions in order:
        made = dict.fromkeys({action.stage for action in actions}, 0)
        for action in actions:
            if action.kind == "update":
                made[action.stage] += 1
            elif action.kind == "forward":
                newest = made[action.stage]
                used = newest if schedule == "pipedream" else max(action.microbatch // every - 1, 0)
                if used > newest:
                    raise ValueError(
                        f"stage {action.stage} has no version {used} for microbatch {action.microbatch} yet"
                    )
                versions[action.stage, action.microbatch] = used
    return versions


def stashed_versions(schedule: str, order: Order, num_microbatches: int) -> tuple[int, ...]:
    """Return, per stage, the most weight versions to keep at once, the newest included."""
    versions = weight_versions(schedule, order, num_microbatches)
    peak = [1] * len(stage_ranks(order))
    for actions in order:
        alive: dict[int, dict[int, int]] = {action.stage: {} for action in actions}
        newest = dict.fromkeys(alive, 0)
        for action in actions:
            here = alive[action.stage]
            if action.kind == "forward":
                here[action.microbatch] = versions[action.stage, action.microbatch]
            elif action.kind in RELEASE:
                del here[action.microbatch]
            elif action.kind == "update":
                newest[action.stage] += 1
            kept = {*here.values(), newest[action.stage]}
            peak[action.stage] = max(peak[action.stage], len(kept))
    return tuple(peak)
