"""Hand the parameters of a model that was cut, or taken apart, to the optimizers that hold those before.

An optimizer knows its parameters by identity, and cutting a model replaces them: the optimizer that a script made
before would go on with tensors that no gradient reaches, and nothing would raise. So each replaced parameter that
somebody still holds is marked with its successor::

    optimizer.param_groups[i]["params"]  -->  old parameter  --mark-->  new parameter, by name in the plan
    optimizer.state[old]                 -->  optimizer.state[new], its tensors cut as the parameter was

Groups change in place, so their options stay, and schedules go on with the same optimizer. The optimizers in memory
are looked for once, if anything holds an old parameter; others follow where they are prepared, or at their first step.
"""

import gc
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ...errors import ConfigError
from ...plan import ParameterPlan
from .runtime import Runtime
from .shards import like_sharded, local_tensor

_MARK = "_hfscale_successor"


@dataclass(frozen=True)
class _Successor:
    """Tell what has taken the place of a parameter."""

    name: str
    by: str  # the call that replaced it
    planned: ParameterPlan | None  # ``None`` if the model has no parameter of this name any more
    parameter: Tensor | None  # ``None`` if no stage of this rank holds it
    ranks: dict[str, int]

    def state_of(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return an optimizer's state of the replaced parameter for the new one."""
        return {
            key: self._moved(key, value) if isinstance(value, Tensor) else value
            for key, value in values.items()
        }

    def _moved(self, key: str, value: Tensor) -> Tensor:
        assert self.planned is not None  # or the optimizer was refused
        assert self.parameter is not None  # or its state was dropped
        if value.ndim == 0:
            return value
        new = local_tensor(self.parameter)
        share = local_tensor(value)
        if self.planned.cuts and share.shape != new.shape:
            if tuple(share.shape) != self.planned.shape:
                raise ConfigError(
                    f"the optimizer's state must have the shape of its parameter, so that {self.by} can shard both, "
                    f"got {tuple(share.shape)} as {key!r} of {self.name}, which is {self.planned.shape}: create "
                    "the optimizer, or take its first step, after the model is sharded"
                )
            share = self.planned.take(share, self.ranks).clone()
        return like_sharded(share.to(new.device), self.parameter)


class Replaced:
    """Hold a model's parameters, weakly, while ``by``, a call of hfscale's, replaces them.

    Args:
        with_gradients: hold gradients, of full shapes, as well, which the new parameters get.
    """

    def __init__(
        self, named: Iterable[tuple[str, Tensor]], by: str, with_gradients: bool = False
    ) -> None:
        before = list(named)
        self._before = [(name, weakref.ref(parameter)) for name, parameter in before]
        self._by = by
        self._gradients: dict[str, Tensor] = {}
        if with_gradients:
            self._gradients = {name: each.grad for name, each in before if each.grad is not None}

    def hand_over(self, runtime: Runtime) -> None:
        """Mark parameters that are still held with those in their place, and let optimizers in memory follow."""
        plans = runtime.plan.by_name
        now = {planned.name: parameter for planned, parameter in runtime.parameters()}
        self._hand_over_gradients(runtime)
        live = set(map(id, now.values()))
        marked = False
        for name, reference in self._before:
            old = reference()
            planned = plans.get(name)
            if old is None or id(old) in live:
                continue
            owner = name if planned is None else planned.tied_to or name
            successor = _Successor(
                owner, self._by, plans.get(owner), now.get(owner), runtime.mesh.ranks
            )
            setattr(old, _MARK, successor)
            marked = True
        if marked:
            _let_all_follow()

    def _hand_over_gradients(self, runtime: Runtime) -> None:
        for planned, parameter in runtime.parameters():
            gradient = self._gradients.get(planned.name)
            if gradient is not None and parameter.grad is None:
                share = planned.take(gradient, runtime.mesh.ranks).clone()
                parameter.grad = like_sharded(share.to(parameter.device), parameter)


def _let_all_follow() -> None:
    for other in gc.get_objects():
        if issubclass(type(other), Optimizer):
            # One that nobody uses any more is none of ours; others are refused in a step.
            with suppress(ConfigError):
                follow(other)


def _successor_of(parameter: Tensor) -> _Successor | None:
    successor: _Successor | None = None
    following: Tensor | None = parameter
    while following is not None and hasattr(following, _MARK):
        successor = getattr(following, _MARK)
        following = successor.parameter
    return successor


def follow(optimizer: Any) -> None:
    """Give an optimizer the parameters in place of those that were replaced; do nothing if none was.

    Raises:
        ConfigError: it cannot go on with them; it is unchanged.
    """
    groups = getattr(optimizer, "param_groups", ())
    kept = getattr(optimizer, "state", {})
    held = [parameter for group in groups for parameter in group["params"]]
    # Of those that share groups (SAM's base), one follows before the other, which has a state of its own.
    keys = [key for key in kept if isinstance(key, Tensor)]
    successors = {
        id(each): successor
        for each in (*held, *keys)
        if (successor := _successor_of(each)) is not None
    }
    if not successors:
        return
    _refuse(optimizer, held, successors)
    states = []
    for old in keys:
        successor = successors.get(id(old))
        if successor is not None:
            moved = None if successor.parameter is None else successor.state_of(kept[old])
            states.append((old, successor.parameter, moved))
    for old, new, moved in states:
        del kept[old]
        if new is not None:
            kept[new] = moved
    for group in groups:
        _replace(group, successors)


def _refuse(
    optimizer: Any,
    held: list[Tensor],
    found: dict[int, _Successor],
) -> None:
    """Refuse what cannot follow: parameters that are gone or frozen, and steppers over the old ones."""
    first = next(iter(found.values()))
    kind = type(optimizer).__name__
    remedy = f"make the optimizer after {first.by}"
    if getattr(optimizer, "keeps_plain_state", False):
        raise ConfigError(
            "the optimizer of hfscale.create_optimizer must be made of the model's present parameters, got one made "
            f"before {first.by}: {remedy}"
        )
    gone = next((each for each in found.values() if each.planned is None), None)
    if gone is not None:
        raise ConfigError(
            f"{kind} must hold parameters of the model, got {gone.name}, which {gone.by} removed from the model: "
            f"{remedy}"
        )
    trained = any(old.requires_grad for old in held)
    new = [old if id(old) not in found else found[id(old)].parameter for old in held]
    here = [each for each in new if each is not None]
    if trained and here and not any(each.requires_grad for each in here):
        raise ConfigError(
            f"{kind} must hold parameters that train, got {len(here)} parameters that {first.by} has frozen (for "
            f"example {first.name}): {remedy}"
        )


def _replace(group: dict[str, Any], found: dict[int, _Successor]) -> None:
    """Replace a group's parameters, in its own list; those of other stages leave it, with their names if it has any."""
    kept = [_now(parameter, found) for parameter in group["params"]]
    names = group.get("param_names")
    if names is not None:
        names[:] = [
            name for name, parameter in zip(names, kept, strict=True) if parameter is not None
        ]
    group["params"][:] = [parameter for parameter in kept if parameter is not None]


def _now(parameter: Tensor, found: dict[int, _Successor]) -> Tensor | None:
    successor = found.get(id(parameter))
    return parameter if successor is None else successor.parameter


def check_optimizers(optimizers: Sequence[Any], runtimes: Sequence[Runtime]) -> None:
    """Let optimizers follow their parameters; over ranks, refuse those that train none of these models."""
    for optimizer in optimizers:
        follow(optimizer)
    spread = next((runtime for runtime in runtimes if runtime.mesh.layout.total_size > 1), None)
    if spread is None:
        return
    own = {id(parameter) for runtime in runtimes for _, parameter in runtime.parameters()}
    held = [
        parameter
        for each in optimizers
        for group in each.param_groups
        for parameter in group["params"]
    ]
    if held and own.isdisjoint(map(id, held)):
        raise ConfigError(
            f"the optimizer must hold parameters of the model that is trained over {spread.mesh.layout.describe()}, "
            f"got {len(held)} parameters, none of which belongs to the model: make it of model.parameters()"
        )
