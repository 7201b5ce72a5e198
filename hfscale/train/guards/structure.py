"""Detect modules, parameters, losses and hooks that user code adds to a model after it was built.

Sharding is installed in the modules. If, for example, a new head replaces the sharded head, it is not sharded, its
gradients are not summed over ranks, and it is not saved. So before forward passes, modules and parameters are compared
with a record of the built model, by one comparison of dictionaries per module. Stock code may move the same weights
into another module while it runs (BigBird's attention for short sequences), which is accepted. Hooks are kept; for
hooks that read sharded activations, a warning is printed once for each kind of sharding.
"""

import functools
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from ..._compat.torch import forward_hooks, hooks_on, own_modules, own_parameters
from ..._compat.transformers.classes import class_name, loss_function_of
from ...errors import ConfigError
from ..runtime import Runtime

if TYPE_CHECKING:
    from ..._compat.torch_fsdp import ManagedPlace

_LIBRARIES = frozenset({"accelerate", "hfscale", "peft", "torch", "transformers", "trl"})
_log = logging.getLogger(__name__)
_Held = list[tuple[nn.Module, dict[str, Any]]]


class Structure:
    """Record the modules, parameters and loss with which a model was built, and check whether they are still in the
    model.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        # FSDP2 swaps parameters between shards and full tensors, and bitsandbytes replaces its weights.
        self._managed: list[ManagedPlace] = []
        if any(isinstance(module, FSDPModule) for module in runtime.model.modules()):
            from ..._compat.torch_fsdp import managed_places

            self._managed = list(managed_places(runtime.model))
        self._modules, self._parameters = self._module_contents()
        self._loss = loss_function_of(runtime.model)
        self._accepted = 0  # version of the contents and hooks at the last check
        self._hooks: list[int] = []
        self._hooked = set[int]()
        self._said = set[str]()

    def _module_contents(self) -> tuple[_Held, _Held]:
        """Return, for every module of the model, its children by name, and its parameters by name. ``None`` stands for
        a parameter that other code replaces regularly (FSDP2, bitsandbytes).
        """
        modules = list(self._runtime.model.modules())
        managed = {(place.module, place.name) for place in self._managed}
        parameters = [
            (module, {name: held if type(held) is nn.Parameter and (module, name) not in managed else None
                      for name, held in own_parameters(module).items()})
            for module in modules
        ]  # fmt: skip
        return [(module, dict(own_modules(module))) for module in modules], parameters

    def check(self) -> None:
        """Raise :class:`ConfigError` if modules, parameters or the loss of the model were replaced since it was built.
        Warn later if a user's new hook turns out to read sharded activations.
        """
        if loss_function_of(self._runtime.model) is not self._loss:
            raise ConfigError(
                f"model.loss_function was set since {self._spread()}, where ranks have only shards of the logits or "
                "of the labels, which your loss would get: use hfscale.train_step(model, batch, loss_fn=...), which "
                "calls your loss with full logits; compute_loss_func of hfscale.Trainer; or call the model without "
                "labels, and compute your loss from its logits"
            )
        contents = self._runtime.contents
        if (version := contents.version()) != self._accepted:
            self._check_contents()
            self._accepted = version
        if hooks_on(contents.modules) != self._hooks:
            self._watch_hooks()
            self._hooks = hooks_on(contents.modules)

    def _check_contents(self) -> None:
        if (changed := self._changed()) is not None:
            raise ConfigError(
                f"{changed} since {self._spread()}, so hfscale would not shard it, sum its gradients over ranks, or "
                "save it: change a model before hfscale.parallelize(model, parallel), change its config before it is "
                "loaded (num_hidden_layers=..., tie_word_embeddings=...), or give adapters to "
                "hfscale.get_peft_model(model, config)"
            )
        # FSDP2 gathers into buffers of the dtype that parameters had in the first forward pass.
        other = next((place for place in self._managed if place.has_another_type()), None)
        if other is not None:
            name = self._place(other.module, other.name)
            now = getattr(other.module, other.name).dtype
            raise ConfigError(
                f"{name} was converted to another dtype ({now}) after a forward pass, but over "
                f"{self._runtime.mesh.layout.describe()} its shards are communicated in the dtype of the first pass: "
                "call "
                'model.to(...) before the first pass, or load the model with dtype=... or mixed_precision="bf16"'
            )

    def _watch_hooks(self) -> None:
        for (
            module,
            _,
        ) in self._modules:  # in the next pass, warn of users' hooks that read sharded activations
            if id(module) not in self._hooked and any(map(_is_somebodys, forward_hooks(module))):
                self._hooked.add(id(module))
                # Sharded inputs and outputs of the model itself are refused elsewhere.
                if name := self._name(module):
                    self._warn_beside(module, name)

    @contextmanager
    def as_built(self) -> Iterator[None]:
        """Restore the modules and parameters with which the model was built, inside the ``with`` block; warn if any had
        been replaced.
        """
        changed = self._changed()
        if changed is None:
            yield
            return
        _log.warning(
            "%s since %s: the save has the model that was trained, without this change. To keep the change, make it "
            "in the saved model",
            changed,
            self._spread(),
        )
        before = [*((own_modules(module), held) for module, held in self._modules)]
        before += [
            (
                own_parameters(module),
                {name: kept for name, kept in held.items() if kept is not None},
            )
            for module, held in self._parameters
        ]
        contents = [(place, dict(place)) for place, _ in before]
        contents += [
            (held, dict(held)) for held in (own_parameters(place.module) for place in self._managed)
        ]
        for place, held in before:
            place.update(held)
        for managed in self._managed:
            managed.put_back()
        try:
            yield
        finally:
            for place, held in contents:
                place.clear()
                place.update(held)

    def _spread(self) -> str:
        return f"this {class_name(self._runtime.model)} was spread over {self._runtime.mesh.layout.describe()}"

    def _changed(self) -> str | None:
        """Describe the first module or parameter that was replaced, added or removed since the model was built. Return
        ``None`` if there is none; weights that stock code has only moved into another module do not count.
        """
        followed = False
        for module, held in self._modules:
            if (inside := own_modules(module)) != held:
                for name in (
                    name for name in held | inside if held.get(name) is not inside.get(name)
                ):
                    if not self._is_moved(held.get(name), inside.get(name)):
                        return (
                            f"{self._place(module, name)} was {_what(name in held, name in inside)}"
                        )
                followed = True
        for module, parameters in self._parameters:
            now = own_parameters(module)
            if now.keys() != parameters.keys():
                name = next(iter(now.keys() ^ parameters.keys()))
                return f"{self._place(module, name)} was {_what(name in parameters, name in now)}"
            for name, parameter in parameters.items():
                if parameter is not None and now[name] is not parameter:
                    return f"{self._place(module, name)} was replaced"
        for place in self._managed:
            if not place.has_its_own():
                return f"{self._place(place.module, place.name)} was replaced"
        if followed:
            self._modules, self._parameters = self._module_contents()
        return None

    def _is_moved(self, old: nn.Module | None, new: nn.Module | None) -> bool:
        """Return whether module ``new``, which replaces ``old``, holds the same parameters: stock code may move them
        into a module of another class. A module that hfscale has changed must not be lost by it.
        """
        restore = self._runtime.restore
        if (
            old is None
            or new is None
            or restore is None
            or not own_modules(old).keys() <= own_modules(new).keys()
        ):
            return False
        before, after = (
            dict(module.named_parameters(remove_duplicate=False)) for module in (old, new)
        )
        same = before.keys() == after.keys() and all(
            after[name] is held for name, held in before.items()
        )
        return (
            bool(before) and same and not restore.touches(set(old.modules()) - set(new.modules()))
        )

    def _place(self, module: nn.Module, name: str) -> str:
        path = self._name(module)
        return f"{path}.{name}" if path else name

    def _name(self, module: nn.Module) -> str:
        return next(
            (name for name, other in self._runtime.model.named_modules() if other is module), ""
        )

    def _warn_beside(self, module: nn.Module, name: str) -> None:
        """Add a hook to a module that has a user's hook. The added hook warns if the module gets sharded activations,
        which the user's hook then reads; it warns once for all layers.
        """

        def look(*_: Any) -> None:
            seen = self._runtime.local_view(name)
            if seen is None:
                return
            handle.remove()
            everywhere = re.sub(r"\d+", "*", seen)
            if everywhere not in self._said:
                self._said.add(everywhere)
                _log.warning(
                    "a hook on %s, and any similar hook, reads and changes only this rank's shard of the activations "
                    "(%s): %s",
                    name,
                    self._runtime.mesh.layout.describe(),
                    seen,
                )

        handle = module.register_forward_pre_hook(look)


def _what(was: bool, is_there: bool) -> str:
    return "replaced" if was and is_there else "taken out" if was else "put in"


def _is_somebodys(hook: Any) -> bool:
    """Return whether a hook is a user's, and not one of a library that supports sharding or only observes."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    place = getattr(hook, "__module__", None) or type(hook).__module__
    return str(place).partition(".")[0] not in _LIBRARIES
