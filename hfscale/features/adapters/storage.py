"""Check PEFT's configs, and save and load adapters in its own format: ``adapter_config.json`` and the weights."""

import copy
import dataclasses
import logging
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ..._compat.peft import COPY, OF_WHOLE_PROJECTIONS
from ..._compat.replaced import attribute_replaced
from ..._compat.transformers.stored import AsStored
from ...distributed.files.replace import ADAPTER_CONFIG, finish_move
from ...distributed.mesh import Mesh
from ...errors import CheckpointError, ConfigError
from ...plan import Plan
from ...plan.quantized import QuantizedPlan
from ...train.runtime import Runtime
from ...train.runtime.full_tensors import full_tensors, tensors_to_save
from ...train.runtime.parameter_names import stock_name
from ...train.runtime.writing import (
    Attempt,
    atomic_directory,
    not_finite,
    plainly,
    warn_of_not_finite,
)
from .prompts import is_computed, written_by_peft
from .shared_values import fixed_holders, kept_by_peft, read_fixed

_METHODS = (
    "LORA",
    "IA3",
    "LOHA",
    "HIRA",
    "ROAD",
    "BEFT",
    "LN_TUNING",
    "TRAINABLE_TOKENS",
    *OF_WHOLE_PROJECTIONS,
    "PROMPT_TUNING",
    "P_TUNING",
    "PREFIX_TUNING",
)
_WHY_REFUSED = {
    "its initial values come from a decomposition, or the largest entries, of full weights": (
        "ADAMSS",
        "FROD",
        "OSF",
        "PSOFT",
        "SUPERTUNING",
        "TINYLORA",
    ),
    "its modules share matrices or vectors that are computed from the whole model": (
        "VBLORA",
        "LILY",
    ),
    "its files hold more than its trained parameters": ("DELORA", "GLORA", "SHIRA"),
    "it runs a second model in addition to the layers": ("SHADOW",),
    "its loss needs the full logits, which a training step does not compute": ("CPT",),
    "its prompts are those of the tasks of a batch's rows, which no batch over ranks names": (
        "MULTITASK_PROMPT_TUNING",
    ),
    "it puts attention of its own beside that of layers, which no plan has": ("ADAPTION_PROMPT",),
    "its keys and values start from those of a text, of which ranks hold parts": ("CARTRIDGE",),
}
# Methods that compute with the values of the adapted weight, or were not tested with quantized weights.
_OF_PLAIN_WEIGHTS = ("LOHA", "HIRA", "ROAD", "BEFT", *OF_WHOLE_PROJECTIONS)
# Options of LoRA that raise an error over ranks, and the reason; later variants of PEFT have no reason here.
_LORA_REFUSED = {
    "layer_replication": "it runs layers several times, but a plan contains each layer once",
    "megatron_config": "it replaces projections by another library's",
    "lora_ga_config": "its initial values come from gradients of data, but each rank has only a part of the data",
    "corda_config": "it starts from activations of data, which each rank has a part of",
    "eva_config": "it starts from activations of data, which each rank has a part of",
    "alora_invocation_tokens": (
        "PEFT's model counts where it computes from the end of a call's input_ids, but stages and context ranks have "
        "only parts of them"
    ),
}
_INITS = ("gaussian", "olora", "orthogonal", "loftq")
DECOMPOSING = ("pissa", "olora")
"""Initializations that subtract the factors' product from the weight; PEFT repeats this when it loads the adapter."""
_OTHER_DECOMPOSING = ("corda", "loftq", "lora_ga")
# Initializations that PEFT computes from a module's own weight, or that change this weight.
_OF_MATRICES = (
    "pissa",
    "olora",
    "orthogonal",
    "loftq",
)
_log = logging.getLogger(__name__)
WEIGHTS = "adapter_model.safetensors"
_OLD_WEIGHTS = "adapter_model.bin"
_CARD = "README.md"


@dataclass(frozen=True)
class AdapterFiles:
    """Hold those arguments of PEFT's ``save_pretrained`` that select which files are written."""

    embeddings: bool | str = "auto"  # PEFT's argument save_embedding_layers
    safetensors: bool = True
    card: bool = False  # write PEFT's model card


def weights_file(directory: Path) -> Path:
    """Return the file with an adapter's weights: the safetensors file, or, if it is missing, the file of older PEFT."""
    old = directory / _OLD_WEIGHTS
    return old if old.exists() and not (directory / WEIGHTS).exists() else directory / WEIGHTS


def config_class(method: str) -> tuple[type, dict[str, Any]]:
    """Return PEFT's config class for ``lora``, ``dora``, ``ia3`` or ``loha``, and the fields that select it."""
    import peft

    kinds = {
        "lora": peft.LoraConfig,
        "dora": peft.LoraConfig,
        "ia3": peft.IA3Config,
        "loha": peft.LoHaConfig,
    }
    return kinds[method], {"use_dora": True} if method == "dora" else {}


def read_config(source: Any) -> tuple[Any, str | None]:
    """Return a PEFT config, and the path or Hub id of the saved adapter from which it was read, if any."""
    from peft import PeftConfig

    if isinstance(source, PeftConfig):
        return copy.deepcopy(source), None
    if not isinstance(source, str | os.PathLike):
        raise ConfigError(
            f"peft_config must be a PEFT config or the path of a saved adapter, got a {type(source).__name__}: pass "
            "peft.LoraConfig(...)"
        )
    path = str(source)
    finish_move(path)
    if os.path.isdir(path) and not os.path.isfile(os.path.join(path, ADAPTER_CONFIG)):
        raise ConfigError(
            f"peft_config={path!r} has no {ADAPTER_CONFIG}: give the directory of a saved adapter"
        )
    if not os.path.isdir(path) and (path.count("/") > 1 or path.startswith((".", "/", "~"))):
        raise ConfigError(
            f"peft_config={path!r} does not exist: give the directory of a saved adapter, or a Hub id"
        )
    try:
        config = PeftConfig.from_pretrained(path)
    except (OSError, ValueError, TypeError, KeyError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"peft_config={path!r} cannot be read as a saved adapter: {reason}: give the directory of a saved adapter"
        ) from error
    config.inference_mode = False
    return config, path


def complete_config(given: Any, resolved: Any) -> None:
    """Copy the fields that PEFT has filled in ``resolved`` to ``given``, if the caller passed a config, like PEFT's own
    functions: the modules for 'all-linear' or a family's default, and the base model's name.
    """
    if type(given) is type(resolved):
        vars(given).update(vars(resolved))


def refuse_wrong(config: Any, plan: Plan) -> None:
    """Raise :class:`ConfigError` for initializations that are wrong in every layout: a saved adapter would lose the
    initial values, or PEFT cannot compute them.
    """
    init = getattr(config, "init_lora_weights", True)
    if not isinstance(init, str):
        return
    if init.startswith("pissa_niter"):
        raise ConfigError(
            f"LoraConfig(init_lora_weights={init!r}) uses a random decomposition that is drawn anew when the saved "
            "adapter is loaded, so the base would then differ from the base in training: use 'pissa', whose "
            "decomposition is exact"
        )
    wanted = tuple(f".{target}" for target in getattr(config, "target_parameters", None) or ())
    stacked = [name for name, planned in plan.by_name.items() if len(planned.shape) == 3]
    of_experts = next((name for name in stacked if wanted and f".{name}".endswith(wanted)), None)
    if of_experts is not None and init in _OF_MATRICES:
        raise ConfigError(
            f"LoraConfig(init_lora_weights={init!r}) needs matrices, but target_parameters names {of_experts}, a 3-dim "
            "stack of experts: use True or 'gaussian', or leave the experts out of target_parameters"
        )


def refuse_unfit_files(config: Any, directory: Path) -> None:
    """Raise :class:`ConfigError` for a saved adapter if the file does not contain everything that the adapter has
    changed in the weights.
    """
    if config.is_prompt_learning:
        raise ConfigError(
            f"{directory} must be an adapter of weights, got {type(config).__name__}, which adds virtual tokens or "
            "keys before the text: load it together with its base by PEFT instead"
        )
    if replicated := getattr(config, "layer_replication", None):
        raise ConfigError(
            f"{directory} must be an adapter of its base's own layers, got layer_replication={replicated}, by which "
            "the adapted model has other layers than the base's files: load it together with its base by PEFT instead"
        )
    init = getattr(config, "init_lora_weights", True)
    if isinstance(init, str) and init.startswith(("pissa_niter", *_OTHER_DECOMPOSING)):
        raise ConfigError(
            f"{directory} must contain everything that the adapter changes in the base, got "
            f"init_lora_weights={init!r}, whose initialization also changed the base, by data or random numbers that "
            "no file contains: merge the adapter in the process that trained it, or save it in that process as plain "
            "LoRA (PEFT's path_initial_model_for_weight_conversion)"
        )


def check_config(config: Any) -> None:
    """Raise :class:`ConfigError`, naming the option, if hfscale does not support a config over shards."""
    method = getattr(config.peft_type, "value", config.peft_type)
    if method not in _METHODS:
        reason = next(
            (why for why, methods in _WHY_REFUSED.items() if method in methods),
            "hfscale cannot shard its parameters",
        )
        raise ConfigError(
            f"peft_type {method} is not supported over ranks: {reason}. Use {', '.join(_METHODS)} (LORA includes DoRA, "
            "rsLoRA, PiSSA and OLoRA), or one process"
        )
    if (asked := _why_no_prompt(config)) is not None:
        raise ConfigError(f"{type(config).__name__}({asked}, or use one process")
    if method == "TRAINABLE_TOKENS" and not config.init_weights:
        raise ConfigError(
            "TrainableTokensConfig(init_weights=...) must be True, got False, which draws the trained rows at random: "
            "leave init_weights out"
        )
    if method != "LORA":
        return
    variants = [
        option.name
        for option in dataclasses.fields(config)
        if option.metadata.get("is_lora_variant")
    ]
    init = config.init_lora_weights
    if isinstance(init, str) and init not in (*_INITS, "pissa"):
        raise ConfigError(
            f"LoraConfig(init_lora_weights={init!r}) is not supported by hfscale: use True, False, "
            f"{', '.join(map(repr, _INITS))}, or 'pissa'"
        )
    for name in dict.fromkeys((*_LORA_REFUSED, *variants)):
        if name != "use_dora" and getattr(config, name, None):
            reason = _LORA_REFUSED.get(name, "hfscale does not support it")
            raise ConfigError(
                f"LoraConfig({name}=...) is not supported over ranks: {reason}. Leave it out, or use one process"
            )


def _why_no_prompt(config: Any) -> str | None:
    """Return the first option of a prompt's config that is not supported over ranks, with a remedy; ``None`` if all
    options are supported.
    """
    if not config.is_prompt_learning:
        return None
    if str(getattr(config, "encoder_reparameterization_type", "")).endswith("LSTM"):
        return "encoder_reparameterization_type='LSTM') draws its own dropout: use 'MLP'"
    if str(getattr(config.task_type, "value", config.task_type)) != "CAUSAL_LM":
        return f"task_type={config.task_type!r}) must be 'CAUSAL_LM' over ranks: use LoRA"
    return None


def check_over_quantized(config: Any, quantized: QuantizedPlan, batch_world: int) -> None:
    """Raise :class:`ConfigError`, naming the option, if hfscale does not support a config over quantized weights."""
    bits = quantized.bits
    method = getattr(config.peft_type, "value", config.peft_type)
    if method in _OF_PLAIN_WEIGHTS:
        raise ConfigError(
            f"{method} needs weights of 16 or 32 bits, but the model's weights have {bits} bits: use LoRA or IA3, or "
            "load the model without quantization"
        )
    init = getattr(config, "init_lora_weights", True)
    if isinstance(init, str) and init not in ("gaussian", "orthogonal"):
        raise ConfigError(
            f"LoraConfig(init_lora_weights={init!r}) changes the base weights, which would then be rounded to {bits} "
            "bits again: use True or 'gaussian', or load the weights in 16 or 32 bits"
        )
    alone = bits == 4 and batch_world == 1 and quantized.by_bitsandbytes
    if getattr(config, "use_dora", False) and not alone:
        raise ConfigError(
            f"LoraConfig(use_dora=True) needs the norms of {bits}-bit weights, which hfscale computes only for 4-bit "
            "weights without data-parallel ranks: use LoRA without DoRA, or tp_size and pp_size alone with "
            "load_in_4bit=True"
        )


def needs_weights(config: Any) -> bool:
    """Return whether the initial values of adapters depend on the weights that they adapt."""
    init = getattr(config, "init_lora_weights", True)
    if starts_by_products(config) or getattr(config, "use_dora", False):
        return True
    return isinstance(init, str) and init != "gaussian"


def starts_by_products(config: Any) -> bool:
    """Return whether initial values are computed by products with the weights, which exist in every dtype, and not by
    decompositions of the weights.
    """
    return getattr(config.peft_type, "value", config.peft_type) == "DEFT"


def stored_names(
    whole: Any,
    name: str,
    plan: Plan,
    embeddings: Any,
) -> dict[str, str]:
    """Map names of parameters in the plan to their keys in a saved adapter. If PEFT may write several keys for a
    parameter, the first key that PEFT reads is used: PEFT also writes biases of trained copies under the wrapper's
    name, but ignores this name when it loads.
    """
    keys: dict[str, str] = {}
    for key, parameter in stored_keys(whole, name, plan, embeddings).items():
        if f".{COPY}." in keys.get(parameter, f".{COPY}."):
            keys[parameter] = key
    return keys


def stored_keys(
    whole: Any,
    name: str,
    plan: Plan,
    embeddings: Any,
) -> dict[str, str]:
    """Map the keys of a saved adapter's file to names of parameters in the plan, by PEFT's own rules. ``whole`` is
    PEFT's full-size model.

    Besides adapters, the file contains trained biases, and embeddings if they are adapted. ``embeddings`` is the value
    of PEFT's ``save_embedding_layers``; ``"auto"`` makes PEFT read the base model's config, possibly from the Hub. If
    embeddings are saved, a trained copy (``modules_to_save``) of an embedding or a head has two keys: the stock name,
    such as ``lm_head.weight``, and its name inside PEFT's wrapper.
    """
    adapters = {adapter.name for adapter in plan.adapters}
    live_names: dict[str, str] = {}
    for key, live in kept_by_peft(whole, name, embeddings).items():
        if isinstance(live, str):
            live_names[key] = live if live in adapters else stock_name(live)
    return live_names


def load_adapter(
    path: str,
    whole: Any,
    name: str,
    plan: Plan,
    mesh: Mesh,
) -> dict[str, Tensor]:
    """Return this rank's shards of the saved adapter ``path``, and write the adapter's fixed (untrained) values, such
    as VeRA's shared matrices, into ``whole``, PEFT's full-size model. Raise :class:`CheckpointError` if names or shapes
    in the file differ from those of the model's adapter.
    """
    if is_computed(whole, name):
        raise CheckpointError(
            f"{path} must hold the encoder that computes a prompt for the prompt to be trained, but holds the prompt "
            "alone, which is all that PEFT writes: load a state of the run (hfscale.load_state), or load the prompt "
            "with PEFT for inference"
        )
    stored = _read_weights(path)
    for key in read_fixed(whole, name, stored, path):
        del stored[key]
    shares = {}
    here = plan.local_names(mesh.pp_rank)
    keys = stored_keys(whole, name, plan, embeddings=True)
    for parameter, (key, tensor) in _by_parameter(path, stored, keys, plan).items():
        planned = plan.by_name[parameter]
        if tuple(tensor.shape) != planned.shape:
            raise CheckpointError(
                f"{path}: {key} has the shape {tuple(tensor.shape)}, but the model needs {planned.shape}: load the "
                "adapter onto the model that it was trained on"
            )
        owner = planned.first_name
        if owner in here:  # possibly under another name of a tied tensor
            shares[owner] = planned.take(tensor, mesh.ranks).clone().to(mesh.device)
    return shares


def _read_weights(path: str) -> dict[str, Tensor]:
    from peft import load_peft_weights

    try:
        return load_peft_weights(path, device="cpu")
    except ValueError as error:
        raise CheckpointError(
            f"{path} is not a saved adapter: {error}: give the directory of one"
        ) from error


def _by_parameter(
    path: str,
    stored: Mapping[str, Tensor],
    keys: Mapping[str, str],
    plan: Plan,
) -> dict[str, tuple[str, Tensor]]:
    """Return the key and the full tensor of each parameter in a saved adapter; ``keys`` maps the file's keys to
    parameters. Raise :class:`CheckpointError` if the adapter lacks a parameter, has unexpected keys, or holds two
    different tensors for one parameter.
    """
    tensors: dict[str, tuple[str, Tensor]] = {}
    for key in (key for key in keys if key in stored):
        first, tensor = tensors.setdefault(keys[key], (key, stored[key]))
        if not torch.equal(tensor, stored[key]):
            raise CheckpointError(
                f"{path}: {first} and {key} belong to the same parameter of the model, but differ: save the adapter "
                "again"
            )
    of_file = set(keys.values())
    own = {
        adapter.name
        for adapter in plan.adapters
        if adapter.tied_to is None and adapter.name in of_file
    }
    lacking = own - tensors.keys()
    missing = sorted(key for key, parameter in keys.items() if parameter in lacking)
    extra = sorted(stored.keys() - keys.keys())
    if missing or extra:
        raise CheckpointError(
            f"{path} does not fit this model, because it lacks {len(missing)} of the model's {len(own)} adapter "
            f"tensors ({missing[:3]}) and has {len(extra)} unexpected ones ({extra[:3]}): load it onto the model that "
            "it was trained on"
        )
    return tensors


def adapter_tensors(
    runtime: Runtime,
    whole: Any,
    name: str,
    to: Sequence[int] = (0,),
    attempt: Attempt = plainly,
    among: Set[str] | None = None,
    embeddings: bool | str = "auto",
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the adapter file that PEFT would write, by the file's keys: in full on the ranks ``to``, and
    nothing on other ranks. With ``among``, yield only these parameters (names in the plan). Every rank must exhaust the
    iterator, since gathering is collective.
    """
    plan = runtime.plan
    names = {}
    only_factors = among is not None and among <= {adapter.name for adapter in plan.adapters}
    if runtime.mesh.is_first:
        _warn_of_experts(runtime)
        names = stored_names(whole, name, plan, False if only_factors else embeddings)
    owned: dict[str, list[str]] = {}
    for parameter, key in runtime.mesh.all_gather_object(names)[0].items():
        owner = plan.by_name[parameter].first_name
        if among is None or owner in among:
            owned.setdefault(owner, []).append(key)
    entries = [entry for entry in tensors_to_save(runtime) if entry.owned in owned]
    for entry, tensor in full_tensors(runtime, entries, attempt=attempt, to=to):
        for key in owned[entry.owned] if runtime.mesh.rank in to else ():
            yield key, tensor.cpu().contiguous()
    if runtime.mesh.rank in to and among is None:
        for key, holder in fixed_holders(whole, name).items():
            yield key, holder[name].cpu().contiguous()


def save_adapter(
    runtime: Runtime,
    whole: Any,
    name: str,
    target: Path,
    files: AdapterFiles = AdapterFiles(),
) -> None:
    """Write the adapter ``name`` into the directory ``target``, in PEFT's format; collective. Raise
    :class:`CheckpointError`, with ``target`` unchanged, if writing fails.
    """
    stale = _OLD_WEIGHTS if files.safetensors else WEIGHTS
    with atomic_directory(target, runtime.mesh, stale=(stale,)) as staging:
        arriving = adapter_tensors(
            runtime, whole, name, attempt=staging.attempt, embeddings=files.embeddings
        )
        tensors = {key: tensor.clone() for key, tensor in arriving}
        tensors = written_by_peft(whole.peft_config[name], tensors)
        if runtime.mesh.is_first and staging.failure is None:
            if files.safetensors:
                save_file(tensors, staging.path / WEIGHTS, metadata={"format": "pt"})
            else:
                torch.save(tensors, staging.path / _OLD_WEIGHTS)
            write_adapter_config(whole, name, staging.path)
            if files.card:
                _write_card(whole, target, staging.path)
    warn_of_not_finite(runtime.mesh, not_finite(tensors), str(target))


def _write_card(whole: Any, target: Path, directory: Path) -> None:
    """Write PEFT's model card, or PEFT's update of the card in ``target``, into ``directory``."""
    if (target / _CARD).exists():
        shutil.copyfile(target / _CARD, directory / _CARD)
    whole.create_or_update_model_card(str(directory))


def _warn_of_experts(runtime: Runtime) -> None:
    """Warn if vLLM and SGLang would ignore adapters of stacked experts, because the base checkpoint names every expert,
    and these engines look for one adapter under each expert's name.
    """
    plan = runtime.plan
    bases = [adapter.base for adapter in plan.adapters if adapter.experts]
    # Excludes a router's matrix.
    stacked = next((base for base in bases if len(plan.by_name[base].shape) == 3), None)
    if stacked is None:
        return
    whole = torch.empty(plan.by_name[stacked].shape, device="meta")
    if AsStored(runtime.model, {stacked: whole}).layout.keys() != {stacked}:
        _log.warning(
            "PEFT loads these stacked adapters of experts, such as %s, but vLLM and SGLang ignore them: for an engine, "
            "rewrite the saved adapter with `hfscale convert ADAPTER OUT --adapter-for vllm --base CHECKPOINT`", stacked
        )  # fmt: skip


def write_adapter_config(whole: Any, name: str, directory: Path) -> None:
    """Write ``adapter_config.json`` of the adapter ``name``. If the config has no ``task_type``, the file names the
    base model's class, like PEFT's own file.
    """
    config = whole.peft_config[name]
    base = type(whole.get_base_model())
    named = {"base_model_class": base.__name__, "parent_library": base.__module__}
    with attribute_replaced(config, "inference_mode", True):
        config.save_pretrained(
            str(directory), auto_mapping_dict=named if config.task_type is None else None
        )
