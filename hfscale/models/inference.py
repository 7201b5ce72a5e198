"""Hold an inferred blueprint with its proof: as objects, and as JSON."""

from collections.abc import Callable
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any

from .blueprint import Block, Blueprint
from .fields import query_key_value

TOLERANCE = 1e-10
"""Of a proof: relative, in float64."""

_FUNCTIONS: dict[str, Callable[..., Any]] = {query_key_value.__name__: query_key_value}


@dataclass(frozen=True)
class Proof:
    """Hold the differences found when a blueprint was proved on a clone."""

    output: float  # largest difference of the output, relative to its largest entry
    gradient: float  # largest difference of a gradient, likewise
    parameter: str  # whose gradient that is

    @property
    def worst(self) -> float:
        """The larger of both differences."""
        return max(self.output, self.gradient)


@dataclass(frozen=True)
class Inference:
    """Hold an inferred blueprint and its evidence."""

    blueprint: Blueprint  # the roles found
    proof: Proof  # two ranks against one process, on a tiny clone
    attention: tuple[str, ...]  # paths of the blocks that mix tokens
    whole: tuple[str, ...]  # why other parts of the layers are not cut


def as_data(found: Inference) -> dict[str, Any]:
    """Return an inference as JSON."""
    return {
        "layers": found.blueprint.layers,
        "source": found.blueprint.source,
        "blocks": {path: block_as_data(block) for path, block in found.blueprint.blocks.items()},
        "proof": asdict(found.proof),
        "attention": list(found.attention),
        "whole": list(found.whole),
    }


def given_fields(block: Block) -> dict[str, Any]:
    """Return the fields of a block that differ from their defaults."""
    given = {field.name: getattr(block, field.name) for field in fields(block)}
    return {name: value for name, value in given.items() if value != _DEFAULTS[name]}


def block_as_data(block: Block) -> dict[str, Any]:
    """Return the given fields of a block as JSON; functions by name."""
    return {name: _named(value) for name, value in given_fields(block).items()}


def from_data(data: dict[str, Any]) -> Inference:
    """Return the inference that :func:`as_data` wrote."""
    blocks = {
        path: Block(**{"column": (), "row": (), **{name: _unnamed(name, value) for name, value in block.items()}})
        for path, block in data["blocks"].items()
    }
    blueprint = Blueprint(_tuples(data["layers"]), blocks, source=data["source"])
    return Inference(blueprint, Proof(**data["proof"]), tuple(data["attention"]), tuple(data["whole"]))


_DEFAULTS = {
    field.name: field.default_factory() if field.default_factory is not MISSING else field.default
    for field in fields(Block)
}


def _named(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _named(each) for name, each in value.items()}
    return value.__name__ if callable(value) else value


def _unnamed(name: str, value: Any) -> Any:
    if name == "parts":
        return {path: _FUNCTIONS[each] if isinstance(each, str) else _tuples(each) for path, each in value.items()}
    return {path: _tuples(each) for path, each in value.items()} if isinstance(value, dict) else _tuples(value)


def _tuples(value: Any) -> Any:
    return tuple(_tuples(each) for each in value) if isinstance(value, list) else value
