"""Train prompts over ranks: virtual tokens before every row (prompt tuning, Lester et al. 2021; p-tuning, Liu et al.
2021), and virtual keys and values before the keys and values of every layer (prefix tuning, Li and Liang 2021).

PEFT computes a prompt of ``k`` tokens by a small encoder outside the stock model. Over ranks, the encoder is a child of
the model, under the name that the encoder has in PEFT's model, and is replicated on every rank that computes with it::

    tokens    ids [b, s] -> ids [b, k + s], v to v + k - 1 in front --each rank's tokens--> lookup, or the prompt's rows
    prefixes  encoder -> [b, k, layers, 2, heads, d] --heads of this rank, layers of this stage--> cache

Ids from ``v``, the size of the vocabulary, stand for a prompt's tokens. So a batch is as long as its hidden states, and
is sharded like a batch without a prompt. The prompt's rows are inserted after embeddings are summed over tensor ranks,
so every tensor rank has the prompt's full gradient. For prefixes, each tensor rank computes only the gradient from its
own heads, and each stage only the gradient from its own layers, so these gradients are summed over ranks.
"""

import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..._compat.peft import PREFIX, PROMPT, PROMPT_ENCODER, is_prefix
from ..._compat.replaced import attribute_replaced
from ..._compat.torch import own_modules
from ..._compat.transformers.classes import class_name
from ...config.parallel import UNCUT_SEQUENCES
from ...distributed.mesh import Mesh
from ...errors import ConfigError
from ...plan import AdapterParameter, Plan
from ...plan.cut import Cut
from ...plan.feature_plans import recomputed
from ...train.runtime import Batch, Runtime
from ...train.runtime.batches import in_prepared_pass
from ...train.runtime.parameter_names import module_at, put_buffer
from ...train.runtime.shards import gather_full
from .adapter_structure import quietly
from .plan import prompt_of

_REFUSED = ("position_ids", "token_type_ids", "shift_labels")
_FILLERS = {"labels": -100, "attention_mask": 1}
"""Fields that a prompt makes longer, in addition to the ids, and their values at the prompt's tokens."""


def parameters_in_front(whole: Any, plan: Plan) -> list[AdapterParameter]:
    """Return the parameters of the prompt encoders of PEFT's model ``whole``. Raise :class:`ConfigError` if the model
    or the options do not support the prompt.
    """
    layout = plan.layout
    name = whole.active_adapter
    config = whole.peft_config[name]
    kept_in = PREFIX if is_prefix(config) else PROMPT
    asked = f"{type(config).__name__} over {layout.describe()}"
    if plan.lookup is None or plan.head is None or plan.loss is None or plan.no_step:
        raise ConfigError(
            f"{asked} needs a causal language model that reads tokens, got {class_name(whole.get_base_model())}: use "
            "LoRA, or one process"
        )
    if kept_in == PREFIX and layout.cuts_sequences:
        raise ConfigError(
            f"{asked} cannot be used, because the attention of context ranks reads keys by their positions in the "
            f"sequence, and the keys of a prefix have none: use PromptTuningConfig, or {UNCUT_SEQUENCES}"
        )
    check_prefix(config, plan)
    return [
        AdapterParameter(
            name=f"{PROMPT_ENCODER}.{path}",
            shape=tuple(parameter.shape),
            dtype=parameter.dtype,
            base=f"{plan.lookup}.weight",
            kept_in=kept_in,
            adapter=name,
        )
        for path, parameter in whole.prompt_encoder.named_parameters()
    ]


def check_prefix(config: Any, plan: Plan) -> None:
    """Raise :class:`ConfigError` for a prefix in a model that recomputes layers, in any layout."""
    planned = recomputed(plan)
    if config.is_prompt_learning and is_prefix(config) and (planned.layers or planned.modules):
        raise ConfigError(
            f"{type(config).__name__} must be read once in each pass, but recomputation would add the prefix's "
            "keys twice: leave recompute out"
        )


def around_local(model: nn.Module, whole: Any, name: str, held: Sequence[AdapterParameter]) -> Any:
    """Return PEFT's model around a rank's ``model``. If ``held``, the encoder's parameters on this rank, is not empty,
    the encoder becomes a child of ``model``.
    """
    config = copy.copy(whole.peft_config[name])
    # Values are loaded later; this rank may not have the embedding rows from which PEFT would initialize the prompt.
    if hasattr(config, "prompt_tuning_init"):
        config.prompt_tuning_init = "RANDOM"
    local = quietly(model, config, name)
    if held:
        setattr(model, PROMPT_ENCODER, local.prompt_encoder)
    else:
        local.prompt_encoder = nn.ModuleDict()
    return local


def first_prompt(
    model: nn.Module,
    whole: Any,
    name: str,
    plan: Plan,
    mesh: Mesh,
    shares: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Return this rank's shards of a new encoder's parameters, by name, initialized by PEFT. Collective over the ranks
    that hold the token embedding.
    """
    config = whole.peft_config[name]
    given: list[Any] = [config]
    if hasattr(config, "prompt_tuning_init"):
        lookup = str(plan.lookup)
        base = plan.by_name[f"{lookup}.weight"]
        # On a stage without the token embedding the table has no values; another stage then holds the prompt.
        table = copy.deepcopy(whole.get_base_model().get_submodule(lookup))
        starts_as_rows = config.prompt_tuning_init != "RANDOM"
        if starts_as_rows and plan.is_local(mesh.pp_rank, base.name):
            share = shares[base.first_name].contiguous()
            rows = gather_full(share, base.shape, base.cuts, mesh).cpu()
            table.weight = nn.Parameter(rows, requires_grad=False)
            # Some families scale rows inside of this module, by a buffer that no checkpoint holds.
            for key, buffer in module_at(model, lookup).named_buffers():
                put_buffer(table, key, buffer.cpu())
        given.append(table)
    drawn = _encoder_class(config)(*given)
    values = {f"{PROMPT_ENCODER}.{name}.{path}": value for path, value in drawn.named_parameters()}
    return {
        key: plan.by_name[key].take(value.detach(), mesh.ranks).clone().to(mesh.device)
        for key, value in values.items()
        if plan.is_local(mesh.pp_rank, key)
    }


def is_computed(whole: Any, name: str) -> bool:
    """Return whether an encoder computes its prompt from further parameters. PEFT saves only the computed prompt, from
    which these parameters cannot be restored.
    """
    return (
        PROMPT_ENCODER in own_modules(whole)
        and len(list(whole.prompt_encoder[name].parameters())) > 1
    )


def prompt_keys(whole: Any, name: str) -> dict[str, str]:
    """Map keys of a saved prompt to names in the plan. For an encoder that computes its prompt, the keys are the names
    in the plan.
    """
    paths = [path for path, _ in whole.prompt_encoder[name].named_parameters()]
    names = [f"{PROMPT_ENCODER}.{name}.{path}" for path in paths]
    return dict(
        zip(names if is_computed(whole, name) else ["prompt_embeddings"], names, strict=True)
    )


def written_by_peft(config: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors that PEFT saves, from the full ``tensors`` by names in a plan: for an encoder that computes
    its prompt, the computed prompt; otherwise ``tensors`` unchanged.
    """
    prefix = f"{PROMPT_ENCODER}."
    if not any(key.startswith(prefix) for key in tensors):
        return dict(tensors)
    # In training mode, PEFT builds the full encoder; a saved config is in inference mode.
    with attribute_replaced(config, "inference_mode", False):
        encoder = _encoder_class(config)(config)
    own = {key.removeprefix(prefix).partition(".")[2]: held for key, held in tensors.items()}
    encoder.to(next(iter(own.values())).dtype).load_state_dict(own)
    with torch.no_grad():
        return {"prompt_embeddings": encoder(torch.arange(config.num_virtual_tokens)).contiguous()}


def _encoder_class(config: Any) -> Any:
    from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING

    return PEFT_TYPE_TO_TUNER_MAPPING[config.peft_type]


@dataclass(frozen=True)
class Prompt:
    """Add a model's prompt to batches, and remove it."""

    plan: Plan
    peft_model: Any

    @property
    def tokens(self) -> int:
        """How many prompt tokens the model inserts before each row; 0 for prefixes, and while the prompt is off."""
        if prompt_of(self.plan) != PROMPT or not self.peft_model.has_active_enabled_adapter:
            return 0
        return int(self.peft_model.active_peft_config.num_virtual_tokens)

    def in_front(self, batch: Batch) -> Batch:
        """Return a batch with the prompt's ids before every row. The attention mask includes them; their labels are
        ignored. The batch stays unchanged for prefixes, and while the prompt is off.

        Raises:
            ConfigError: the batch has no ``input_ids``, or has positions, token types, shifted labels or a 4-dim mask.
        """
        if not self.peft_model.has_active_enabled_adapter:  # inside of ``disable_adapter()``
            return batch
        ids = batch.get("input_ids")
        mask = batch.get("attention_mask")
        strange = [name for name in _REFUSED if batch.get(name) is not None]
        if mask is not None and mask.ndim != 2:
            strange.append("attention_mask [b, heads, s, s]")
        if ids is None or strange:
            raise ConfigError(
                "a batch for a model with a prompt must have only input_ids, labels and attention_mask [batch, "
                f"sequence], got {', '.join(strange or batch)}: leave other fields out, and do not pack several "
                "documents into one row"
            )
        count = self.tokens
        if not count or self.plan.lookup_shape is None:
            return batch
        known = self.plan.lookup_shape[0]
        virtual = torch.arange(known, known + count, device=ids.device, dtype=ids.dtype)
        # Ids outside of the vocabulary must not become ids of the prompt.
        shown = torch.where(ids >= known, ids + count, ids)
        longer = {**batch, "input_ids": torch.cat((virtual.expand(len(ids), count), shown), 1)}
        for name, filler in _FILLERS.items():
            if (given := batch.get(name)) is not None:
                longer[name] = F.pad(given, (count, 0), value=filler)
        return longer

    def without(self, batch: Batch) -> Batch:
        """Return a batch without the prompt's tokens before its rows: the inverse of :meth:`in_front`."""
        count = self.tokens
        if not count or self.plan.lookup_shape is None:
            return batch
        own = {
            name: batch[name][:, count:]
            for name in ("input_ids", *_FILLERS)
            if batch.get(name) is not None
        }
        ids = own["input_ids"]
        known = self.plan.lookup_shape[0]
        return {**batch, **own, "input_ids": torch.where(ids >= known, ids - count, ids)}


def install_prompts(runtime: Runtime, peft_model: Any) -> None:
    """Make the model's forward pass insert the prompt, and make PEFT's wrapping model call the model directly."""
    model = runtime.model
    plan = runtime.plan
    kind = prompt_of(plan)
    if kind is None:
        return
    forward = model.forward
    names = list(inspect.signature(forward).parameters)
    put = _prefix(runtime, peft_model) if kind == PREFIX else _tokens(runtime, peft_model)
    prompt = Prompt(plan, peft_model)
    runtime.prompt = prompt

    @functools.wraps(forward)
    def behind(*args: Any, **kwargs: Any) -> Any:
        given: Batch = {**dict(zip(names, args, strict=False)), **kwargs}
        if not peft_model.has_active_enabled_adapter:
            return forward(**given)
        if not in_prepared_pass.get():
            given = prompt.in_front(given)
        return forward(**put(dict(given)))

    def refuse(*_: Any, **__: Any) -> None:
        raise ConfigError(
            f"generate with a prompt must run in one process, got {plan.layout.describe()}: save the prompt "
            "(hfscale.save_pretrained), and load it with PEFT"
        )

    def call(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    @contextmanager
    def disable_adapter() -> Iterator[None]:
        with type(peft_model).disable_adapter(peft_model):
            peft_model.forward = call  # PEFT's own forward would bypass the model's hooks
            yield

    model.forward = behind
    model.generate = refuse
    peft_model.forward = call
    peft_model.disable_adapter = disable_adapter


def _tokens(runtime: Runtime, peft_model: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return a function that replaces a pass's ids by embeddings: prompt rows for the prompt's ids, and rows of the
    token embedding for all other ids.
    """
    shape = runtime.plan.lookup_shape
    assert shape is not None
    known = shape[0]

    def embedded(given: dict[str, Any]) -> dict[str, Any]:
        ids = given.pop("input_ids")
        virtual = ids >= known
        found = runtime.model.get_input_embeddings()(ids.masked_fill(virtual, 0))
        if len(peft_model.prompt_encoder):  # a stage with the lookup
            rows = peft_model.get_prompt(batch_size=1)[0].to(found.dtype)
            own = F.embedding((ids - known).clamp(min=0), rows)
            found = torch.where(virtual[..., None], own, found)
        return {**given, "inputs_embeds": found}

    return embedded


def _prefix(runtime: Runtime, peft_model: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return a function that passes the prefix's keys and values, for this rank's heads, as ``past_key_values``."""
    plan = runtime.plan
    config = peft_model.active_peft_config
    shared = max((block.replicas for block in plan.blocks), default=1)
    cut = Cut("tp", 0, plan.layout.tp, replicas=(shared,))

    def of_own_heads(cache: Any) -> Any:
        for layer in cache.layers:
            if layer.keys is not None:  # PEFT skips layers that share the keys of others
                start, stop = cut.spans(layer.keys.shape[1], runtime.mesh.tp_rank)[0]
                layer.keys = layer.keys[:, start:stop]
                layer.values = layer.values[:, start:stop]
        return cache

    def behind(given: dict[str, Any]) -> dict[str, Any]:
        modules = runtime.model.modules()
        if any(getattr(module, "gradient_checkpointing", False) for module in modules):
            raise ConfigError(
                "gradient checkpointing must be off with a prefix, because recomputation would add the prefix's keys "
                "twice: switch gradient checkpointing off"
            )
        given["past_key_values"] = of_own_heads(peft_model.get_prompt(len(given["input_ids"])))
        if given.get("attention_mask") is not None:
            count = int(config.num_virtual_tokens)
            given["attention_mask"] = F.pad(given["attention_mask"], (count, 0), value=1)
        return given

    return behind
