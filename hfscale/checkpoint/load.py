"""Load a Hugging Face checkpoint so that each rank reads only its own bytes.

Data flow: transformers' ``from_pretrained`` builds the stock model on the meta device; before it reads weights, the
model gets its local shapes (tensor shards, then data shards) and transformers gets a state dict of lazy tensors that
read only this rank's shard. Renaming, dtype rules, tying and quantizers of transformers then work unchanged. The same
holds for parameters that transformers merges from several stored tensors (for example, one per expert). Parameters
whose values transformers rearranges in other ways are read in full and sharded afterwards.
"""

import logging
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .._compat.transformers.added_layers import added_layers, stored_names
from .._compat.transformers.classes import empty_copy, stock_class
from .._compat.transformers.loading import FILE, from_no_path, loading_through
from .._compat.transformers.stored import Destination, checkpoint_targets
from ..distributed.files.reader import (
    ResizedOnDisk,
    ShareOnDisk,
    TensorOnDisk,
    is_elsewhere,
    named_files,
)
from ..distributed.files.replace import finish_move
from ..distributed.files.sources import Source, find_source, refuse_foreign
from ..distributed.files.weight_files import TORCH_INDEX, open_tensors
from ..distributed.mesh import Mesh
from ..errors import CheckpointError
from ..parallel.tensor.part import cut_parameters
from ..plan import Plan
from ..train.runtime import runtime_of
from ..train.runtime.parameter_names import put_parameter
from ..train.runtime.shards import LocalWeights, local_tensor
from ..train.runtime.writing import all_or_none
from .coverage import check_coverage, names_besides, note_carried
from .overwrites import find_overwrites, initialize_around
from .stored_forms.scheme import StoredForm, form_in

if TYPE_CHECKING:  # needed only for quantized weights
    from ..features.quantization.arrival import QuantizedOnDisk, Quantizing

_log = logging.getLogger(__name__)


class _Loader:
    def __init__(
        self,
        plan: Plan,
        mesh: Mesh,
        directory: Path,
        resized: Collection[str],
        form: StoredForm | None,
        source: Source | None,
        like: Any,
    ) -> None:
        self.directory = directory
        self.like = like
        self.source = source
        self.plan = plan
        self.mesh = mesh
        self.resized = resized
        self.form = form
        self.held = plan.local_names(mesh.pp_rank)  # owned parameter -> its name on this rank
        self.converted: set[str] = set()
        self.meta: dict[str, nn.Parameter] = {}
        self.stored: set[str] = set()  # parameters and buffers in the checkpoint
        self.overwritten: set[str] = set()
        self.quantizing: Quantizing | None = None
        self.renamed: dict[str, str] = {}  # name in the model -> in the checkpoint
        self.rows: dict[str, Any] = {}  # weights that an extension's quantization keeps

    def prepare(
        self, model: Any, weight_mapping: list[Any], files: list[str], quantizer: Any
    ) -> dict[str, Any]:
        """Give the meta model local shapes; return the checkpoint as this rank's lazy tensors."""
        stored = self._opened(files, model)
        quantized: dict[str, QuantizedOnDisk] = {}
        if quantizer is not None:
            from ..features.quantization.arrival import Quantizing, split_quantized

            stored, quantized = split_quantized(stored)
        stored = self._with_added_layers(model, stored)
        targets = checkpoint_targets(model, list(stored), weight_mapping)
        if self.form is not None or self.source is not None:
            from .stored_forms.forms import load_weights_as

            types = {name: tensor.dtype for name, tensor in model.state_dict().items()}
            load_weights_as(stored, targets, types)
        for key in stored.keys() & targets.keys():
            if targets[key].name in self.resized:
                stored[key] = ResizedOnDisk(
                    stored[key], self.plan.by_name[targets[key].name].shape[0]
                )
        self.stored = {
            name for target in targets.values() for name in (target.name, *target.others)
        }
        first = self.mesh.is_first
        check_coverage(self.plan, list(stored), self.stored, str(self.directory), tells=first)
        self._note_others(model, targets)
        self._keep(model, stored, targets)
        keep_own_stages(model, self.plan, self.mesh)
        if quantizer is not None:
            self.quantizing = Quantizing(model, self.plan, self.mesh, quantizer)
        parts = self._merged(stored, targets)
        made = {
            n: d.name in parts for d in targets.values() if d.converter for n in (d.name, *d.others)
        }
        self.converted = {name for name, by_parts in made.items() if not by_parts}
        self._give_local_shapes(model)
        shown = self._shown_quantized(quantized, targets)
        for pieces in parts.values():
            shown.update(pieces)
        remaining = {
            key: t
            for key, t in stored.items()
            if targets[key].name not in parts and key not in quantized
        }
        return {**shown, **self._shown_one_by_one(remaining, targets)}

    def _opened(self, files: list[str], model: Any) -> dict[str, TensorOnDisk]:
        """Open the files that transformers found, or another trainer's checkpoint (``self.source``); quantized weights
        become lazy plain tensors.
        """
        if self.source is None:
            self.directory = Path(files[0]).parent  # in the Hub's cache
        stored = open_tensors(files) if self.source is None else self.source.open(model)
        if self.form is None:
            return stored
        from .stored_forms.forms import as_plain

        return as_plain(stored, self.form)

    def _shown_quantized(
        self, quantized: "dict[str, QuantizedOnDisk]", targets: dict[str, Destination]
    ) -> dict[str, Any]:
        """Register this rank's weights that are stored in 4 bits, so that they are read when transformers asks for
        them. Return an empty tensor in place of each of these weights, by key.
        """
        if self.quantizing is None:
            return {}
        here = [key for key in quantized if targets[key].name in self.quantizing.weights]
        for key in here:
            self.quantizing.read_quantized(
                targets[key].name, quantized[key], targets[key].converter is not None
            )
        self.quantizing.shape(self.converted)
        return {key: torch.empty(0) for key in here}

    def _with_added_layers(
        self, model: Any, stored: dict[str, TensorOnDisk]
    ) -> dict[str, TensorOnDisk]:
        """Add to ``model`` the layers that only the planned model (``self.like``) has. Return the stored tensors,
        renamed to the names that they have in these layers.
        """
        added = added_layers(self.like)
        if added is None:
            return stored
        added.add(model)
        names = stored_names(model).read(model, stored)
        self.renamed = {name: key for key, name in names.items() if name is not None}
        if not self.renamed:
            _log.warning(
                "the checkpoint has no weights of the model's %s, so these begin with random weights: train them, or "
                "load a checkpoint that has them",
                added.words,
            )
        return {
            name: tensor
            for key, tensor in stored.items()
            if (name := names.get(key, key)) is not None
        }

    def _note_others(self, model: Any, targets: dict[str, Destination]) -> None:
        """Record on a full model the stored keys that match none of its parameters or buffers."""
        read = {self.renamed.get(key, key): target.name for key, target in targets.items()}
        note_carried(model, self.directory, names_besides(model, read))

    def _keep(self, *found: Any) -> None:
        """Keep weights in the form in which the checkpoint stores them, if an extension's quantization planned that."""
        kept: Any = self.plan.quantized
        if kept is not None and not kept.by_bitsandbytes:
            self.plan, self.rows = kept.keep(self.plan, self.mesh, *found)

    def _give_local_shapes(self, model: Any) -> None:
        """Give the meta model's parameters this rank's shapes; parameters that are converted in full stay full."""
        whole = {
            name: p
            for name, p in model.named_parameters(remove_duplicate=False)
            if name in self.converted
        }
        cut_parameters(model, self.plan, self.mesh)
        self.meta = dict(model.named_parameters(remove_duplicate=False))
        for planned in self.plan.parameters:
            if planned.name not in self.meta:
                continue
            parameter = self.meta[planned.name]
            # transformers ties only after loading, and cannot tie to a parameter of another stage (a decoder's
            # embedding and head are tied to the encoder's embedding).
            self.meta[planned.name] = self.meta[self.held[planned.first_name]]
            shape = planned.local_shape(self.mesh.ranks)
            if planned.name in self.converted:
                put_parameter(model, planned.name, whole[planned.name])
            elif tuple(parameter.shape) != shape:
                empty = nn.Parameter(
                    parameter.new_empty(shape), requires_grad=parameter.requires_grad
                )
                put_parameter(model, planned.name, empty)
        for name, row in self.rows.items():
            empty_row = torch.empty(row.shape, dtype=torch.uint8, device="meta")
            put_parameter(model, name, nn.Parameter(empty_row, requires_grad=False))

    def _shown_one_by_one(
        self, stored: dict[str, TensorOnDisk], targets: dict[str, Destination]
    ) -> dict[str, Any]:
        """Return this rank's shard of each stored tensor that becomes one parameter; return other tensors unchanged."""
        shown: dict[str, Any] = {}
        read_from: dict[str, str] = {}  # owned parameter -> the stored key from which it is read
        for key, tensor in stored.items():
            target = targets[key].name
            planned_target = self.plan.by_name.get(target)
            here = self.name_here(target)
            if here is None or (
                planned_target is None and is_elsewhere(self.plan, self.mesh.pp_rank, target)
            ):
                continue  # on another stage
            if target in self.rows:
                shown[key] = self.rows[target]
                continue
            if planned_target is None or targets[key].converter:
                shown[key] = tensor
                continue
            if tensor.shape != planned_target.shape:
                raise CheckpointError(
                    f"the checkpoint's {key} has the shape {tensor.shape}, but the model's {planned_target.name} has "
                    f"the shape {planned_target.shape}: load the checkpoint with the config it was saved with"
                )
            share = ShareOnDisk(tensor, planned_target.cuts, self.mesh.ranks)
            first = read_from.setdefault(planned_target.first_name, key)
            # A tied tensor is stored under several names; if the stored values differed, transformers would untie them.
            if first != key:
                if not torch.equal(
                    share[...],
                    ShareOnDisk(stored[first], planned_target.cuts, self.mesh.ranks)[...],
                ):
                    raise CheckpointError(
                        f"the config ties {first} and {key}, but they differ in the checkpoint: set "
                        "tie_word_embeddings=false in its config.json, or save the checkpoint again with only one of "
                        "these two tensors"
                    )
                continue
            # A tied tensor may have another name on this stage than in the checkpoint.
            shown[key if here == target else here] = share
        return shown

    def _merged(
        self, stored: dict[str, TensorOnDisk], targets: dict[str, Destination]
    ) -> dict[str, dict[str, Any]]:
        """Map each of this rank's parameters that transformers merges from stored tensors to the slices of these
        tensors.
        """
        if not any(target.converter for target in targets.values()):
            return {}
        from .merged import merged_parameters, parts_of_share

        return {
            name: {name: self.rows[name]}
            if name in self.rows
            else parts_of_share(self.plan.by_name[name], sources, stored, self.mesh.ranks)
            for name, sources in merged_parameters(targets).items()
            if self.held.get(name) == name
        }

    def name_here(self, name: str) -> str | None:
        """Return the name under which this rank's model holds a parameter, or ``None`` if the parameter is on another
        pipeline stage. Return names that are not in the plan unchanged.
        """
        if name in self.meta or name not in self.plan.by_name:
            return name
        return self.held.get(self.plan.by_name[name].first_name)

    def initialize(self, model: Any) -> None:
        """Run transformers' initialization for buffers only; missing parameters are later initialized with hfscale's
        seeds.
        """
        shapes = {planned.name: planned.shape for planned in self.plan.parameters}
        self.overwritten = initialize_around(model, shapes)

    def overwrite(self, model: Any, shares: LocalWeights) -> None:
        """Write into the shards the entries that transformers' initialization would overwrite in full parameters."""
        # If a parameter is tied to another stage's parameter, only that stage detects overwrites, so stages always
        # check.
        if not self.overwritten and self.plan.stages is None:
            return
        for name, overwrite in find_overwrites(empty_copy(model), self.stored).items():
            planned = self.plan.by_name[self.plan.by_name[name].first_name]
            # transformers never initializes quantized modules
            if planned.name in shares.tensors and planned.name not in self.plan.quantized_weights:
                overwrite.apply(shares.tensors[planned.name], planned, self.mesh.ranks)

    def shares(self, model: Any) -> LocalWeights:
        """Return the loaded weights as this rank's final shards, and put the model's meta parameters back in place of
        them.
        """
        loaded = dict(model.named_parameters(remove_duplicate=False))
        shares = LocalWeights(plan=self.plan)
        if self.quantizing is not None:
            self.quantizing.collect(shares)
        for planned in self.plan.owned():
            if planned.name not in self.held or planned.name in shares.tensors:
                continue
            tensor = loaded[self.held[planned.name]].detach()
            if planned.name in self.converted:
                tensor = planned.take(tensor, self.mesh.ranks).clone()
            shares.tensors[planned.name] = tensor.to(self.mesh.device)
        for name, parameter in self.meta.items():
            # transformers may have changed a parameter's dtype or requires_grad while loading.
            owner = self.plan.by_name[name].first_name
            if owner in self.plan.quantized_weights:
                continue
            parameter.requires_grad_(loaded[self.held[owner]].requires_grad)
            if parameter.dtype != shares.tensors[owner].dtype:
                parameter.data = parameter.data.to(shares.tensors[owner].dtype)
            put_parameter(model, name, parameter)
        for name, row in self.rows.items():
            row.hold(model, name)
        return shares


def keep_own_stages(model: nn.Module, plan: Plan, mesh: Mesh) -> None:
    """Replace the modules that no stage of this rank holds by placeholders."""
    if plan.stages is not None:
        from ..parallel.pipeline.placeholders import drop_other_stages

        drop_other_stages(model, plan, mesh.pp_rank)


def load_pretrained(
    auto_class: Any,
    path: str,
    like: Any,
    plan: Plan,
    mesh: Mesh,
    kwargs: dict[str, Any],
    resized: Collection[str] = (),
    form: StoredForm | None = None,
) -> tuple[Any, LocalWeights, set[str]]:
    """Run transformers' ``from_pretrained`` such that each rank reads only its shards.

    Args:
        like: a model of the same class and config, in any layout.
        resized: parameters that may have another number of rows in the checkpoint.
        form: the quantization format of weights in the checkpoint that are dequantized when they are loaded.

    Returns:
        the model, whose parameters are on the meta device with the shapes of their tensor-parallel shards, and whose
        buffers are real; this rank's final shards by name; and the names of the parameters that the checkpoint lacks,
        whose shards are not initialized (a tied parameter under its first name).
    """
    directory = Path(path, kwargs.get("subfolder") or "")
    for index in (*directory.glob("*.safetensors.index*.json"), directory / TORCH_INDEX):
        if index.exists():
            named_files(index)
    kwargs = {**kwargs, **_placed(plan, mesh)}
    file = kwargs.pop(FILE, "")
    source = find_source(directory / file)
    if source is not None:
        first = mesh.is_first
        source = source.fitting(like, tells=first and mesh.layout.total_size > 1)
    if file:
        kwargs["dtype"] = like.dtype
    loader = _Loader(plan, mesh, directory, resized, form, source, like)
    loading = loading_through(
        loader.prepare, loader.name_here, loader.initialize, sourced=loader.source is not None
    )
    with loading as report:
        if loader.source is None:
            model = auto_class.from_pretrained(path, **kwargs)
        else:
            kwargs["config"] = like.config
            model = from_no_path(stock_class(like), directory, kwargs)
    # Remove Accelerate's device map: nothing is dispatched, but Accelerate would treat the model as dispatched.
    if loader.quantizing is None:
        vars(model).pop("hf_device_map", None)
    if report["mismatched"]:
        raise CheckpointError(
            f"tensors of {path} differ from the model's in their shapes: {report['mismatched']}: load the checkpoint "
            "with the config that it was saved with"
        )
    # A tied tensor is present if the checkpoint has it under any of its names on this rank.
    here = [planned for planned in plan.parameters if planned.name in loader.meta]
    present = {planned.first_name for planned in here if planned.name not in report["missing"]}
    shares = loader.shares(model)
    loader.overwrite(model, shares)
    return model, shares, {planned.first_name for planned in here} - present


def _placed(plan: Plan, mesh: Mesh) -> dict[str, Any]:
    """Return a ``device_map`` with this rank's device; an empty dict if the device is the CPU and nothing is quantized,
    because transformers then uses the CPU by default.
    """
    if plan.quantized is None and mesh.device.type == "cpu":
        return {}
    return {"device_map": {"": mesh.device}}


@torch.no_grad()
def load_weights(model: nn.Module, directory: str | Path) -> None:
    """Replace a model's weights, or only its adapter's, by weights from a checkpoint; call this on every rank."""
    from ..features.adapters import by_peft

    runtime = runtime_of(model)
    adapters = runtime.adapters
    with all_or_none(runtime.mesh, f"{directory} could not be loaded"):
        finish_move(directory)
        if adapters is None:  # for adapters, read_saved checks each directory
            refuse_foreign(Path(directory))
        if (by_stock := by_peft.found_around(runtime, model)) is not None:
            by_peft.load(by_stock, str(directory))
            return
        if adapters is not None:
            shares = adapters.read_saved(str(directory), runtime)
        else:
            form = form_in(Path(directory))
            options = {"dtype": runtime.model.dtype}
            # The same model with plain values: its config describes no quantized weights.
            if form is not None:
                options["config"] = runtime.model.config
            _, weights, missing = load_pretrained(
                stock_class(runtime.model),
                str(directory),
                runtime.model,
                runtime.plan,
                runtime.mesh,
                options,
                form=form,
            )
            if missing:
                raise CheckpointError(
                    f"{directory} lacks {len(missing)} of the model's weights, for example {sorted(missing)[0]}, "
                    "because it is of another model: give the checkpoint that belongs to this config"
                )
            shares = weights.tensors
    for planned, parameter in runtime.parameters():
        if planned.name in shares:
            local_tensor(parameter).copy_(shares[planned.name])
