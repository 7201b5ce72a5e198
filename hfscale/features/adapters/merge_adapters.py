"""Merge adapters into the weights that they adapt. Every rank merges its own shards, one module at a time."""

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..._compat.peft import BEFT_BIAS, COPIES, COPY, IN_FRONT, PROMPT_ENCODER, TOKEN_ROWS, wrapped
from ..._compat.torch import own_modules, own_parameters
from ..._compat.transformers.loading import forget_quantization
from ...distributed.mesh import Mesh
from ...distributed.ops.quantized_weights import encodings_of
from ...errors import ConfigError
from ...models.module_kinds import follow_weight
from ...plan import AdapterParameter, ParameterPlan, Plan
from ...train.runtime import Runtime
from ...train.runtime.parameter_names import owner_of, parameter_at, put_parameter, unwrapped
from ...train.runtime.shards import gather_full, local_tensor
from ...train.runtime.writing import all_or_none
from ..quantization.quantized_modules import dequantized
from .adapter_edges import sum_norms
from .adapter_structure import give_back_methods, inject_alone
from .token_rows import places_in, with_rows
from .whole_projections import gathered, whole_paths


def refuse_tied(adapters: Any, plan: Plan, kinds: Collection[str] | None = None) -> None:
    """Raise :class:`ConfigError`, naming the adapter, if a weight to merge into is tied to a weight without the
    adapter, or if an adapter of a bias has no bias to which it can be added. ``kinds`` are the attributes of wrappers
    whose adapters are merged (``None``: all attributes).
    """
    stock: Plan = adapters.stock_plan
    names: dict[str, set[str]] = {}
    for planned in stock.parameters:
        names.setdefault(planned.first_name, set()).add(planned.name)
    for adapter in plan.adapters:
        same = names[stock.by_name[adapter.base].first_name]
        alike = {a.base for a in plan.adapters if adapter.name in (a.name, a.tied_to)}
        merged = kinds is None or adapter.kept_in in kinds
        bias = f"{adapter.module}.bias"
        if merged and adapter.kept_in in IN_FRONT:
            raise ConfigError(
                f"{adapter.name} must be an adapter of weights to be merged, got a prompt, whose virtual tokens "
                "precede the text: write it with hfscale.save_pretrained"
            )
        if merged and adapter.kept_in == BEFT_BIAS and bias not in stock.by_name:
            raise ConfigError(
                f"{adapter.name} can be merged only into a bias, but {adapter.base} belongs to a module without one: "
                "save the adapter without merging, with hfscale.save_pretrained"
            )
        if merged and adapter.tied_to is None and not same <= alike:
            raise ConfigError(
                f"{adapter.name} cannot be merged: {' and '.join(sorted(same))} are tied to one weight, so merging the "
                f"adapter of {adapter.base} would change all of them: save the adapter without merging "
                "(hfscale.save_pretrained), adapt modules of the layers instead, or train the tied weight itself "
                "(ensure_weight_tying=True, with modules_to_save or trainable_token_indices)"
            )


def refuse_not_finite(runtime: Runtime) -> None:
    """Raise :class:`ConfigError` on every rank, naming the tensor, if a factor, or a weight to merge into, holds NaN or
    infinity on any rank; collective.
    """
    plan = runtime.plan
    bad = list[str]()
    wanted = {name for adapter in plan.adapters for name in (adapter.first_name, adapter.base)}
    for planned, parameter in runtime.parameters():
        local = local_tensor(parameter.detach())
        if (
            planned.name in wanted
            and local.is_floating_point()
            and not bool(local.isfinite().all())
        ):
            bad.append(planned.name)
    every = runtime.mesh.all_gather_object(bad)
    if any(every):
        rank = next(rank for rank, names in enumerate(every) if names)
        assert runtime.adapters is not None  # the caller merges adapters
        # The message begins with PEFT's text, which scripts may match.
        raise ConfigError(
            f"NaNs detected in the merged weights. The adapter {runtime.adapters.name} seems to be broken: "
            f"{every[rank][0]} holds NaN or infinity on rank {rank}, so nothing was merged and the model is as it was: "
            "load an earlier state"
        )


def merge_local_weights(
    adapters: Any, runtime: Runtime, shares: dict[str, Tensor], names: Sequence[str]
) -> tuple[nn.Module, dict[str, Tensor]]:
    """Merge the adapters ``names`` into the weights of a model whose sharding is undone (its parameters are local
    shards).

    ``shares`` are this rank's final shards of weights and adapters, and are changed in place. Restore the stock
    modules, and return the stock model, on the meta device, and its shards. If merging fails on one rank, raise
    :class:`CheckpointError` on every rank, and keep the wrappers.
    """
    plan = runtime.plan
    mesh = runtime.mesh
    model = runtime.model
    merge = WholeMerge(adapters, plan, model, mesh, names)
    here = plan.local_names(mesh.pp_rank)
    done = set[str]()
    failure: Exception | None = None
    for name in here:
        if name in done or not merge.changes(name):
            continue
        parts: dict[str, Tensor] = {}
        for part in merge.parts(name):
            planned = plan.by_name[part]
            share = shares[part].contiguous()
            parts[part] = gather_full(
                share, planned.model_shape(mesh.ranks), planned.data_cuts, mesh
            )
        try:
            weights = merge.merged(name, parts)
        except (
            ValueError,
            RuntimeError,
        ) as error:  # continue, because other ranks wait for this rank's shards of other weights
            failure = failure or error
            continue
        for weight, value in weights.items():
            shares[weight] = _cut_over_data(plan.by_name[weight], value, mesh.ranks)
            parameter_at(model, here[weight]).requires_grad_(False)
            done.add(weight)
    with all_or_none(mesh, "adapters could not be merged, and the model is as it was"):
        if failure is not None:
            raise failure
    put_back(model)
    for adapter in plan.adapters:
        shares.pop(adapter.name, None)
    return model, shares


def unload_local_weights(
    adapters: Any, runtime: Runtime, shares: dict[str, Tensor]
) -> tuple[nn.Module, dict[str, Tensor]]:
    """Remove the adapters of a model whose sharding is undone, without merging them, and replace modules by their
    trained copies. Return the same values as :func:`merge_local_weights`.
    """
    plan = runtime.plan
    here = plan.local_names(runtime.mesh.pp_rank)
    for adapter in plan.adapters:
        base = plan.by_name[adapter.base].first_name
        if adapter.kept_in == COPY and base in here and adapter.adapter in adapters.active:
            shares[base] = shares[adapter.first_name]  # sharded like the weight
    put_back(runtime.model)
    for adapter in plan.adapters:
        shares.pop(adapter.name, None)
    return runtime.model, shares


def dequantized_share(model: nn.Module, plan: Plan, name: str) -> Tensor:
    """Return this rank's shard of a quantized weight, gathered over the data axes."""
    share = dequantized(*owner_of(model, name))
    return share.T if plan.quantized is not None and name in plan.quantized.transposed else share


def dequantized_weights(runtime: Runtime, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return this rank's shards of the quantized weights, in ``dtype``; collective over the data ranks."""
    plan = runtime.plan
    mesh = runtime.mesh
    shares: dict[str, Tensor] = {}
    for name in plan.quantized_weights:
        if plan.is_local(mesh.pp_rank, name):
            whole = dequantized_share(runtime.model, plan, name).to(dtype)
            shares[name] = _cut_over_data(plan.by_name[name], whole, mesh.ranks)
    return shares


def put_plain_modules(adapters: Any, runtime: Runtime, shares: dict[str, Tensor]) -> Plan:
    """Replace quantized modules and their wrappers by unquantized modules with the weights in ``shares``; return the
    plan without adapters and quantization.
    """
    model = runtime.model
    mesh = runtime.mesh
    stock = adapters.whole.get_base_model()
    for name, share in shares.items():
        planned = runtime.plan.by_name[name]
        module, attribute = owner_of(model, name)
        empty = torch.empty(planned.model_shape(mesh.ranks), dtype=share.dtype, device="meta")
        if len(planned.shape) > 2:  # quantized experts are still transformers' modules
            encodings_of(module).pop(attribute, None)
        else:
            path = name.rpartition(".")[0]
            bias = own_parameters(module).get("bias")
            owner, _, child = path.rpartition(".")
            own_modules(model.get_submodule(owner))[child] = copy.deepcopy(
                stock.get_submodule(path)
            )
            module, attribute = owner_of(model, name)
            if bias is not None:
                own_parameters(module)["bias"] = bias
        own_parameters(module)[attribute] = nn.Parameter(empty, requires_grad=False)
        follow_weight(module)
    forget_quantization(model)
    plan = adapters.stock_plan
    plain = (
        replace(p, dtype=shares[p.name].dtype) if p.name in shares else p for p in plan.parameters
    )
    return replace(plan, parameters=tuple(plain), quantized=None)


def _cut_over_data(planned: ParameterPlan, local: Tensor, ranks: dict[str, int]) -> Tensor:
    own = planned.take(local, ranks, tuple(cut.axis for cut in planned.data_cuts))
    return own.clone(memory_format=torch.contiguous_format)


def merge_wrapper(wrapper: Any, names: Sequence[str]) -> None:
    """Call PEFT's merge in every wrapper around one module, inner wrappers first."""
    inner = wrapped(wrapper)
    if inner is not None and wrapped(inner) is not None:
        merge_wrapper(inner, names)
    wrapper.merge(safe_merge=True, adapter_names=list(names))


def put_back(model: nn.Module) -> None:
    """Remove PEFT's wrappers, prompt encoder and config from a model; the wrapped modules get their places back."""
    give_back_methods(model)
    own_modules(model).pop(PROMPT_ENCODER, None)
    for module in list(model.modules()):
        for name, child in list(own_modules(module).items()):
            if child is not None and unwrapped(child) is not child:
                own_modules(module)[name] = unwrapped(child)


class WholeMerge:
    """Merge the adapters ``names`` (``None``: the active ones), one module at a time, into full tensors. If ``model``,
    a rank's model, and ``mesh`` are given, merge into this rank's tensors instead, with the wrappers of ``model``.
    Raise :class:`ConfigError` in the same cases as :func:`refuse_tied`.
    """

    def __init__(
        self,
        adapters: Any,
        plan: Plan,
        model: nn.Module | None = None,
        mesh: Mesh | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        if plan.adapters:
            refuse_tied(adapters, plan)
        self._adapters = adapters
        self._names = list(names or (adapters.active if plan.adapters else ()))
        self._plan = plan
        self._model = model
        self._mesh = mesh
        self._group = None if mesh is None else mesh.tp_group
        self._whole = set(whole_paths(plan)) if mesh is not None else set()
        self._ranks = {} if mesh is None else mesh.ranks
        # Owned name (of tied names, the first one) of a weight -> the adapter that trains some token rows of the
        # weight.
        self._rows: dict[str, AdapterParameter] = {}
        # Names of the adapters' own parameters.
        self.factors = {adapter.name for adapter in plan.adapters}
        self._copies: dict[str, str] = {}  # owned name of a weight -> name of its trained copy
        self._around: dict[str, list[AdapterParameter]] = {}  # path of a module -> its adapters
        self._path_of: dict[str, str] = {}  # owned name of a weight -> path of its wrapped module
        self._note(adapter for adapter in plan.adapters if adapter.adapter in self._names)

    def _note(self, adapters: Iterable[AdapterParameter]) -> None:
        plan = self._plan
        for adapter in adapters:
            base = plan.by_name[adapter.base]
            if adapter.kept_in in COPIES:
                self._copies[base.first_name] = adapter.first_name
                continue
            if adapter.kept_in == TOKEN_ROWS:
                self._rows[base.first_name] = adapter
                continue
            path = adapter.module
            self._around.setdefault(path, []).append(adapter)
            for name in (adapter.base, f"{path}.bias"):
                if name in plan.by_name:
                    self._path_of[plan.by_name[name].first_name] = path

    def changes(self, name: str) -> bool:
        """Return whether the weight ``name`` has an adapter."""
        return name in self._copies or name in self._rows or name in self._path_of

    def parts(self, name: str) -> list[str]:
        """Return the names of the tensors that are needed to merge the weight ``name``: its trained copy, or the
        weights of its module, which are merged together, and their adapters' parameters. A tied tensor has its first
        name.
        """
        if name in self._copies:
            return [self._copies[name]]
        if name in self._rows:
            return [name, self._rows[name].first_name]
        if name not in self._path_of:
            return [name]
        path = self._path_of[name]
        bases = [
            base
            for base, where in self._path_of.items()
            if where == path and base not in self._copies
        ]
        return list(
            dict.fromkeys(
                [
                    *bases,
                    *(a.first_name for a in self._around[path]),
                ]
            )
        )

    def without_start(
        self, config: Any, name: str, parts: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return the weights among ``parts`` of the module with the weight ``name``, as they are after PEFT has
        initialized adapters that decompose weights (PiSSA, for example), which subtract the product of their factors
        from the weight.
        """
        path = self._path_of[name]
        module = copy.deepcopy(unwrapped(self._adapters.whole.get_base_model().get_submodule(path)))
        module.to_empty(device="cpu")
        before: dict[str, Tensor] = {}
        for base, where in self._path_of.items():
            if where == path and base in parts:
                kept = parts[base]
                # PEFT's decompositions do not support float64.
                narrow = torch.float32 if kept.dtype == torch.float64 else kept.dtype
                before[base] = kept.to(narrow)
                given = nn.Parameter(before[base].clone(), requires_grad=False)
                put_parameter(module, self._name_inside(base, path), given)
        inject_alone(config, self._adapters.name, module, path, self._around[path])
        left: dict[str, Tensor] = {}
        for base, start in before.items():
            kept = parts[base]
            after = parameter_at(module, self._name_inside(base, path)).detach()
            exact = after.dtype == kept.dtype
            left[base] = after if exact else kept + (after - start).to(kept.dtype)
        return left

    def merged(
        self,
        name: str,
        parts: Mapping[str, Tensor],
    ) -> dict[str, Tensor]:
        """Return the merged weight ``name``, with the other merged weights of its module, from the tensors that
        :meth:`parts` named. A tied weight is returned under its first name.
        """
        if name in self._copies:
            return {name: parts[self._copies[name]]}
        if name in self._rows:
            return {name: self._with_rows(name, parts)}
        if name not in self._path_of:
            return {name: parts[name]}
        path = self._path_of[name]
        model = self._adapters.whole.get_base_model() if self._model is None else self._model
        wrapper: Any = copy.deepcopy(model.get_submodule(path))
        if self._group is not None and any(path in block.row for block in self._plan.blocks):
            sum_norms(wrapper, self._group)
        bases = {
            base: base for base, where in self._path_of.items() if where == path and base in parts
        }
        for base in bases:
            kept = nn.Parameter(self._read(base, path, parts[base]), requires_grad=False)
            put_parameter(wrapper, self._name_inside(base, path), kept)
        for adapter in self._around[path]:
            factor = nn.Parameter(parts[adapter.first_name], requires_grad=False)
            put_parameter(wrapper, adapter.name.removeprefix(f"{path}."), factor)
        merge_wrapper(wrapper, self._names)
        weights = {
            base: parameter_at(wrapper, self._name_inside(base, path)).detach() for base in bases
        }
        return {base: self._own(base, path, value) for base, value in weights.items()}

    def _read(self, base: str, path: str, value: Tensor) -> Tensor:
        """Return a copy of a weight for its wrapper to merge into: the shard, or the full weight if its adapter needs
        it.
        """
        if self._mesh is None or path not in self._whole:
            return value.clone()
        return gathered(self._plan.by_name[base], value, self._mesh).clone()

    def _own(self, base: str, path: str, value: Tensor) -> Tensor:
        """Return this rank's shard of a merged weight over the model-parallel axes, not over the data axes."""
        if path not in self._whole:
            return value
        planned = self._plan.by_name[base]
        return planned.take(value, self._ranks, tuple(cut.axis for cut in planned.model_cuts))

    def _with_rows(self, name: str, parts: Mapping[str, Tensor]) -> Tensor:
        """Return the weight ``name`` with its adapter's token rows in place of its own rows."""
        planned = self._plan.by_name[name]
        held = replace(planned, cuts=()) if self._model is None else planned
        chosen, places = places_in(self._rows[name].tokens, held, self._ranks)
        return with_rows(parts[name], parts[self._rows[name].first_name], chosen, places)

    def _name_inside(self, base: str, path: str) -> str:
        """Return the name of a weight relative to its module; for a tied weight, its name in this module."""
        names = [p.name for p in self._plan.parameters if base in (p.name, p.tied_to)]
        return next(name for name in names if name.startswith(f"{path}.")).removeprefix(f"{path}.")
