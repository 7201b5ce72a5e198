"""The schedules without a flush: PipeDream (Narayanan et al. 2019) and PipeDream-2BW (Narayanan et al. 2021).

Both run one-forward-one-backward over the microbatches of all steps in a row, and a stage updates its weights while
microbatches are still in flight elsewhere. A stash of weight versions keeps a microbatch's forward and backward on the
same weights; version ``k`` is the result of ``k`` updates::

    PipeDream    an update after every microbatch; a forward takes the newest version that its stage has:
                 stage s of p uses version i - (p - s - 1) for microbatch i, and keeps up to p - s versions
    2BW          an update after every m >= p microbatches (their gradients added up); every stage uses version t - 1
                 for all of batch t, and keeps two:  w(t+1) = w(t) - lr * gradient(w(t-1))

A version number below zero means version 0: the pipeline is still filling.
"""

from .timeline import RELEASE, Action, Order, stage_ranks


def one_forward_one_backward(stage: int, pp_size: int, total: int) -> list[Action]:
    """List the 1F1B actions of one stage over ``total`` microbatches: at most ``pp_size - stage`` in flight."""
    warmup = min(pp_size - stage, total)
    actions = [Action(stage, "forward", index) for index in range(warmup)]
    for index in range(total):
        actions.append(Action(stage, "backward", index))
        if warmup + index < total:
            actions.append(Action(stage, "forward", warmup + index))
    return actions


def asynchronous_order(schedule: str, pp_size: int, num_microbatches: int, steps: int) -> Order:
    """Return, per rank, the actions of ``steps`` steps of ``num_microbatches`` each, updates included.

    In PipeDream every microbatch is a minibatch of its own; in 2BW a step is one.
    """
    every = update_interval(schedule, num_microbatches)
    ranks = []
    for stage in range(pp_size):
        actions: list[Action] = []
        for action in one_forward_one_backward(stage, pp_size, num_microbatches * steps):
            actions.append(action)
            if action.kind == "backward" and (action.microbatch + 1) % every == 0:
                actions.append(Action(stage, "update", action.microbatch // every))
        ranks.append(tuple(actions))
    return tuple(ranks)


def update_interval(schedule: str, num_microbatches: int) -> int:
    """Return the number of microbatches per update."""
    return 1 if schedule == "pipedream" else num_microbatches


def weight_versions(schedule: str, order: Order, num_microbatches: int) -> dict[tuple[int, int], int]:
    """Map (stage, microbatch) to the version of the stage's weights that its forward and backward use.

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
    """Return, per stage, the most versions of its weights kept at once, the newest included."""
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
