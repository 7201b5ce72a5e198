"""Read ``quantization_config`` from a checkpoint's ``config.json``, which tells how its weights are quantized."""

import json
import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from ...extensions import added

OF_GGUF = "gguf"
"""Transformers' name of the quantization method of GGUF files."""
INT8 = "llm_int8"
"""Hfscale's name of bitsandbytes' 8-bit method; transformers uses ``"bitsandbytes"`` for both 4 and 8 bits."""
TORCHAO = "torchao"
GEMMA = "gemma"
READ = ("fp8", "mxfp8", "mxfp4", "compressed-tensors", INT8, TORCHAO, GEMMA)
"""Names of the quantization methods of checkpoints whose weights hfscale can dequantize."""
_TORCHAO_TYPES = {
    "Int8WeightOnlyConfig",
    "Int8DynamicActivationInt8WeightConfig",
    "Float8WeightOnlyConfig",
    "Float8DynamicActivationFloat8WeightConfig",
    "IntxWeightOnlyConfig",
}
_FORMATS = {
    "dense",
    "naive-quantized",
    "float-quantized",
    "int-quantized",
    "pack-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
    "mixed-precision",
}


_INSTEAD = (
    "use a checkpoint with weights of 16 or 32 bits, which hfscale.from_pretrained(..., quantization_config="
    "BitsAndBytesConfig(load_in_4bit=True)) quantizes as it loads"
)


@dataclass(frozen=True)
class Scheme:
    """Describe how a weight is quantized, as far as its stored tensors do not tell: bits per number, and how many
    numbers share a scale.
    """

    bits: int = 4  # bits per number
    group: int = 0  # consecutive numbers of a row with one scale; 0: the whole row
    block: tuple[int, int] | None = (
        None  # rows and columns with one scale, if the config gives them
    )


@dataclass(frozen=True)
class StoredForm:
    """Describe a checkpoint's quantization format: the name of the quantization method, and the fields of
    ``quantization_config``.
    """

    method: str
    values: Mapping[str, Any] = field(repr=False)

    def scheme(self, name: str) -> Scheme:
        """Return how the weight ``name`` (without the ending ``.weight``) is quantized."""
        if self.method == GEMMA:
            return Scheme(bits=self._bits_of_gemma(name))
        if self.method != "compressed-tensors":
            block = self.values.get("weight_block_size")
            return Scheme(block=None if block is None else (block[0], block[1]))
        group = _group(list(self.values["config_groups"].values()), ".experts." in name)
        weights = group["weights"]
        block = weights.get("block_structure")
        return Scheme(
            bits=weights.get("num_bits") or 8,
            group=weights.get("group_size") or 0
            if weights.get("strategy") in ("group", "tensor_group")
            else 0,
            block=(block[0], block[1]) if block and weights.get("strategy") == "block" else None,
        )

    def _bits_of_gemma(self, name: str) -> int:
        """Return the bits per weight of the module ``name`` in a Gemma checkpoint: those of the first pattern in
        ``module_quant_configs`` that matches the name, or the config's default.
        """
        own: dict[str, dict[str, Any]] = self.values.get("module_quant_configs") or {}
        found = next((each for pattern, each in own.items() if re.search(pattern, name)), {})
        return int(found.get("num_bits") or self.values.get("num_bits") or 4)


def _group(groups: list[dict[str, Any]], experts: bool) -> dict[str, Any]:
    """Return the entry of a compressed-tensors config's ``config_groups`` that transformers applies to experts or,
    without ``experts``, to all other layers.
    """

    def of_experts(group: dict[str, Any]) -> bool:
        return any(target.startswith("re:") and "experts" in target for target in group["targets"])

    def of_classes(group: dict[str, Any]) -> bool:
        return any(not target.startswith("re:") for target in group["targets"])

    wanted = (of_experts, of_classes) if experts else (lambda group: not of_experts(group),)
    return next((group for test in wanted for group in groups if test(group)), groups[0])


def split_stored_form(config: Any) -> tuple[Any, StoredForm | None]:
    """Return a copy of a model's config without ``quantization_config``, and the quantization format that this entry
    described.

    If the config has no such entry, or hfscale cannot dequantize the format, return the config itself and ``None``. If
    transformers built the model from a GGUF file, return the copy and ``None``, because transformers has dequantized
    the weights already.
    """
    found = description(config)
    form = _form(found)
    if form is None and (found is None or found["quant_method"] != OF_GGUF):
        return config, None
    plain = deepcopy(config)
    for holder in (plain, plain.get_text_config(decoder=True)):
        vars(holder).pop("quantization_config", None)
    return plain, form


def form_in(directory: Path) -> StoredForm | None:
    """Return the quantization format of the checkpoint in a directory; ``None`` if no weights are quantized in a format
    that hfscale reads.
    """
    file = directory / "config.json"
    config = json.loads(file.read_bytes()) if file.exists() else {}
    return _form(
        config.get("quantization_config")
        or (config.get("text_config") or {}).get("quantization_config")
    )


def describe_form(directory: Path, form: StoredForm | None) -> None:
    """Write the quantization format ``form`` into the config of a checkpoint in a directory. For ``None``, remove the
    config's quantization format.
    """
    file = directory / "config.json"
    config = json.loads(file.read_bytes())
    for holder in (config, config.get("text_config") or {}):
        holder.pop("quantization_config", None)
    described = {} if form is None else {"quantization_config": dict(form.values)}
    file.write_text(
        json.dumps(
            {**config, **described},
            indent=2,
            sort_keys=True,
        )
        + "\n"
    )


def _form(values: Mapping[str, Any] | None) -> StoredForm | None:
    return None if values is None or why_not_read(values) else StoredForm(_named(values), values)


def check_asked_form(config: Any, given: Any) -> Any:
    """Return the name of an extension's quantization if ``given``, the user's quantization config, requests it for the
    checkpoint's quantized weights, ``None`` if it requests dequantized weights, and otherwise ``given`` itself. Raise
    :class:`ConfigError` if it requests a stored format that the checkpoint does not have.
    """
    plain = getattr(given, "dequantize", False)
    in_form = method_of(given) in READ
    names = (name for name in added("quantizations") if in_form or name == given)
    kept = None if plain else next(names, None)
    if kept is None and not plain:
        return given
    values = description(config)
    found = None if values is None else values["quant_method"]
    asked = method_of(given) or found
    if found != asked or found not in READ:
        class_call = f"{type(given).__name__}({'dequantize=True' if plain else ''})"
        shown = repr(given) if given == kept else class_call
        raise ConfigError(
            f"quantization_config={shown} is for a checkpoint stored in the format {asked or ', '.join(READ)}, but "
            f"this checkpoint is {f'in {found}' if found else 'not quantized'}: leave quantization_config out"
        )
    return kept


def method_of(given: Any) -> Any:
    """Return transformers' name of the method that a quantization config selects; ``None`` for any other object."""
    method = getattr(given, "quant_method", None)
    return getattr(method, "value", method)


def description(config: Any) -> dict[str, Any] | None:
    """Return the ``quantization_config`` of a model's config as a dict that names its ``quant_method``; ``None`` if the
    config has none.
    """
    holders = (config, config.get_text_config(decoder=True))
    found = next(
        (
            h.quantization_config
            for h in holders
            if getattr(h, "quantization_config", None) is not None
        ),
        None,
    )
    if found is None:
        return None
    values = dict(found if isinstance(found, dict) else found.to_dict())
    return {**values, "quant_method": _named(values)}


def _named(values: Mapping[str, Any]) -> Any:
    """Return the name of the method in ``quantization_config``; bitsandbytes' 8-bit method has a name of its own."""
    method = values.get("quant_method")
    method = getattr(method, "value", method)
    return INT8 if method == "bitsandbytes" and values.get("load_in_8bit") else method


def _types(values: Any) -> set[str]:
    """Return the class names of all torchao configs that are nested in a checkpoint's ``quantization_config``."""
    if not isinstance(values, Mapping):
        return set()
    inner = set[str]().union(*map(_types, values.values()))
    own = values.get("_type")
    return inner | {own} if isinstance(own, str) and own.endswith("Config") else inner


def why_not_read(values: Mapping[str, Any]) -> str | None:
    """Return why hfscale cannot dequantize weights with the ``quantization_config`` ``values``, and what to do instead;
    ``None`` if it can.
    """
    method = _named(values)
    reason = ""
    if method not in READ:
        reason = f"it is quantized ({method}) already, and hfscale reads {', '.join(READ)}"
    elif method == "compressed-tensors":
        reason = _unread_of_compressed(values)
    elif method == TORCHAO:
        types = _types(values.get("quant_type"))
        unknown = ", ".join(sorted(types - _TORCHAO_TYPES)) or ("" if types else "no type")
        told = f"it is quantized (torchao, {unknown}) already, which hfscale does not read"
        reason = told if unknown else ""
    return f"{reason}: {_INSTEAD}" if reason else None


def _unread_of_compressed(values: Mapping[str, Any]) -> str:
    """Return why hfscale cannot dequantize weights with this compressed-tensors config; an empty string if it can."""
    groups = (values.get("config_groups") or {}).values()
    formats = {
        values.get("format"),
        *(group.get("format") for group in groups),
    } - {None}
    unknown = ", ".join(sorted(formats - _FORMATS)) or ("" if groups else "nothing")
    sparse = values.get("sparsity_config") or {}
    if unknown:
        return (
            f"it is quantized (compressed-tensors, {unknown}) already, which hfscale does not read"
        )
    if sparse.get("format", "dense") != "dense":
        return "its quantized weights are sparse (sparsity_config), which hfscale does not read"
    if values.get("transform_config"):
        return "its quantized weights are rotated (transform_config), which hfscale does not undo"
    return ""
