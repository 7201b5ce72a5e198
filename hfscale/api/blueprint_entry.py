"""Write a blueprint as Python: how tensor parallelism shards the modules of a model family, as one entry of the table
``hfscale.models.FAMILIES``.
"""

from dataclasses import asdict
from typing import Any

from ..models.blueprint import (
    INFERRED,
    OWN_TABLE,
    TOLERANCE,
    Block,
    Blueprint,
    Inference,
    given_fields,
)
from .find_blueprint import find_blueprint, infer

_WIDTH = 100


def as_python(family: str, blueprint: Blueprint) -> str:
    """Return the Python code of a blueprint (how tensor parallelism shards the modules of a model ``family``), as an
    entry of the table ``hfscale.models.FAMILIES``. Fields that have their default values are left out.
    """
    blocks = "".join(
        f"            {path!r}: {_block(block)},\n" for path, block in blueprint.blocks.items()
    )
    unfit = (
        ""
        if blueprint.unfit is Blueprint.unfit
        else "        unfit=...,  # a function: see the table\n"
    )
    head = f'    "{family}": Blueprint(\n        layers={_value(blueprint.layers)},\n        blocks={{\n'
    return f"{head}{blocks}        }},\n{unfit}    ),".replace("'", '"')


def describe_blueprint(model: Any, inferred: bool = False) -> str:
    """Return lines of text about a model's blueprint, which says how tensor parallelism shards its modules: where the
    blueprint comes from, the blueprint as Python code, and, if it was ``inferred`` from the model, the errors of two
    tensor ranks compared with one process.
    """
    family, blueprint, inference = _family_and_blueprint(model, inferred)
    lines = [f"blueprint of {family}: {blueprint.source}"]
    if inference is not None:
        proof = inference.proof
        lines += [
            f"  output    {proof.output:9.1e}  two tensor ranks against the untouched clone, float64, relative",
            f"  gradients {proof.gradient:9.1e}  the worst of all: {proof.parameter}",
            f"  proved below {TOLERANCE:g}; attention: {', '.join(inference.attention) or 'kept whole'}",
            *(f"  kept whole: {what}" for what in inference.whole),
        ]
    elif blueprint.source == OWN_TABLE:
        lines.append("(it has an entry already: --infer derives one from the model itself)")
    return "\n".join([*lines, "", as_python(family, blueprint)])


def blueprint_entry(model: Any, inferred: bool = False) -> dict[str, Any]:
    """Return a model's blueprint, which says how tensor parallelism shards its modules, as plain data without
    functions. If it was inferred from the model, include its ``proof``: the errors of two tensor ranks compared with
    one process.
    """
    family, blueprint, inference = _family_and_blueprint(model, inferred)
    written = {
        name: value
        for name, value in asdict(blueprint).items()
        if not callable(value) and name != "source"
    }
    entry = {"family": family, "source": blueprint.source, "blueprint": written}
    return entry if inference is None else {**entry, "proof": asdict(inference.proof)}


def _family_and_blueprint(model: Any, inferred: bool) -> tuple[str, Blueprint, Inference | None]:
    """Return a model's family, its blueprint (how tensor parallelism shards its modules), and the :class:`Inference`
    with its proof if the blueprint was inferred from the model, otherwise ``None``.
    """
    blueprint = infer(model).blueprint if inferred else find_blueprint(model)
    return (
        model.config.model_type,
        blueprint,
        infer(model) if blueprint.source.startswith(INFERRED) else None,
    )


def _block(block: Block) -> str:
    given = [f"{name}={_value(value)}" for name, value in given_fields(block).items()]
    line = f"Block({', '.join(given)})"
    if len(line) <= _WIDTH:
        return line
    return (
        "Block(\n"
        + "".join(f"                {argument},\n" for argument in given)
        + "            )"
    )


def _value(value: Any) -> str:
    if callable(value):
        return str(value.__name__) if value.__name__.isidentifier() else "..."
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, tuple):
        return "(" + ", ".join(map(_value, value)) + ("," if len(value) == 1 else "") + ")"
    return repr(value)
