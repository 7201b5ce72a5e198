"""Define where a model's weights come from: a checkpoint, a seed for random weights, or a model in memory.

Each of these sources first provides the full model on the meta device, for the plan. After the mesh is formed, it
provides the model with this rank's local shapes, and this rank's shards.
"""

import copy
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from .._compat.torch import (
    has_accumulation_hook,
    has_backward_hook,
    own_buffers,
    own_parameters,
)
from .._compat.transformers.added_layers import AddedLayers
from .._compat.transformers.classes import built_or_explained, class_name, empty_copy, from_config
from ..checkpoint.load import keep_own_stages, load_pretrained
from ..checkpoint.stored_forms.scheme import StoredForm, split_stored_form
from ..config.options import Options
from ..config.parallel import ParallelConfig
from ..config.schedules import schedule_of
from ..distributed.mesh import Mesh
from ..errors import ConfigError
from ..extensions import provided
from ..features.quantization.plan import plan_quantized
from ..parallel.tensor.part import cut_parameters
from ..plan import Plan
from ..train.runtime.parameter_names import materialize_buffers
from ..train.runtime.shards import LocalWeights
from ..train.runtime.writing import all_or_none, not_finite, warn_of_not_finite
from .arguments import check_tokens, code_arguments, model_arguments
from .build_plan import build_plan

_SAMPLE = 64  # values of a parameter that ranks compare
# Raised by transformers' classes if a field of a config is impossible.
_WRONG_CONFIG = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    KeyError,
    RuntimeError,
    TypeError,
)


@dataclass
class Outline:
    """Describe a stock model by its config and class, and build it on the meta device when it is first needed."""

    config: PreTrainedConfig  # of the stock model
    auto_class: Any  # the Auto class, or model class, that builds it
    kwargs: dict[str, Any]  # further arguments of that class
    # The quantization config, which is the user's or the checkpoint's, or the name of an extension's quantization.
    quantization: Any = None
    stored: bool = False  # whether the checkpoint's quantized weights stay quantized
    # The quantization format of weights in the checkpoint that are dequantized when they are loaded.
    form: StoredForm | None = None
    added: Collection[AddedLayers] = ()  # layers in addition to the stock model's layers

    def __post_init__(self) -> None:
        self.config, form = split_stored_form(self.config)
        self.form = self.form or form

    @cached_property
    def model(self) -> Any:
        """Return the stock model on the meta device."""
        is_auto = hasattr(self.auto_class, "from_config")
        config = copy.deepcopy(self.config)  # transformers writes arguments into it
        with built_or_explained(self.auto_class, config, *_WRONG_CONFIG), torch.device("meta"):
            model = from_config(self.auto_class, config, **model_arguments(self.kwargs, is_auto))
            for added in self.added:
                added.add(model)
        return model

    def resized(self, tokens: int | None) -> tuple["Outline", frozenset[str]]:
        """Return a description of the same model with a vocabulary of ``tokens`` tokens, and the names of the
        parameters with one row per token. For ``None``, return this description and no names.
        """
        if tokens is None:
            return self, frozenset()
        check_tokens(tokens)
        config, names = resize_vocabulary(
            lambda config: replace(self, config=config).model, self.config, tokens
        )
        return replace(self, config=config), names

    def plan(self, layout: ParallelConfig, options: Options) -> Plan:
        """Plan the model under ``layout``, with the features that the ``options`` request."""
        if self.quantization is not None:
            options.check_quantized()
        planned = plan_model(self.model, layout, options)
        if isinstance(self.quantization, str):
            planned = provided("quantizations", self.quantization)(planned, self.model, self.form)
            return planned
        return plan_quantized(planned, self.model, self.quantization, self.stored)


def plan_model(model: nn.Module, layout: ParallelConfig, options: Options) -> Plan:
    """Plan a full stock model on any device; if the schedule is a file, the file assigns stages to ranks."""
    ranks = None
    if layout.pp > 1:
        from ..parallel.pipeline.run import stage_places

        ranks = stage_places(layout)
    planned = build_plan(model, layout, ranks, options)
    if planned.stages is not None:
        schedule_of(layout.pipeline_schedule).check(planned, options)
    return planned


@dataclass
class FromSeed:
    """Draw random weights that are the same for every layout."""

    outline: Outline
    seed: int

    def plan(self, layout: ParallelConfig, options: Options) -> Plan:
        """Plan the model under ``layout``."""
        return self.outline.plan(layout, options)

    def load(self, plan: Plan, mesh: Mesh) -> tuple[Any, LocalWeights]:
        """Return the model on the meta device with local sizes, and this rank's shards of its weights."""
        model = copy.deepcopy(self.outline.model)
        from ..train.runtime.initialize import initialize_local_weights

        keep_own_stages(model, plan, mesh)
        cut_parameters(model, plan, mesh)
        tensors, buffers = initialize_local_weights(
            copy.deepcopy(self.outline.model), plan, mesh, self.seed
        )
        materialize_buffers(model, buffers, mesh.device)
        return model, LocalWeights(tensors)

    def template(self, model: Any) -> Any:
        """Return a copy of the full stock model on the meta device. Only :class:`FromCheckpoint` uses ``model``."""
        return copy.deepcopy(self.outline.model)

    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        """Return no parameters: no optimizer can hold parameters of a model that does not exist yet."""
        return ()


@dataclass
class FromCheckpoint(FromSeed):
    """Read each rank's shards from a Hugging Face checkpoint; parameters that the checkpoint lacks are random."""

    path: str  # a directory or Hub id
    kwargs: dict[str, Any]  # arguments of transformers' ``from_pretrained``
    resized: Collection[str] = ()  # parameters whose number of rows differs from the checkpoint's

    name: str = ""  # the model's origin in saved files, if not the path

    def call(self, name: str) -> None:
        """Set the model's ``name_or_path`` to ``name``, as stock code does for a model that was loaded from
        ``name``.
        """
        self.name = name
        self._name(self.outline.config, self.outline.model)

    def _name(self, *holders: Any) -> None:
        for holder in holders if self.name else ():
            holder.name_or_path = self.name

    def load(self, plan: Plan, mesh: Mesh) -> tuple[Any, LocalWeights]:
        """Return the model on the meta device with local sizes, and this rank's final shards of its weights."""
        with all_or_none(mesh, f"{self.path} could not be loaded"):
            model, weights, missing = load_pretrained(
                self.outline.auto_class,
                self.path,
                self.outline.model,
                plan,
                mesh,
                self.kwargs,
                self.resized,
                self.outline.form,
            )
            warn_of_not_finite(mesh, not_finite(weights.numbers_besides(missing)), self.path)
        self._name(model.config, model)
        if missing:
            from ..train.runtime.initialize import initialize_local_weights

            template = self.template(model)
            fresh, _ = initialize_local_weights(
                template, plan, mesh, self.seed, wanted=lambda name: name in missing
            )
            weights.tensors.update(fresh)
        materialize_buffers(model, {}, mesh.device)
        return model, weights

    def template(self, model: Any) -> Any:
        """Return a copy of the full stock model on the meta device, in the dtype in which ``model`` was loaded."""
        planned = self.outline
        if planned.model.dtype == model.dtype:
            return super().template(model)
        kwargs = {
            "dtype": model.dtype,
            **code_arguments(self.kwargs),
        }  # the checkpoint has already determined the dtype
        return Outline(model.config, planned.auto_class, kwargs, added=planned.added).model


@dataclass
class InMemory:
    """Shard, in place, a full model that is in memory with the same values on every rank."""

    model: nn.Module

    def plan(self, layout: ParallelConfig, options: Options) -> Plan:
        """Plan the model under ``layout``."""
        return plan_model(self.model, layout, options)

    def load(self, plan: Plan, mesh: Mesh) -> tuple[Any, None]:
        """Return the model with this rank's sizes and weights."""
        model = self.model
        _refuse_different(model, mesh)
        _refuse_hooks(model, mesh)
        modules = list(model.modules())
        keep_own_stages(model, plan, mesh)
        _give_up_memory(modules, kept=model)
        cut_parameters(model, plan, mesh)
        model.to(mesh.device)
        return model, None

    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        """Return the model's parameters before they are sharded, with a tied parameter under each of its names."""
        return self.model.named_parameters(remove_duplicate=False)


class Adapted(InMemory):
    """Hold a model in one process to which PEFT's own functions have added adapters. Plan it without them."""

    def plan(self, layout: ParallelConfig, options: Options) -> Plan:
        """Plan the model without its adapters."""
        return plan_model(empty_copy(self.model), layout, options)


Source = FromSeed | InMemory


def _refuse_different(model: nn.Module, mesh: Mesh) -> None:
    """Raise :class:`ConfigError` if ranks have different values of a parameter, judged by the sum of its first 64
    values; collective.
    """
    named = model.named_parameters() if mesh.control is not None else ()
    sums = {
        name: str(float(parameter.detach().reshape(-1)[:_SAMPLE].double().sum()))
        for name, parameter in named
    }
    for other in mesh.all_gather_object(sums):
        if other != sums:
            name = next((name for name in sums if sums[name] != other.get(name)), "a parameter")
            raise ConfigError(
                f"{name} must have the same values on every rank, because parallelize gives each rank a shard of one "
                "model, but the values differ: load the model from one checkpoint on every rank, set the same seed "
                "first (torch.manual_seed), or use hfscale.from_config"
            )


def _refuse_hooks(model: nn.Module, mesh: Mesh) -> None:
    """Raise :class:`ConfigError` for hooks on parameters: parameters are replaced, so hooks would not run;
    collective.
    """
    hooked = ""
    if mesh.layout.total_size > 1:
        named = model.named_parameters()
        hooked_names = (
            n for n, module in named if has_backward_hook(module) or has_accumulation_hook(module)
        )
        hooked = next(hooked_names, "")
    for name in filter(None, mesh.all_gather_object(hooked)):
        raise ConfigError(
            f"parameters must have no hooks before parallelize shards them over {mesh.layout.describe()}, got one on "
            f"{name}: register it after parallelize, which creates new parameters"
        )


def _give_up_memory(modules: Iterable[nn.Module], kept: nn.Module) -> None:
    """Free the tensors of all ``modules`` that are not inside ``kept``. The modules themselves stay, because
    placeholders of layers on other pipeline stages still read their attributes.
    """
    staying = set(kept.modules())
    for module in modules:
        if module in staying:
            continue
        for name, parameter in own_parameters(module).items():
            if (
                parameter is not None
            ):  # do not free in place, because another module may keep a tied tensor
                own_parameters(module)[name] = nn.Parameter(
                    parameter.detach().to("meta"), parameter.requires_grad
                )
        for name, buffer in own_buffers(module).items():
            own_buffers(module)[name] = None if buffer is None else buffer.to("meta")


def resize_vocabulary(
    build: Callable[[PreTrainedConfig], Any], config: PreTrainedConfig, tokens: int
) -> tuple[PreTrainedConfig, frozenset[str]]:
    """Return the config of a model resized to ``tokens`` tokens, and the names of the parameters with one row per
    token. These are found by transformers' own resizing of a meta model that ``build`` creates from a copy of a config.
    Raise :class:`ConfigError` if resizing changes anything but the number of rows of these parameters.
    """
    before = build(config)
    shapes = _shapes(before)
    before.resize_token_embeddings(tokens, mean_resizing=False)
    after = build(before.config)
    wanted = _shapes(before)
    changed = {name for name, shape in wanted.items() if shape != shapes[name]}
    fits = all(wanted[name] == (tokens, *shapes[name][1:]) for name in changed)
    if (
        not fits
        or _shapes(after) != wanted
        or changed - dict(after.named_parameters(remove_duplicate=False)).keys()
    ):
        raise ConfigError(
            f"resize_token_embeddings={tokens} cannot resize {class_name(before)}, because more than the number of "
            f"rows depends on the number of tokens in {', '.join(sorted(changed))}: resize the model with stock "
            "transformers (model.resize_token_embeddings(...); model.save_pretrained(directory)), and load the saved "
            "directory"
        )
    return before.config, frozenset(changed)


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers())
    return {name: tuple(tensor.shape) for name, tensor in named}
