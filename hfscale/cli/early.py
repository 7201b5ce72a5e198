"""Check a command line before torch is imported, which takes seconds."""

import argparse
from typing import Any

from ..config.declared import declared
from ..config.layout import LayoutFields, check_name
from ..errors import ConfigError, check_count
from .amounts import bytes_of, tokens_of
from .model import check_place

_COUNTS = (
    *("batch_size", "accumulate", "gpus", "processes", "microbatches", "virtual_stages", "powersgd_rank"),
    *("data_ranks", "rank", "num_experts", "top_k", "every", "steps", "width", "gpus_per_node"),
)
_TOKENS = ("sequence_length", "tokens", "tokens_per_step", "its_tokens_per_step")


def check_early(arguments: argparse.Namespace) -> None:
    """Refuse names, sizes and paths of any command that are impossible in themselves."""
    given = {name: value for name, value in vars(arguments).items() if value is not None}
    if "model" in given:
        check_place(given["model"])
    for each in declared(LayoutFields):
        if each.dest in given and each.name.endswith("_size"):
            check_count(each.name, _number(given[each.dest]))
        elif each.dest in given and each.choices:
            check_name(each, given[each.dest])
    for name in given.keys() & set(_COUNTS):
        check_count(_flag(name), _number(given[name]))
    for name in given.keys() & set(_TOKENS):
        tokens_of(given[name], _flag(name))
    if isinstance(given.get("max_memory"), str):
        bytes_of(given["max_memory"], "--max-memory")
    if "auto_class" in given and not str(given["auto_class"]).startswith("AutoModel"):
        raise ConfigError(
            f"--auto-class {given['auto_class']} is not one of transformers' Auto classes: use AutoModelForCausalLM"
        )
    if "hardware" in given:
        from ..cost.model.machines_known import find_machine

        find_machine(given["hardware"])


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _number(given: Any) -> Any:
    return int(given) if isinstance(given, str) and given.isdigit() else given
