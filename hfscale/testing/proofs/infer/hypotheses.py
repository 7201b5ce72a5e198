"""What a candidate's block might be in the plan's words, most likely first.

Nothing here is trusted: each hypothesis is proved or dropped.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations
from typing import Any

from torch import nn

from ...._host.torch import own_parameters
from ....families.blueprint import Block
from ....families.fields import HEAD_FIELDS, field
from ....families.fused import query_key_value
from ....families.projections import weight_dims
from .candidates import Candidate
from .forward_trace import Trace
from .subject import Subject

_MOST_LOCAL = 4  # attributes of one block
_MOST_READ = 7  # integers that may be local sizes; with more, only those named like heads or widths
Parts = dict[str, int | Callable[[Any], tuple[int, ...]]]


class Guesses:
    """Hypotheses about one candidate."""

    def __init__(self, subject: Subject, trace: Trace, candidate: Candidate) -> None:
        self.subject, self.trace, self.candidate = subject, trace, candidate
        self.modules: dict[str, nn.Module] = {}
        for layer in reversed(subject.layer_names):  # not every layer has all of them; the first that does speaks
            inside = dict(subject.model.get_submodule(layer).named_modules())
            if candidate.path in inside:
                self.modules.update(inside[candidate.path].named_modules())
        self.heads = head_count(subject.model.config)

    def insides(self) -> Iterator[Block]:
        """What may be between the edges, which sit on the projections (on the block, where parts of it are whole)."""
        whole, dropouts = self.candidate.whole, self._dropouts()
        base = Block(
            column=self.candidate.column,
            row=self.candidate.row,
            enter=("",) if whole else self.candidate.column,
            leave=dropouts or self.candidate.row,
            shared=tuple(name for name in whole if name in self.modules),
            rest_shared=bool(whole),
            optional=self.candidate.optional,
            dropout=(),
        )
        default = base.key_value
        for inner in self._inner():
            for arguments in self._arguments():
                for parts in self._parts():
                    for local in self._local():
                        conv = inner.get("local_attributes", ())
                        merged = {**inner, **arguments, "shared": base.shared + inner.get("shared", ())}
                        attributes = tuple(name for name in local if not name.startswith("config:"))
                        merged["local_attributes"] = (*conv, *attributes)
                        merged["local_config"] = tuple(
                            name.removeprefix("config:") for name in local if name.startswith("config:")
                        )
                        key_value = self._key_value(parts, inner.get("across", ())) or default
                        yield replace(base, parts=parts, key_value=key_value, **merged)

    def edges(self, block: Block) -> Iterator[Block]:
        """Where the edges of a proved block may sit instead, the nearest to the block itself first."""
        if not self.candidate.path:
            return
        leaves = [("",), *([dropouts] if (dropouts := self._dropouts()) else []), self.candidate.row]
        together = self._parent_of_columns()
        enters = [("",), *([(together,)] if together else []), self.candidate.column]
        for enter in enters:
            for leave in leaves:
                yield replace(block, enter=enter, leave=leave)

    def _parent_of_columns(self) -> str:
        """The module that holds all columns and no row, if there is one with a forward of its own."""
        parents = {name.rpartition(".")[0] for name in self.candidate.column}
        parent = parents.pop() if len(parents) == 1 else ""
        within = any(name.startswith(f"{parent}.") for name in self.candidate.row)
        return "" if not parent or within or isinstance(self.modules[parent], nn.ModuleList) else parent

    def _dropouts(self) -> tuple[str, ...]:
        """The dropout behind every row: an edge there is behind whatever an adapter puts around the row."""
        block = self.candidate.block
        found = [self.trace.dropouts.get(f"{block}.{row}", "") for row in self.candidate.row]
        inside = [name.removeprefix(f"{block}.") for name in found if name.startswith(f"{block}.")]
        return tuple(inside) if len(inside) == len(self.candidate.row) else ()

    def _inner(self) -> Iterator[dict[str, Any]]:
        """Roles of the modules between columns and rows."""
        widths = {self._width(name) for name in self.candidate.column} | {
            self._width(name, of_input=True) for name in self.candidate.row
        }
        roles: dict[str, Any] = {"shared": (), "across": (), "cut": {}, "local_attributes": ()}
        own: tuple[str, ...] = ()
        for name in self.candidate.inner:
            module: Any = self.modules[name]
            weight = own_parameters(module).get("weight")
            if name == "":
                own = ("",)
            elif isinstance(module, nn.Conv1d) and module.groups == module.out_channels:
                roles["cut"] |= {f"{name}.{key}": (0, 1) for key, _ in module.named_parameters(recurse=False)}
                roles["local_attributes"] += (f"{name}.groups",)
            elif weight is not None and weight.ndim == 1 and weight.shape[0] in widths:
                roles["across"] += (name,)
            else:
                roles["shared"] += (name,)
        if (
            own
            and self.heads
            and all(p.shape[:1] == (self.heads,) for p in own_parameters(self.modules[""]).values() if p is not None)
        ):
            yield {**roles, "own_heads": True}
        yield {**roles, "shared": own + roles["shared"]}

    def _key_value(self, parts: Parts, across: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
        """What has entries of key/value heads only, where there are fewer of those than heads."""
        config = self.subject.model.config
        key_heads = key_head_count(config)
        if not self.candidate.attends or not 0 < key_heads < self.heads:
            return {}
        fused = {name: (1, 2) for name, lengths in parts.items() if lengths is query_key_value}
        width = self._width(self.candidate.row[0], of_input=True) * key_heads // self.heads
        names = [name for name in self.candidate.column if self._width(name) == width]
        names += [name for name in across if self.modules[name].get_parameter("weight").shape[0] == width]
        return {**fused, **dict.fromkeys(names, ())}

    def _width(self, name: str, of_input: bool = False) -> int:
        module: Any = self.modules[name]
        return int(module.weight.shape[weight_dims(module)[1 if of_input else 0]])

    def _parts(self) -> Iterator[Parts]:
        """How the columns may be fused."""
        yield {}
        columns = self.candidate.column
        for count in (2, 3):
            if all(self._width(name) % (2 * count) == 0 for name in columns):
                yield dict.fromkeys(columns, count)
        if len(columns) == 1:
            try:
                lengths = query_key_value(self.subject.model.config)
            except (AttributeError, TypeError, RuntimeError):  # it lacks a number, or has one per layer
                return
            if sum(lengths) == self._width(columns[0]):
                yield {columns[0]: query_key_value}

    def _arguments(self) -> Iterator[dict[str, Any]]:
        """Keyword arguments with one entry per head, or per sample and head."""
        samples = self.subject.inputs["input_ids"].shape[0]
        heads, sample_heads = {}, []
        for name, tensor in self.trace.arguments.get(self.candidate.block, {}).items():
            if self.heads and self.heads in tensor.shape:
                heads[name] = tensor.shape.index(self.heads)
            elif self.heads and tensor.ndim and tensor.shape[0] == samples * self.heads:
                sample_heads.append(name)
        if heads or sample_heads:
            yield {"heads": heads, "sample_heads": tuple(sample_heads)}
        yield {}

    def _local(self) -> Iterator[tuple[str, ...]]:
        """Sets of integers, read in the forward, that may have to be local sizes."""
        widths = {self._width(name) for name in self.candidate.column}
        widths |= {self._width(name, of_input=True) for name in self.candidate.row}
        widths |= {width // part for width in list(widths) for part in (2, 3) if width % part == 0}
        heads = head_count(self.subject.model.config)
        sizes = widths | {heads, key_head_count(self.subject.model.config)}
        prefix = f"{self.candidate.block}."
        read: list[str] = []
        for name, found in self.trace.integers.items():
            if name == self.candidate.block or name.startswith(prefix):
                inside = name.removeprefix(self.candidate.block).removeprefix(".")
                read += [f"{inside}.{key}" if inside else key for key, value in found.items() if value in sizes]
        fields = self.trace.fields.get(self.candidate.block, {})
        read += [f"config:{key}" for key, value in fields.items() if value in sizes]
        if len(read) > _MOST_READ:
            read = [name for name in read if any(word in name for word in ("head", "dim", "size"))][:_MOST_READ]
        for count in range(min(len(read), _MOST_LOCAL) + 1):
            yield from combinations(read, count)


def head_count(config: Any) -> int:
    """How many attention heads a clone has; 0 where its config does not say."""
    return next((value for name in HEAD_FIELDS if isinstance(value := field(config, name), int)), 0)


def key_head_count(config: Any) -> int:
    """How many key/value heads."""
    names = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_head_kv", "kv_heads")
    return next((value for name in names if isinstance(value := field(config, name), int)), head_count(config))
