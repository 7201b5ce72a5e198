"""Which dropout probabilities of a config act inside blocks, on activations that are cut.

Ranks must draw numbers of their own there. The columns of each block are made to return what they return without
dropout; whatever still changes at its rows when one probability is raised is dropped out between the two.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ....families.blueprint import Block
from ....families.clone import DROPOUT_WORDS, tiny_clone
from .subject import Subject, Unproved, make_subject, run

_RAISED = (0.5, 1)  # some configs take whole numbers only


def find_dropouts(model: Any, blocks: dict[str, Block], subject: Subject) -> dict[str, tuple[str, ...]]:
    """Path of a block -> the config fields of the dropout inside it, for blocks that have any."""
    fields = list(_fields(model.config.to_dict()))
    found: dict[str, list[str]] = {path: [] for path in blocks}
    named = {path: _names(subject, path, block) for path, block in blocks.items()}
    outputs, quiet = _observe(subject, named, {})
    for field in fields:
        loud_subject = _raised(model, field)
        if loud_subject is None:
            continue
        _, loud = _observe(loud_subject, named, outputs)
        for path, (_, rows) in named.items():
            if any(name in loud and not torch.equal(loud[name], quiet[name]) for name in rows if name in quiet):
                found[path].append(field)
    return {path: tuple(names) for path, names in found.items() if names}


def _names(subject: Subject, path: str, block: Block) -> tuple[list[str], list[str]]:
    """Full names of columns and rows, in every layer that has them."""
    modules = dict(subject.model.named_modules())
    bases = [f"{layer}.{path}" if path else layer for layer in subject.layer_names]
    columns = [name for base in bases for child in block.column if (name := f"{base}.{child}") in modules]
    rows = [name for base in bases for child in block.row if (name := f"{base}.{child}") in modules]
    return columns, rows


def _observe(
    subject: Subject, named: dict[str, tuple[list[str], list[str]]], replay: dict[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What columns return and rows read; columns return what ``replay`` has for them."""
    outputs: dict[str, Tensor] = {}
    inputs: dict[str, Tensor] = {}

    def column(name: str) -> Callable[..., Tensor]:
        def hook(_: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
            outputs[name] = replay.get(name, output).detach()
            return outputs[name]

        return hook

    def row(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
            inputs[name] = args[0].detach()

        return hook

    handles = []
    for columns, rows in named.values():
        handles += [subject.model.get_submodule(name).register_forward_hook(column(name)) for name in columns]
        handles += [subject.model.get_submodule(name).register_forward_pre_hook(row(name)) for name in rows]
    try:
        run(subject.model, subject.inputs)
    finally:
        for handle in handles:
            handle.remove()
    return outputs, inputs


def _fields(fields: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Names of the dropout probabilities of a config, and of configs in it (``attn_config.attn_pdrop``)."""
    for name, value in fields.items():
        if not isinstance(name, str):  # labels are listed by number
            continue
        if isinstance(value, dict) and not prefix:
            yield from _fields(value, f"{name}.")
        elif any(word in name for word in DROPOUT_WORDS) and isinstance(value, (float, int)) and value is not True:
            yield prefix + name


def _raised(model: Any, field: str) -> Subject | None:
    """A clone in training mode with one probability raised, if there can be one."""
    outer, _, name = field.rpartition(".")
    for probability in _RAISED:
        change: dict[str, Any] = {field: probability}
        if outer:
            change = {outer: {**tiny_clone(model.config).to_dict()[outer], name: probability}}
        try:
            subject = make_subject(model, **change)
        except Unproved:
            continue
        subject.model.train()
        return subject
    return None
