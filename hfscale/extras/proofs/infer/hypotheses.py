"""Enumerate hypotheses about the tensor-parallel roles of modules in a candidate block, the most likely first.

No hypothesis is trusted: each one is either proved or dropped.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations, product
from typing import Any

from torch import nn

from ...._compat.torch import own_parameters
from ....models.blueprint import Block
from ....models.fields import HEAD_FIELDS, field, first_count, query_key_value
from ....models.module_kinds import PROJECTIONS, used_names, weight_dims
from .candidate_blocks import CandidateBlock
from .forward_trace import Trace
from .subject import Subject

_MOST_LOCAL = 4  # most integer attributes of one block that become a rank's sizes (``num_heads``)
_MOST_READ = 7  # if more may become local, only attributes named like heads and widths are tried
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_head_kv", "kv_heads")
Parts = dict[str, int | Callable[[Any], tuple[int, ...]]]


class Guesses:
    """Enumerate hypotheses about the tensor-parallel roles of the modules in one candidate block."""

    def __init__(self, subject: Subject, trace: Trace, candidate: CandidateBlock) -> None:
        self.subject = subject
        self.trace = trace
        self.candidate = candidate
        self.config = subject.model.config
        self.modules: dict[str, Any] = {}
        # Not every layer has all modules; for each module, the first layer that has it decides.
        for layer in reversed(subject.layer_names):
            inside = dict(subject.model.get_submodule(layer).named_modules())
            if candidate.path in inside:
                self.modules.update(inside[candidate.path].named_modules())
        # the number of attention heads of the clone; 0 if its config has no such field
        self.heads = first_count(self.config, HEAD_FIELDS) or 0
        # The number of key/value heads.
        self.key_heads = first_count(self.config, _KEY_HEADS) or self.heads
        self.widths = {self._width(name) for name in candidate.column}
        self.widths |= {self._width(name, of_input=True) for name in candidate.row}

    def insides(self) -> Iterator[Block]:
        """Yield hypotheses about the tensor-parallel roles of the modules in the block. The block's collectives are at
        its projections, or at the entry of the block if some modules before the column-parallel projections stay
        unsharded.
        """
        uncut = self.candidate.uncut
        base = Block(
            column=self.candidate.column,
            row=self.candidate.row,
            enter=("",) if uncut else self.candidate.column,
            leave=self._dropouts() or self.candidate.row,
            shared=tuple(name for name in uncut if name in self.modules),
            rest_shared=bool(uncut),
            optional=self.candidate.optional,
            dropout=(),
        )
        for inner, arguments, parts, local in product(
            self._inner(), self._arguments(), self._parts(), self._local()
        ):
            given = {**inner, **arguments, "shared": base.shared + inner["shared"]}
            given["local_attributes"] += tuple(
                name for name in local if not name.startswith("config:")
            )
            given["local_config"] = tuple(
                name[len("config:") :] for name in local if name.startswith("config:")
            )
            key_value = self._key_value(parts, inner["across"]) or base.key_value
            yield replace(base, parts=parts, key_value=key_value, **given)

    def edges(self, block: Block) -> Iterator[Block]:
        """Yield a proved block with its collectives moved to other modules, starting with those nearest to the block's
        own entry and exit.
        """
        if not self.candidate.path:
            return
        leaves = [
            ("",),
            *([dropouts] if (dropouts := self._dropouts()) else []),
            self.candidate.row,
        ]
        # An edge may also be one module that contains all columns and no row, and has its own forward pass.
        parents = {name.rpartition(".")[0] for name in self.candidate.column}
        parent = parents.pop() if len(parents) == 1 else ""
        within = any(name.startswith(f"{parent}.") for name in self.candidate.row)
        together = parent and not within and not isinstance(self.modules[parent], nn.ModuleList)
        enters = [
            ("",),
            *([(parent,)] if together else []),
            self.candidate.column,
        ]
        for enter, leave in product(enters, leaves):
            yield replace(block, enter=enter, leave=leave)

    def _dropouts(self) -> tuple[str, ...]:
        """Return the dropout modules that read the outputs of the row-parallel projections, if each projection has one.
        A collective at the dropout also comes after an adapter around the projection.
        """
        block = self.candidate.block
        dropouts = [self.trace.dropouts.get(f"{block}.{row}", "") for row in self.candidate.row]
        inside = [
            name.removeprefix(f"{block}.") for name in dropouts if name.startswith(f"{block}.")
        ]
        return tuple(inside) if len(inside) == len(self.candidate.row) else ()

    def _inner(self) -> Iterator[dict[str, Any]]:
        """Yield hypotheses about the tensor-parallel roles of the modules between column-parallel and row-parallel
        projections.
        """
        roles: dict[str, Any] = {
            "shared": (),
            "across": (),
            "cut": {},
            "local_attributes": (),
        }
        own: tuple[str, ...] = ()
        for name in self.candidate.inner:
            module = self.modules[name]
            weight = own_parameters(module).get("weight")
            if name == "":
                own = ("",)
            elif isinstance(module, nn.Conv1d) and module.groups == module.out_channels:
                roles["cut"] |= {
                    f"{name}.{key}": (0, 1) for key, _ in module.named_parameters(recurse=False)
                }
                roles["local_attributes"] += (f"{name}.groups",)
            elif weight is not None and weight.ndim == 1 and weight.shape[0] in self.widths:
                roles["across"] += (name,)
            else:
                roles["shared"] += (name,)
        owned = own_parameters(self.modules[""]).values()
        if own and self.heads and all(p.shape[:1] == (self.heads,) for p in owned if p is not None):
            yield {**roles, "own_heads": True}
        yield {**roles, "shared": own + roles["shared"]}

    def _key_value(
        self,
        parts: Parts,
        across: tuple[str, ...],
    ) -> dict[str, tuple[int, ...]]:
        """Return the column-parallel projections that compute only key/value heads, and the modules in ``across`` that
        read only these, if there are fewer key/value heads than query heads. The value is the indices of a fused
        projection's key and value parts, else empty.
        """
        if not self.candidate.attends or not 0 < self.key_heads < self.heads:
            return {}
        fused = {name: (1, 2) for name, lengths in parts.items() if lengths is query_key_value}
        width = self._width(self.candidate.row[0], of_input=True) * self.key_heads // self.heads
        names = [name for name in self.candidate.column if self._width(name) == width]
        names += [
            name for name in across if self.modules[name].get_parameter("weight").shape[0] == width
        ]
        return {**fused, **dict.fromkeys(names, ())}

    def _width(self, name: str, of_input: bool = False) -> int:
        module = self.modules[name]
        return int(module.weight.shape[weight_dims(module)[1 if of_input else 0]])

    def _parts(self) -> Iterator[Parts]:
        """Yield hypotheses about how the outputs of column-parallel projections are fused: not at all, from equal
        parts, or from query, key and value.
        """
        yield {}
        columns = self.candidate.column
        for count in (2, 3):
            if all(self._width(name) % (2 * count) == 0 for name in columns):
                yield dict.fromkeys(columns, count)
        if len(columns) == 1:
            try:
                lengths = query_key_value(self.config)
            except (
                AttributeError,
                TypeError,
                RuntimeError,
            ):  # the config lacks a number, or has one per layer
                return
            if sum(lengths) == self._width(columns[0]):
                yield {columns[0]: query_key_value}

    def _arguments(self) -> Iterator[dict[str, Any]]:
        """Yield hypotheses about keyword arguments of the block: which tensors have one entry per head, or per sample
        and head.
        """
        samples = self.subject.inputs["input_ids"].shape[0]
        heads = {}
        sample_heads = []
        for name, tensor in self.trace.arguments.get(self.candidate.block, {}).items():
            if self.heads and self.heads in tensor.shape:
                heads[name] = tensor.shape.index(self.heads)
            elif self.heads and tensor.ndim and tensor.shape[0] == samples * self.heads:
                sample_heads.append(name)
        if heads or sample_heads:
            yield {"heads": heads, "sample_heads": tuple(sample_heads)}
        yield {}

    def _local(self) -> Iterator[tuple[str, ...]]:
        """Yield sets of integer attributes (such as the number of heads) that the forward pass reads, and that may have
        to be replaced by the sizes of one rank.
        """
        sizes = self.widths | {
            width // part for width in self.widths for part in (2, 3) if width % part == 0
        }
        sizes |= {self.heads, self.key_heads}

        def sized(holder: Any, names: tuple[str, ...]) -> list[str]:
            return [
                name
                for name in names
                if type(value := field(holder, name)) is int and value in sizes
            ]

        read: list[str] = []
        inside = dict(self.subject.model.get_submodule(self.candidate.block).named_modules())
        for path, module in inside.items():
            if not isinstance(module, PROJECTIONS):
                read += [
                    f"{path}.{name}".lstrip(".") for name in sized(module, used_names(type(module)))
                ]
        block = inside[""]
        if "config" in vars(block):
            own = vars(block).keys()
            read += [
                f"config:{name}"
                for name in sized(block.config, used_names(type(block)))
                if name not in own
            ]
        if len(read) > _MOST_READ:
            read = [name for name in read if any(word in name for word in ("head", "dim", "size"))][
                :_MOST_READ
            ]
        for count in range(min(len(read), _MOST_LOCAL) + 1):
            yield from combinations(read, count)
