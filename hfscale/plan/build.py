"""Config in, plan out: no process group, no weights, no GPU."""

from collections.abc import Iterator
from math import gcd
from typing import Any

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..config import ParallelConfig
from ..errors import PlanError
from .blueprint import Block, Blueprint, find_blueprint
from .code import has_own_loss, looks_up_like_stock
from .cut import Cut
from .plan import LOSSES, BlockPlan, ParameterPlan, Plan, join_path, wild_name

# (dim of the outputs, dim of the inputs) in the weight of each kind of projection
_WEIGHT_DIMS: dict[type[nn.Module], tuple[int, int]] = {nn.Linear: (0, 1), Conv1D: (1, 0)}
_LATER = {
    "pp": "pipeline stages",
    "ep": "expert parallelism",
    "cp": "context parallelism",
}


def build_plan(model: nn.Module, layout: ParallelConfig) -> Plan:
    """Plan a stock Hugging Face model, whole and unpatched, on any device (the meta device is enough).

    Raises:
        PlanError: the layout does not fit the model; the message lists every problem with the valid values.
    """
    builder = _Builder(model, layout)
    plan = builder.build()
    if builder.problems:
        listed = "".join(f"\n  - {problem}" for problem in builder.problems)
        raise PlanError(f"{layout.describe()} does not fit {type(model).__name__}:{listed}")
    return plan


class _Builder:
    def __init__(self, model: Any, layout: ParallelConfig) -> None:
        self.model, self.layout, self.tp = model, layout, layout.size("tp")
        self.config = model.config
        self.problems: list[str] = []
        self.modules: dict[str, Any] = dict(model.named_modules())
        # parameter name -> (cut over tp, partial axes)
        self.rules: dict[str, tuple[Cut | None, tuple[str, ...]]] = {}

    def build(self) -> Plan:
        self._refuse_unavailable()
        blueprint = self._blueprint()
        layers = self._layers(blueprint)
        blocks = self._blocks(blueprint, layers) if self.tp > 1 and blueprint else []
        head, loss = self._head()
        embedding = self._vocabulary(head) if self.tp > 1 else None
        return Plan(
            family=self.config.model_type,
            layout=self.layout,
            parameters=tuple(self._parameters()),
            layers=tuple(layers),
            blocks=tuple(blocks),
            embedding=embedding,
            head=head,
            loss=loss,
        )

    def _refuse_unavailable(self) -> None:
        for axis, what in _LATER.items():
            if self.layout.size(axis) > 1:
                self.problems.append(
                    f"{axis}_size={self.layout.size(axis)}: {what} cannot be run by this version: use {axis}_size=1"
                )
        if self.layout.sequence_parallel:
            self.problems.append("sequence_parallel=True cannot be run by this version: use sequence_parallel=False")
        quantization = getattr(self.config, "quantization_config", None)
        if quantization is not None:
            method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization.quant_method
            self.problems.append(
                f"the checkpoint is quantized ({getattr(method, 'value', method)}), which this version does not load: "
                "use one with weights of 16 or 32 bits"
            )

    def _blueprint(self) -> Blueprint | None:
        try:
            return find_blueprint(self.model)
        except PlanError as error:
            if self.tp > 1:
                self.problems.append(str(error))
            return None

    def _layers(self, blueprint: Blueprint | None) -> list[str]:
        if blueprint is not None:
            base = getattr(self.model, "base_model", self.model)
            prefix = "" if base is self.model else f"{self.model.base_model_prefix}."
            path = prefix + blueprint.layers
            if path in self.modules:
                layers = [f"{path}.{name}" for name, _ in self.modules[path].named_children()]
                for layer, name in self._tied_outside(layers) if self.layout.batch_world > 1 else ():
                    self._problem_once(
                        f"{self.layout.describe()}: {wild_name(layer)} shares {wild_name(name)} with another part of "
                        "the model, and the data axes would untie them: use dp_shard_size=1 and dp_replicate_size=1"
                    )
                return layers
            if self.tp > 1:
                self.problems.append(
                    f"tp_size={self.tp}: the blueprint of {self.config.model_type!r} names the layer list {path!r}, "
                    f"which {type(self.model).__name__} does not have: correct the blueprint, or use tp_size=1"
                )
        # Without a blueprint the layers only group parameters for sharding, and the host knows those classes.
        classes = set(getattr(self.model, "_no_split_modules", None) or ())
        layers = []
        for name, module in self.modules.items():  # outer modules come first; one inside another is no layer
            if type(module).__name__ in classes and not any(name.startswith(f"{layer}.") for layer in layers):
                layers.append(name)
        tied = {layer for layer, _ in self._tied_outside(layers)}
        return [layer for layer in layers if layer not in tied]

    def _tied_outside(self, layers: list[str]) -> list[tuple[str, str]]:
        """Layers that share a tensor with the rest of the model, each with that tensor's name in it."""
        homes: dict[int, dict[tuple[int, str], str]] = {}
        for name, parameter in self._named():
            homes.setdefault(id(parameter), {})[self._place(name)] = name
        found = []
        for names in (list(places.values()) for places in homes.values() if len(places) > 1):
            owners = [next((layer for layer in layers if name.startswith(f"{layer}.")), None) for name in names]
            if len(set(owners)) > 1:
                found += [(owner, name) for owner, name in zip(owners, names, strict=True) if owner is not None]
        return found

    def _blocks(self, blueprint: Blueprint, layers: list[str]) -> list[BlockPlan]:
        blocks = []
        unfit = blueprint.unfit(self.config)
        if unfit:
            self.problems.append(f"tp_size={self.tp}: {self.config.model_type!r} with {unfit}: use tp_size=1")
            return []
        for layer in layers:
            for path, role in blueprint.blocks.items():
                name = f"{layer}.{path}" if path else layer
                if name in self.modules and self._applies(name, role):
                    blocks.append(self._block(name, role, layers))
        for path in blueprint.blocks:
            if path and not any(block.name.endswith(f".{path}") for block in blocks):
                self.problems.append(
                    f"tp_size={self.tp}: the blueprint of {self.config.model_type!r} names a block {path!r} that no "
                    "layer has: correct the blueprint, or use tp_size=1"
                )
        if blocks:
            self._check_heads(max(role.head_groups for role in blueprint.blocks.values()))
        return blocks

    def _applies(self, name: str, role: Block) -> bool:
        """Whether a layer's module is the block meant: one that has none of its parts is another kind of layer."""
        wanted = [*role.column, *role.row, *(child.rpartition(".")[0] for child in role.cut)]
        return not role.optional or any(f"{name}.{child}" in self.modules for child in wanted)

    def _block(self, name: str, role: Block, layers: list[str]) -> BlockPlan:
        projections = [(f"{name}.{child}", True) for child in role.column] + [
            (f"{name}.{child}", False) for child in role.row
        ]
        for path, column in projections:
            module = self.modules.get(path)
            parameter = self._parameter_in(name, path.removeprefix(f"{name}.")) if module is None else None
            if parameter is not None and column and role.own_heads:  # the host lists sinks beside projections
                self._cut(path, 0, parameter.shape[0])
                continue
            if module is None and role.optional:
                continue
            dims = next((d for kind, d in _WEIGHT_DIMS.items() if isinstance(module, kind)), None)
            if module is None or dims is None:
                found = "nothing" if module is None else type(module).__name__
                self._problem_once(
                    f"tp_size={self.tp}: {wild_name(path)} should be a projection (nn.Linear or Conv1D) and is "
                    f"{found}: correct the blueprint, or use tp_size=1"
                )
                continue
            dim = dims[0] if column else dims[1]
            parts = self._parts(role, name, path, module.weight.shape[dim])
            self._cut(f"{path}.weight", dim, module.weight.shape[dim], parts)
            if getattr(module, "bias", None) is not None:
                if column:
                    self._cut(f"{path}.bias", 0, module.bias.shape[0], parts)
                else:
                    self.rules[f"{path}.bias"] = (None, ("tp",))
        for child, (dim, fused) in role.cut.items():
            parameter = self._parameter_in(name, child)
            if parameter is not None:
                length = parameter.shape[dim]
                self._cut(f"{name}.{child}", dim, length, (length // fused,) * fused if fused > 1 else ())
        for child, parameter in self.modules[name].named_parameters(recurse=False) if role.own_heads else ():
            self._cut(f"{name}.{child}", 0, parameter.shape[0])
        shared = tuple(
            path for child in (*role.shared, *role.across) if (path := join_path(name, child)) in self.modules
        )
        for path in shared:
            for parameter, _ in self.modules[path].named_parameters(recurse=False):
                self.rules[f"{path}.{parameter}"] = (None, ("tp",))
        if role.rest_shared:
            shared += tuple(self._roleless_modules(name))
        # What a block that is a module of its own holds must have a role; a layer has parts outside of its blocks.
        whole = () if name in layers else self.modules[name].named_parameters(prefix=name)
        for parameter, _ in whole:
            if role.enter == ("",) and parameter not in self.rules:
                self._problem_once(
                    f"tp_size={self.tp}: {wild_name(parameter)} is inside a block whose blueprint gives it no role: "
                    "name its module as column, row or shared in the blueprint, or use tp_size=1"
                )
        return BlockPlan(
            name=name,
            column=tuple(f"{name}.{child}" for child in role.column if f"{name}.{child}" in self.modules),
            row=tuple(f"{name}.{child}" for child in role.row if f"{name}.{child}" in self.modules),
            shared=shared,
            local_attributes=tuple(path for path in role.local_attributes if self._has_attribute(name, path, role)),
            dropout=max((self._probability(field) for field in role.dropout), default=0.0),
            enter=tuple(join_path(name, child) for child in role.enter),
            leave=tuple(join_path(name, child) for child in role.leave),
            heads=tuple(role.heads.items()),
            sample_heads=role.sample_heads,
            across=tuple(
                (path, self.modules[path].weight.shape[-1])
                for child in role.across
                if (path := join_path(name, child)) in self.modules
            ),
            local_config=role.local_config,
        )

    def _roleless_modules(self, block: str) -> Iterator[str]:
        """Modules inside a block with parameters of their own that have no rule yet; they get that of shared ones."""
        for path, module in self.modules[block].named_modules(prefix=block):
            own = [f"{path}.{name}" for name, _ in module.named_parameters(recurse=False)]
            if own and not any(name in self.rules for name in own):
                weight = module._parameters.get("weight")
                if weight is not None and weight.ndim == 2 and weight.shape[0] == self._hidden_size():
                    self._problem_once(
                        f"tp_size={self.tp}: {wild_name(path)} may write the output of its block, the blueprint gives "
                        "it no role, and would be counted on every rank: name it as column or row, or use tp_size=1"
                    )
                self.rules.update(dict.fromkeys(own, (None, ("tp",))))
                yield path

    def _has_attribute(self, block: str, path: str, role: Block) -> bool:
        owner, _, attribute = join_path(block, path).rpartition(".")
        return not role.optional or hasattr(self.modules.get(owner), attribute)

    def _probability(self, field: str) -> float:
        """A config field (``attn_config.attn_pdrop``: of a config in it) that may be missing or ``None``."""
        value = self.config
        for name in field.split("."):
            value = getattr(value, name, None)
        return float(value or 0.0)

    def _hidden_size(self) -> int | None:
        config = self.config.get_text_config(decoder=True) if hasattr(self.config, "get_text_config") else self.config
        return getattr(config, "hidden_size", None)

    def _parts(self, role: Block, block: str, path: str, length: int) -> tuple[int, ...]:
        """Lengths of the matrices fused in a projection along its cut dim of ``length``; empty for one."""
        fused = role.parts.get(path.removeprefix(f"{block}."), 1)
        if not isinstance(fused, int):
            return fused(self.config)
        if length % fused:
            self._problem_once(
                f"tp_size={self.tp}: the blueprint fuses {fused} equal matrices in {wild_name(path)}.weight, which has "
                f"{length} entries: correct the blueprint, or use tp_size=1"
            )
            return ()
        return (length // fused,) * fused if fused > 1 else ()

    def _parameter_in(self, block: str, path: str) -> Tensor | None:
        owner, _, attribute = f"{block}.{path}".rpartition(".")
        found: Tensor | None = self.modules[owner]._parameters.get(attribute) if owner in self.modules else None
        return found

    def _cut(self, name: str, dim: int, length: int, parts: tuple[int, ...] = ()) -> None:
        cut = Cut("tp", dim, self.tp, parts)
        if parts and sum(parts) != length:
            self._problem_once(
                f"tp_size={self.tp}: the blueprint gives the matrices fused in {wild_name(name)} the lengths {parts}, "
                f"and it has {length} entries: correct the blueprint, or use tp_size=1"
            )
        elif cut.local_length(length, self.tp - 1) == 0:
            self._problem_once(
                f"tp_size={self.tp} leaves a rank without any of the {length} entries of {wild_name(name)}: "
                f"use tp_size 1 to {min(parts or (length,))}"
            )
        self.rules[name] = (cut, ())

    def _check_heads(self, groups: int) -> None:
        config = self.config.get_text_config(decoder=True) if hasattr(self.config, "get_text_config") else self.config
        heads = key_heads = getattr(config, "decoder_attention_heads", None)  # the other names mean the encoder's
        if not heads:
            heads = getattr(config, "num_attention_heads", None)
            names = ("num_key_value_heads", "num_kv_heads")
            key_heads = next((count for name in names if (count := getattr(config, name, None))), heads)
        if not heads or not key_heads:
            return
        common = gcd(heads, key_heads) // groups
        if common % self.tp or not common:
            valid = ", ".join(str(size) for size in range(1, common + 1) if common % size == 0)
            grouped = f", which come in {groups} groups" if groups > 1 else ""
            self.problems.append(
                f"tp_size={self.tp} does not divide the {heads} attention heads and {key_heads} key/value heads of "
                f"{self.config.model_type!r}{grouped}: use tp_size {valid or 1}"
            )

    def _head(self) -> tuple[str | None, str | None]:
        """Name of the projection onto the vocabulary and the loss on it, where hfscale can run that loss."""
        loss = getattr(self.model, "loss_type", None) or "ForCausalLM"  # the host's own default
        head = self.model.get_output_embeddings() if hasattr(self.model, "get_output_embeddings") else None
        if loss not in LOSSES or not isinstance(head, nn.Linear) or has_own_loss(self.model):
            return None, None
        return next(name for name, module in self.modules.items() if module is head), loss

    def _vocabulary(self, head: str | None) -> str | None:
        """Cut the head and the input embedding along the vocabulary; returns the embedding's name."""
        if head is not None:
            module = self.modules[head]
            self._cut(f"{head}.weight", 0, module.weight.shape[0])
            for alias, parameter in self._named() if module.bias is not None else ():
                if parameter is module.bias:  # some heads keep their bias under a second name
                    self._cut(alias, 0, module.bias.shape[0])
        embedding: Any = self.model.get_input_embeddings()
        name = next((name for name, module in self.modules.items() if module is embedding), None)
        if name is None or not isinstance(embedding, nn.Embedding):
            return None
        tied = head is not None and embedding.weight is self.modules[head].weight
        if not looks_up_like_stock(embedding):
            # It computes something of its own: it stays whole, which it cannot where the head is cut.
            if tied:
                self.problems.append(
                    f"tp_size={self.tp}: {name} is a {type(embedding).__name__} tied to the head, which cannot be cut "
                    "along the vocabulary: use tp_size=1"
                )
                self._cut(f"{name}.weight", 0, embedding.weight.shape[0])
            return None
        if head is None and self._is_tied(embedding.weight):
            return None
        if embedding.max_norm is not None or embedding.scale_grad_by_freq or embedding.sparse:
            self.problems.append(
                f"tp_size={self.tp}: {name} has max_norm, scale_grad_by_freq or sparse gradients, so it cannot be cut "
                "along the vocabulary: use tp_size=1"
            )
        self._cut(f"{name}.weight", 0, embedding.weight.shape[0])
        return name

    def _is_tied(self, parameter: Tensor) -> bool:
        return sum(p is parameter for _, p in self._named()) > 1

    def _named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every parameter under every name it has."""
        yield from self.model.named_parameters(remove_duplicate=False)

    def _rules_of_tensors(self) -> dict[int, tuple[Cut | None, tuple[str, ...]]]:
        """The rules by tensor: every module that uses one tensor must agree on its rule."""
        by_place = {self._place(name): rule for name, rule in self.rules.items()}  # one module may have two names
        chosen: dict[int, tuple[str, tuple[Cut | None, tuple[str, ...]] | None]] = {}
        for name, parameter in self._named():
            rule = by_place.get(self._place(name))
            first, agreed = chosen.setdefault(id(parameter), (name, rule))
            if rule != agreed:
                self._problem_once(
                    f"tp_size={self.tp}: {wild_name(first)} and {wild_name(name)} are one tensor, and would be cut "
                    "differently: correct the blueprint, or use tp_size=1"
                )
        return {key: rule for key, (_, rule) in chosen.items() if rule is not None}

    def _place(self, name: str) -> tuple[int, str]:
        """Module and attribute that hold a parameter."""
        owner, _, attribute = name.rpartition(".")
        return id(self.model.get_submodule(owner)), attribute

    def _parameters(self) -> list[ParameterPlan]:
        owners: dict[int, str] = {}
        rules, shard = self._rules_of_tensors(), self.layout.size("dp_shard")
        result = []
        for name, parameter in self._named():
            owner = owners.setdefault(id(parameter), name)
            cut, partial = rules.get(id(parameter), (None, ()))
            cuts = [cut] if cut is not None else []
            if self.layout.batch_world > 1 and parameter.ndim == 0:
                self._problem_once(
                    f"{self.layout.describe()}: {wild_name(name)} is a scalar, which FSDP2 cannot hold: use "
                    "dp_shard_size=1 and dp_replicate_size=1"
                )
            if shard > 1 and parameter.ndim:
                cuts.append(Cut("dp_shard", 0, shard))
            result.append(
                ParameterPlan(
                    name=name,
                    shape=tuple(parameter.shape),
                    dtype=parameter.dtype,
                    cuts=tuple(cuts),
                    partial=partial,
                    tied_to=None if owner == name else owner,
                )
            )
        return result

    def _problem_once(self, problem: str) -> None:
        if problem not in self.problems:
            self.problems.append(problem)
