"""Replace parameters in optimizers that were created before a model was sharded, or before its sharding was undone.

An optimizer holds parameter objects, and sharding a model replaces these objects. An optimizer that a script created
earlier would continue with tensors that get no gradients, without an error. So each replaced parameter that is still
referenced gets an attribute with its replacement::

    optimizer.param_groups[i]["params"]  -->  old parameter  --attribute-->  new parameter, by name in the plan
    optimizer.state[old]                 -->  optimizer.state[new], its tensors sharded like the parameter

Parameter groups change in place, so their options stay, and schedulers continue with the same optimizer. If an old
parameter is still referenced, all optimizers in memory are searched once and updated. Any other optimizer is updated
when it is prepared, or at its first step.
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
    """Describe the new parameter that replaces an old one in the model, and hence in optimizers."""

    name: str
    by: str  # the call that replaced the parameter
    planned: ParameterPlan | None  # ``None`` if the model no longer has a parameter of this name
    parameter: Tensor | None  # ``None`` if no pipeline stage of this rank holds the parameter
    ranks: dict[str, int]

    def state_of(self, values: dict[str, Any]) -> dict[str, Any]:
        """Convert the optimizer's state of the old parameter to that of the new parameter: full tensors are sharded
        like the new parameter, and moved to its device.
        """
        return {
            key: self._moved(key, value) if isinstance(value, Tensor) else value
            for key, value in values.items()
        }

    def _moved(self, key: str, value: Tensor) -> Tensor:
        assert self.planned is not None  # otherwise, the optimizer was refused
        assert self.parameter is not None  # otherwise, the state was dropped
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
    """Remember a model's parameters by weak references before an hfscale call, named ``by``, replaces them.

    Args:
        named: the parameters with their names.
        by: the call, for errors.
        with_gradients: also keep the full gradients, to shard them onto the new parameters.
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
        """After the model was sharded, set on each old parameter that is still referenced an attribute with its
        replacement, and update all optimizers in memory.
        """
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
            owner = name if planned is None else planned.first_name
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
            # Do not raise here for an optimizer that is no longer used; an optimizer in use raises at its next step.
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
    """Replace the parameters in an optimizer that no longer belong to their model by those that have replaced them,
    together with their state. Do nothing if there are none.

    Raises:
        ConfigError: the optimizer cannot continue with the new parameters; it is left unchanged.
    """
    groups = getattr(optimizer, "param_groups", ())
    kept = getattr(optimizer, "state", {})
    held = [parameter for group in groups for parameter in group["params"]]
    # If two optimizers share groups (SAM and its base), the first has replaced the parameters; the second still has to
    # convert its own state.
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
    """Raise :class:`ConfigError` if an optimizer cannot continue with the new parameters: because it is one of
    hfscale's own, a parameter was removed from the model, or all new parameters are frozen.
    """
    first = next(iter(found.values()))
    kind = type(optimizer).__name__
    remedy = f"make the optimizer after {first.by}"
    if getattr(optimizer, "keeps_plain_state", False):
        raise ConfigError(
            "the optimizer of hfscale.create_optimizer must be made of the model's present parameters, got one made "
            f"before {first.by}, which replaced parameters: {remedy}"
        )
    gone = next((each for each in found.values() if each.planned is None), None)
    if gone is not None:
        raise ConfigError(
            f"{kind} must hold parameters of the model, got {gone.name}, which {gone.by} removed from the model: "
            f"{remedy}"
        )
    trained = any(old.requires_grad for old in held)
    here = [new for old in held if (new := _now(old, found)) is not None]
    if trained and here and not any(each.requires_grad for each in here):
        raise ConfigError(
            f"{kind} must hold parameters that train, got {len(here)} parameters that {first.by} has frozen (for "
            f"example {first.name}): {remedy}"
        )


def _replace(group: dict[str, Any], found: dict[int, _Successor]) -> None:
    """Replace the parameters of an optimizer's group in place. Parameters that are now on other pipeline stages are
    removed from the group, together with their entries in ``param_names``.
    """
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
    """Replace parameters in the optimizers that no longer belong to their model. If one of the models of ``runtimes``
    is trained over several ranks, and the optimizers hold parameters, but none of these models', raise
    :class:`ConfigError`.
    """
    for optimizer in optimizers:
        follow(optimizer)
    spread = next((runtime for runtime in runtimes if not runtime.is_alone), None)
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
