"""Describe the schedules without a flush: the order of their actions, the versions of the weights that they keep, and
what they do not support. Imports no torch.
"""

from functools import partial
from typing import TYPE_CHECKING

from ...config.schedules import Schedule
from ...errors import ConfigError, PlanError
from ...parallel.pipeline.orders import one_forward_one_backward
from ...parallel.pipeline.timeline import Action, Order

if TYPE_CHECKING:
    from ...config.options import Options
    from ...plan import Plan


def asynchronous_order(pp_size: int, num_microbatches: int, steps: int, *, every: int = 0) -> Order:
    """Return the order of actions of 1F1B over ``steps`` consecutive steps, with an update of the weights after
    ``every`` microbatches (default: after each step).
    """
    every = every or num_microbatches
    ranks = []
    for stage in range(pp_size):
        actions: list[Action] = []
        for action in one_forward_one_backward(stage, pp_size, num_microbatches * steps):
            actions.append(action)
            if action.kind == "backward" and (action.microbatch + 1) % every == 0:
                actions.append(Action(stage, "update", action.microbatch // every))
        ranks.append(tuple(actions))
    return tuple(ranks)


def _kept_by_pipedream(pp_size: int, rank: int) -> tuple[int, int]:
    """Return how many older versions of the weights PipeDream keeps on pipeline rank ``rank`` (one per microbatch in
    flight), and how many copies of the gradients (one); Narayanan et al. 2019.
    """
    return pp_size - 1 - rank, 1


def _kept_by_2bw(pp_size: int, rank: int) -> tuple[int, int]:
    """Return how many older versions of the weights PipeDream-2BW keeps on pipeline rank ``rank`` (at most one), and
    how many copies of the gradients: at most two, because gradients of a step wait for the end of the next step
    (Narayanan et al. 2021).
    """
    return min(pp_size - 1 - rank, 1), min(pp_size, 2)


def _check(plan: "Plan", options: "Options") -> None:
    """Raise for layouts, options and models that no schedule without a flush supports: data parallelism, fp16, losses
    that the model adds, and encoder-decoders.
    """
    layout = plan.layout
    schedule = layout.pipeline_schedule
    if layout.data_world > 1:
        raise ConfigError(
            f"{layout.describe()}: {schedule} keeps several versions of the weights, which FSDP2 does not support: use "
            "dp_shard_size=1 and dp_replicate_size=1, or a schedule with a flush after each step, such as '1f1b'"
        )
    if options.mixed_precision == "fp16":
        raise ConfigError(
            f"mixed_precision='fp16' skips a step whose gradients overflow, but {schedule} has later microbatches in "
            "flight by then: use mixed_precision='bf16', or a schedule with a flush such as '1f1b'"
        )
    if plan.adds_loss:
        raise PlanError(
            f"{plan.adds_loss} needs a schedule with a flush after each step, but {schedule} has none: use "
            "pipeline_schedule='1f1b'"
        )
    if plan.stages is not None and plan.stages.stacks is not None:
        raise PlanError(
            f"pipeline_schedule={schedule} has no flush after each step, but the decoder of {plan.family} needs one, "
            "because it reads the encoder's output: use pipeline_schedule='1f1b'"
        )


def _check_pipedream(plan: "Plan", options: "Options") -> None:
    """Raise for what PipeDream does not support: the cases of :func:`_check`, and weights that are tied across stages,
    because the stages' copies would diverge.
    """
    _check(plan, options)
    if plan.stages is not None and plan.ties:
        names = " = ".join(plan.stages.ties[0].names)
        raise PlanError(
            "pipedream updates each stage with the gradient of another microbatch than the other stages, so the "
            f"copies of {names} on several stages would diverge: use pipedream_2bw, a schedule with a flush after each "
            "step, such as 1f1b, or tie_word_embeddings=False"
        )


PIPEDREAM = Schedule(
    flushes=False,
    order=partial(asynchronous_order, every=1),
    kept=_kept_by_pipedream,
    check=_check_pipedream,
)

PIPEDREAM_2BW = Schedule(
    flushes=False,
    microbatches_per_rank=1,
    order=asynchronous_order,
    kept=_kept_by_2bw,
    check=_check,
)
