"""Trace one forward pass of the clone: which projections feed which, and what lies between them.

Every projection's output is tagged in the autograd graph. Walking back from a projection's input to the nearest tags
gives the projections that feed it, and the parameters on the way.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ....models.projections import PROJECTIONS
from .subject import Subject, run


class _Tag(torch.autograd.Function):
    """Return the input unchanged, with a name to find in the autograd graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.tag = name
        return x.clone()  # not a view: what follows may change it in place

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


@dataclass
class Call:
    """Hold one call of a projection: its input, its output, and what feeds it."""

    input: Tensor
    output: Tensor
    feeds: frozenset[str] = frozenset()
    parameters: frozenset[str] = frozenset()


@dataclass
class Trace:
    """Hold the results of tracing one forward pass.

    Attributes:
        calls: projection -> its call, in the order of the calls; those called several times are left out.
        outputs: layer -> the projections that its output is made of, without another one between.
        integers: module -> integer attributes read during the forward.
        fields: module -> fields read from its config, where those are integers.
        arguments: module -> tensors among its keyword arguments, by name.
        dropouts: projection -> the dropout module that reads its output.
    """

    calls: dict[str, Call] = field(default_factory=dict)
    outputs: dict[str, frozenset[str]] = field(default_factory=dict)
    integers: dict[str, dict[str, int]] = field(default_factory=dict)
    fields: dict[str, dict[str, int]] = field(default_factory=dict)
    arguments: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    dropouts: dict[str, str] = field(default_factory=dict)


def trace(subject: Subject) -> Trace:
    """Run the clone once and look."""
    model, hooks = subject.model, _Hooks()
    handles = list(hooks.install(model, subject.layer_names))
    result = hooks.result
    try:
        with _watch(subject, result):
            run(model, subject.inputs)
    finally:
        for handle in handles:
            handle.remove()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for call in result.calls.values():
        call.feeds, call.parameters = walk_back(call.input, names)
    result.outputs = {layer: walk_back(output, names)[0] for layer, output in hooks.endings.items()}
    for name in hooks.repeated:
        del result.calls[name]
    return result


class _Hooks:
    """Record the calls of modules.

    Attributes:
        result: what is known so far.
        repeated: projections that were called several times.
        endings: layer -> the stream that it returned.
    """

    def __init__(self) -> None:
        self.result = Trace()
        self.repeated: set[str] = set()
        self.endings: dict[str, Tensor] = {}

    def install(self, model: Any, layers: list[str]) -> Iterator[Any]:
        """Install hooks on a model's modules; yields the handles."""
        inside = tuple(f"{layer}." for layer in layers)
        for name, module in model.named_modules():
            if isinstance(module, PROJECTIONS):
                yield module.register_forward_hook(partial(self._projected, name))
            elif isinstance(module, nn.Dropout):
                yield module.register_forward_pre_hook(partial(self._dropped, name))
            elif name.startswith(inside):
                yield module.register_forward_pre_hook(partial(self._called, name), with_kwargs=True)
            if name in layers:
                yield module.register_forward_hook(partial(self._ended, name))

    def _projected(self, name: str, _: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        output = _Tag.apply(output, name)
        if name in self.result.calls:
            self.repeated.add(name)
        self.result.calls[name] = Call(args[0], output)
        return output

    def _dropped(self, name: str, _: nn.Module, args: tuple[Any, ...]) -> None:
        for projection, call in self.result.calls.items():
            if args and call.output is args[0]:
                self.result.dropouts.setdefault(projection, name)

    def _called(self, name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.result.arguments[name] = {key: value for key, value in kwargs.items() if isinstance(value, Tensor)}

    def _ended(self, name: str, _: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.endings[name] = output if isinstance(output, Tensor) else output[0]


def walk_back(tensor: Tensor, names: dict[int, str]) -> tuple[frozenset[str], frozenset[str]]:
    """Return the nearest projections that a tensor was computed from, and the parameters used since."""
    tags, parameters, seen = set(), set(), set()
    waiting: list[Any] = [tensor.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(getattr(node, "tag", None), str):
            tags.add(node.tag)
        elif hasattr(node, "variable"):
            parameters.add(names.get(id(node.variable), ""))
        else:
            waiting += [following for following, _ in node.next_functions]
    return frozenset(tags), frozenset(parameters)


@contextmanager
def _watch(subject: Subject, result: Trace) -> Iterator[None]:
    """Record the integers that modules in layers read from themselves and their config inside the with block."""
    classes: dict[nn.Module, type] = {}
    configs: dict[nn.Module, Any] = {}
    for name, module in subject.model.named_modules():
        if not any(name.startswith(f"{layer}.") for layer in subject.layer_names) or isinstance(module, PROJECTIONS):
            continue
        if isinstance(module.__dict__.get("config"), type(subject.model.config).__mro__[-2]):
            configs[module] = module.config
            module.config = _watched(module.config, result.fields.setdefault(name, {}))
        classes[module] = type(module)
        module.__class__ = _watching(type(module), result.integers.setdefault(name, {}))
    try:
        yield
    finally:
        for module, kind in classes.items():
            module.__class__ = kind
        for module, config in configs.items():
            module.config = config


def _watching(kind: Any, found: dict[str, int]) -> type:
    def __getattribute__(self: Any, name: str) -> Any:
        value = kind.__getattribute__(self, name)
        if type(value) is int and not name.startswith("_"):
            found[name] = value
        return value

    return type(kind.__name__, (kind,), {"__getattribute__": __getattribute__, "__module__": kind.__module__})


def _watched(config: Any, found: dict[str, int]) -> Any:
    class Watched:
        def __getattr__(self, name: str) -> Any:
            value = getattr(config, name)
            if type(value) is int:
                found[name] = value
            return value

    return Watched()
