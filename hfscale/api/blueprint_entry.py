"""Write a blueprint as Python, as an entry of the table in ``hfscale/models``."""

from dataclasses import MISSING, Field, asdict, fields
from typing import Any

from ..models.blueprint import OWN_TABLE, Block, Blueprint
from ..models.inference import TOLERANCE, Inference
from ..plan.drafting.resolve import find_blueprint, infer

_WIDTH = 100


def as_python(family: str, blueprint: Blueprint) -> str:
    """Return a family's table entry as Python, without fields that have their defaults."""
    blocks = "".join(f"            {path!r}: {_block(block)},\n" for path, block in blueprint.blocks.items())
    unfit = "        unfit=...,  # a function: see the table\n" if _differs(blueprint, "unfit") else ""
    head = f'    "{family}": Blueprint(\n        layers={_value(blueprint.layers)},\n        blocks={{\n'
    return f"{head}{blocks}        }},\n{unfit}    ),".replace("'", '"')


def describe_blueprint(model: Any, inferred: bool = False) -> str:
    """Describe a model's blueprint: its source, its proof if it was ``inferred``, and its table entry.

    Raises:
        PlanError: there is none, and none could be inferred.
    """
    family = model.config.model_type
    blueprint = infer(model).blueprint if inferred else find_blueprint(model)
    lines = [f"blueprint of {family}: {blueprint.source}"]
    if inferred or blueprint.source.startswith("inferred"):
        lines += _evidence(infer(model))
    elif blueprint.source == OWN_TABLE:
        lines.append("(it has an entry already: --infer derives one from the model itself)")
    return "\n".join([*lines, "", as_python(family, blueprint)])


def blueprint_entry(model: Any, inferred: bool = False) -> dict[str, Any]:
    """Return a model's blueprint as data: ``family``, ``source``, ``blueprint`` by field, ``proof`` if inferred.

    Fields that are functions are left out.

    Raises:
        PlanError: there is none, and none could be inferred.
    """
    found = infer(model).blueprint if inferred else find_blueprint(model)
    written = {name: value for name, value in asdict(found).items() if not callable(value) and name != "source"}
    entry = {"family": model.config.model_type, "source": found.source, "blueprint": written}
    if inferred or found.source.startswith("inferred"):
        entry["proof"] = asdict(infer(model).proof)
    return entry


def _evidence(inference: Inference) -> list[str]:
    proof = inference.proof
    return [
        f"  output    {proof.output:9.1e}  two tensor ranks against the untouched clone, float64, relative",
        f"  gradients {proof.gradient:9.1e}  the worst of all: {proof.parameter}",
        f"  proved below {TOLERANCE:g}; attention: {', '.join(inference.attention) or 'kept whole'}",
        *(f"  kept whole: {what}" for what in inference.whole),
    ]


def _block(block: Block) -> str:
    given = [f"{f.name}={_value(getattr(block, f.name))}" for f in fields(block) if _differs(block, f.name)]
    line = f"Block({', '.join(given)})"
    if len(line) <= _WIDTH:
        return line
    return "Block(\n" + "".join(f"                {argument},\n" for argument in given) + "            )"


def _differs(owner: Any, name: str) -> bool:
    declared: Field[Any] = type(owner).__dataclass_fields__[name]
    if declared.default_factory is not MISSING:
        return bool(getattr(owner, name) != declared.default_factory())
    return (
        declared.default is MISSING
        or (callable(declared.default) and getattr(owner, name) is not declared.default)
        or (not callable(declared.default) and getattr(owner, name) != declared.default)
    )


def _value(value: Any) -> str:
    if callable(value):
        return str(value.__name__) if value.__name__.isidentifier() else "..."
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, tuple):
        return "(" + ", ".join(map(_value, value)) + ("," if len(value) == 1 else "") + ")"
    return repr(value)
