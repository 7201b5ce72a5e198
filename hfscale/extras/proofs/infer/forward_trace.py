"""Trace one forward pass of a tiny clone of a model: for each projection, the projections that feed it, and the
parameters used in between.

Each projection's output is tagged in the autograd graph. Walking back from a projection's input to the nearest tags
gives the projections that feed the input, and the parameters on the way.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from ....models.module_kinds import PROJECTIONS
from .subject import Subject, run

_TAG = "hfscale projection"  # key of a tag in the autograd graph


@dataclass
class Call:
    """Hold one call of a projection: its input, its output, the projections that feed it, and the parameters used in
    between.
    """

    input: Tensor
    output: Tensor
    feeds: frozenset[str] = frozenset()
    parameters: frozenset[str] = frozenset()


@dataclass
class Trace:
    """Hold what one traced forward pass has shown: calls of projections, keyword arguments of modules, and dropouts."""

    # projection -> its call, in order of the calls; projections that are called several times are left out
    calls: dict[str, Call] = field(default_factory=dict)
    # layer -> the last projections before its output
    outputs: dict[str, frozenset[str]] = field(default_factory=dict)
    # module -> the tensors among the keyword arguments of its call, by name
    arguments: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    # Projection -> the dropout module that reads its output.
    dropouts: dict[str, str] = field(default_factory=dict)


def trace(subject: Subject) -> Trace:
    """Run the tiny model once, and return the calls of its projections with the projections that feed each."""
    model, result, endings, repeated = subject.model, Trace(), dict[str, Tensor](), set[str]()

    def projected(
        name: str,
        _: nn.Module,
        args: tuple[Any, ...],
        output: Tensor,
    ) -> Tensor:
        output = output.clone()  # a copy: later code may change it in place
        node: Any = output.grad_fn
        if node is not None:
            node.metadata[_TAG] = name
        if name in result.calls:
            repeated.add(name)
        result.calls[name] = Call(args[0], output)
        return output

    def dropped(name: str, _: nn.Module, args: tuple[Any, ...]) -> None:
        for projection, call in result.calls.items():
            if args and call.output is args[0]:
                result.dropouts.setdefault(projection, name)

    def called(
        name: str,
        _: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        result.arguments[name] = {
            key: value for key, value in kwargs.items() if isinstance(value, Tensor)
        }

    def ended(
        name: str,
        _: nn.Module,
        args: tuple[Any, ...],
        output: Any,
    ) -> None:
        endings[name] = output if isinstance(output, Tensor) else output[0]

    run_hooked(model, subject.inputs, _install(subject, projected, dropped, called, ended))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for call in result.calls.values():
        call.feeds, call.parameters = _walk_back(call.input, names)
    result.outputs = {layer: _walk_back(output, names)[0] for layer, output in endings.items()}
    for name in repeated:
        del result.calls[name]
    return result


def run_hooked(
    model: Any,
    inputs: dict[str, Tensor],
    handles: list[Any],
) -> None:
    """Run a model, and then remove the hooks of these handles."""
    try:
        run(model, inputs)
    finally:
        for handle in handles:
            handle.remove()


def _install(
    subject: Subject,
    projected: Any,
    dropped: Any,
    called: Any,
    ended: Any,
) -> list[Any]:
    handles: list[Any] = []
    inside = tuple(f"{layer}." for layer in subject.layer_names)
    for name, module in subject.model.named_modules():
        if isinstance(module, PROJECTIONS):
            handles.append(module.register_forward_hook(partial(projected, name)))
        elif isinstance(module, nn.Dropout):
            handles.append(module.register_forward_pre_hook(partial(dropped, name)))
        elif name.startswith(inside):
            handles.append(
                module.register_forward_pre_hook(partial(called, name), with_kwargs=True)
            )
        if name in subject.layer_names:
            handles.append(module.register_forward_hook(partial(ended, name)))
    return handles


def _walk_back(tensor: Tensor, names: dict[int, str]) -> tuple[frozenset[str], frozenset[str]]:
    """Return the nearest projections from which a tensor was computed, and the parameters used after them."""
    tags = set()
    parameters = set()
    seen = set()
    waiting: list[Any] = [tensor.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if _TAG in node.metadata:
            tags.add(node.metadata[_TAG])
        elif hasattr(node, "variable"):
            parameters.add(names.get(id(node.variable), ""))
        else:
            waiting += [following for following, _ in node.next_functions]
    return frozenset(tags), frozenset(parameters)
