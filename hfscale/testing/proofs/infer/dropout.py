"""Find which dropout probabilities of a config act inside blocks, on activations that are cut.

Ranks must draw different numbers there. A probability that is raised acts inside a block where random numbers are drawn
between the last column and the row.
"""

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ....models.blueprint import Block
from ....models.clone import DROPOUT_WORDS, tiny_clone
from .forward_trace import run_hooked
from .subject import Subject, Unproved, make_subject

_RAISED = (0.5, 1)  # some configs take whole numbers only


def find_dropouts(model: Any, blocks: dict[str, Block]) -> dict[str, tuple[str, ...]]:
    """Return, by path of a block, the config fields of the dropout inside it."""
    found: dict[str, list[str]] = {path: [] for path in blocks}
    for field in _fields(model.config.to_dict()):
        raised = _raised(model, field)
        for path in _that_draw(raised, blocks) if raised is not None else ():
            found[path].append(field)
    return {path: tuple(fields) for path, fields in found.items()}


def _that_draw(subject: Subject, blocks: dict[str, Block]) -> set[str]:
    """Return the paths of the blocks that draw random numbers between columns and rows."""
    states: dict[str, Tensor] = {}
    drawing: set[str] = set()

    def column(block: str, *_: Any) -> None:
        states[block] = torch.random.get_rng_state()

    def row(block: str, path: str, _: Any, args: tuple[Tensor, ...]) -> None:
        now = torch.random.get_rng_state()
        drawn = not torch.equal(states.get(block, now), now)
        if drawn or not args[0].any():  # a probability of 1 draws nothing, and leaves nothing
            drawing.add(path)

    def install() -> list[Any]:
        modules = dict(subject.model.named_modules())
        handles: list[Any] = []
        for layer, path in product(subject.layer_names, blocks):
            block = f"{layer}.{path}" if path else layer
            for child in blocks[path].column:
                if (name := f"{block}.{child}") in modules:
                    handles.append(modules[name].register_forward_hook(partial(column, block)))
            for child in blocks[path].row:
                if (name := f"{block}.{child}") in modules:
                    handles.append(modules[name].register_forward_pre_hook(partial(row, block, path)))
        return handles

    run_hooked(subject.model, subject.inputs, install)
    return drawing


def _fields(fields: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the names of the dropout probabilities of a config, and of nested configs (``attn_config.attn_pdrop``)."""
    for name, value in fields.items():
        if not isinstance(name, str):  # labels are listed by number
            continue
        if isinstance(value, dict) and not prefix:
            yield from _fields(value, f"{name}.")
        elif any(word in name for word in DROPOUT_WORDS) and isinstance(value, (float, int)) and value is not True:
            yield prefix + name


def _raised(model: Any, field: str) -> Subject | None:
    """Return a clone in training mode with one probability raised; ``None`` if it cannot be built."""
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
