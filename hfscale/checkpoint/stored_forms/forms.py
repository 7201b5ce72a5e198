"""Define how checkpoints store quantized weights: one entry (:class:`Form`) per quantization format.

======================  ===========================================================  ==================================
quantization format     stored tensors of the weight ``NAME.weight``                 who writes it
======================  ===========================================================  ==================================
FP8                     ``weight``, ``weight_scale_inv`` (per block, or one scale)   DeepSeek, Qwen, GLM, MiniMax
  embeddings            ``weight``, ``weight_scale`` (one scale)                     Qwen4-Exp
MXFP4                   ``..._blocks``, ``..._scales``, transposed                   gpt-oss (experts)
compressed-tensors      ``weight``, ``weight_scale``, ``weight_zero_point``          FP8 and INT8 of llm-compressor
  packed into int32     ``weight_packed``, ``weight_scale``, ``weight_shape``        Kimi (INT4 experts)
  NVFP4, MXFP4          ``weight_packed``, ``weight_scale``, ``weight_global_scale`` llm-compressor
bitsandbytes, 8 bits    ``weight``, ``SCB``                                          transformers
torchao                 ``_weight_qdata``, ``_weight_scale``, ``_weight_zero_point`` transformers (INT8, FP8, INT4)
Gemma's                 ``weight``, ``weight_scale``, ``embedding_quantized``        Google (2, 4 and 8 bits)
======================  ===========================================================  ==================================
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

import torch

from ..._compat.transformers.stored import Destination
from ...distributed.files.dequantized import Along, DequantizedOnDisk, StoredPart
from ...distributed.files.reader import TensorOnDisk
from ...errors import CheckpointError
from . import arithmetic
from .scheme import GEMMA, INT8, TORCHAO, Scheme, StoredForm

Found = Mapping[str, TensorOnDisk]  # the stored tensors of one weight, by their role


@dataclass(frozen=True)
class Form:
    """Describe one quantization format: the names of the tensors that make up a weight, and how the weight is
    dequantized.
    """

    scales: str  # suffix of the names of scales, by which quantized weights are found
    values: str  # suffix of the name of the values, which replaces the suffix of the scales
    shown: str  # suffix of the weight's name in a plain checkpoint
    make: Callable[
        [str, Found, Scheme], DequantizedOnDisk
    ]  # creates the lazy weight from its stored tensors
    # suffixes of further tensors that belong to the weight -> their role; ``None``: not needed
    beside: Mapping[str, str | None]


def _fp8(key: str, found: Found, scheme: Scheme) -> DequantizedOnDisk:
    values = found["values"]
    scales = _matrices(found["scales"], found["values"])
    in_words = values.dtype in (torch.int8, torch.uint8)
    columns = arithmetic.two_per_byte() if in_words else Along()
    shape = (*values.shape[:-1], values.shape[-1] * columns.entries)
    parts = {
        "values": StoredPart(values, columns=columns),
        "scales": _grid(key, scales, shape, scheme.block),
    }
    return DequantizedOnDisk(shape, parts, arithmetic.blocks_in_float32)


def _table(key: str, found: Found, scheme: Scheme) -> DequantizedOnDisk:
    values = found["values"]
    scales = _matrices(found["scales"], found["values"])
    parts = {"values": StoredPart(values), "scales": _grid(key, scales, values.shape)}
    return DequantizedOnDisk(values.shape, parts, arithmetic.rows_of_a_table)


def _mxfp4(key: str, found: Found, scheme: Scheme) -> DequantizedOnDisk:
    values = found["values"]
    scales = found["scales"]
    experts, rows, groups, size = values.shape
    flat = values.viewed((experts, rows, groups * size))
    parts = {
        "values": StoredPart(flat, columns=arithmetic.two_per_byte()),
        "scales": StoredPart(scales, columns=Along(2 * size)),
    }
    shape = (experts, 2 * groups * size, rows)
    return DequantizedOnDisk(shape, parts, arithmetic.powers_of_two, transposed=True)


def _plain_codes(key: str, found: Found, scheme: Scheme) -> DequantizedOnDisk:
    values = found["values"]
    parts = {"values": StoredPart(values)}
    parts |= {
        name: _grid(key, _matrices(found[name], values), values.shape, scheme.block)
        for name in ("scales", "zeros")
        if name in found
    }
    # transformers dequantizes experts that it merges in float32, but a module's weight in the scales' dtype.
    merged = arithmetic.blocks_in_float32 if values.dtype.is_floating_point else None
    return DequantizedOnDisk(values.shape, parts, arithmetic.in_type_of_scales, if_merged=merged)


def _integers(key: str, found: Found, scheme: Scheme) -> DequantizedOnDisk:
    values = found["values"]
    scales = found["scales"]
    if values.dtype == torch.uint8:
        shape = (values.shape[0], 2 * values.shape[1])
        parts = {"values": StoredPart(values, columns=arithmetic.two_per_byte())}
        parts |= {
            n: _grid(key, _matrices(found[n], values), shape)
            for n in ("scales", "whole")
            if n in found
        }
        return DequantizedOnDisk(shape, parts, arithmetic.scaled_twice)
    bits = scheme.bits
    length = scheme.group and scales.shape[-1] * scheme.group
    shape = (values.shape[0], length or int(found["shape"][...][-1]))
    words = arithmetic.codes_in_int32(bits)
    if values.shape[1] != -(-shape[1] * bits // 32):
        raise CheckpointError(
            f"{key} has {values.shape[1]} 32-bit words per row for {shape[1]} numbers of {bits} bits, so the "
            "quantization_config describes other weights: download the checkpoint again, or correct "
            "quantization_config in its config.json"
        )
    parts = {
        "values": StoredPart(values, columns=words),
        "scales": _grid(key, _matrices(scales, values), shape),
    }
    if "zeros" in found:
        zeros = _matrices(found["zeros"], values)
        parts["zeros"] = StoredPart(zeros, rows=words, columns=parts["scales"].columns)
    return DequantizedOnDisk(shape, parts, arithmetic.in_type_of_scales)


def _int8(key: str, found: Found, scheme: Scheme) -> DequantizedOnDisk:
    values = found["values"]
    order = int(found["order"][...]) if "order" in found else 0
    if order:
        raise CheckpointError(
            f"{key} must be stored row by row (weight_format 0), got weight_format {order}, which older bitsandbytes "
            "wrote for one kind of GPU: save the weight again with bitsandbytes 0.45 or later, or use a checkpoint "
            "with weights of 16 or 32 bits"
        )
    scales = _grid(key, _matrices(found["scales"], values), values.shape)
    parts = {"values": StoredPart(values), "scales": scales}
    return DequantizedOnDisk(values.shape, parts, arithmetic.shares_of_the_largest)


def _torchao(key: str, found: Found, scheme: Scheme) -> DequantizedOnDisk:
    values = found["values"]
    if "before" in found:
        raise CheckpointError(
            f"{key} is stored with a scale of its inputs (SmoothQuant), which a dequantized weight cannot include: use "
            "a checkpoint with weights of 16 or 32 bits"
        )
    parts = {"values": StoredPart(values)}
    parts |= {
        name: _grid(key, _matrices(found[name], values), values.shape)
        for name in ("scales", "zeros")
        if name in found
    }
    in_float32 = values.dtype.is_floating_point
    made = arithmetic.blocks_in_float32 if in_float32 else arithmetic.in_type_of_result
    return DequantizedOnDisk(values.shape, parts, made)


def _gemma(key: str, found: Found, scheme: Scheme) -> DequantizedOnDisk:
    values = found["values"]
    in_words = values.dtype == torch.uint8
    columns = arithmetic.codes_in_bytes(scheme.bits) if in_words else Along()
    shape = (values.shape[0], values.shape[1] * columns.entries)
    scales = _grid(key, _matrices(found["scales"], values), shape)
    parts = {"values": StoredPart(values, columns=columns), "scales": scales}
    return DequantizedOnDisk(shape, parts, arithmetic.rows_of_a_table)


_STATIC = {
    ".input_scale": None,
    ".input_global_scale": None,
    ".input_zero_point": None,
    ".output_scale": None,
}
_COMPRESSED = {
    ".weight_zero_point": "zeros",
    ".weight_global_scale": "whole",
    ".weight_shape": "shape",
    **_STATIC,
}
_ACTIVATIONS = {".activation_scale": None, ".input_scale": None}
FORMS: dict[str, tuple[Form, ...]] = {
    "fp8": (
        Form(".weight_scale_inv", ".weight", ".weight", _fp8, _ACTIVATIONS),
        Form("_scale_inv", "", "", _fp8, {"_activation_scale": None}),
        Form(".scale", ".weight", ".weight", _fp8, _ACTIVATIONS),
        Form(".weight_scale", ".weight", ".weight", _table, _ACTIVATIONS),
        Form(".qscale_weight", ".weight", ".weight", _fp8, {".qscale_act": None}),
    ),
    "mxfp4": (Form("_scales", "_blocks", "", _mxfp4, {}),),
    "compressed-tensors": (
        Form(".weight_scale", ".weight_packed", ".weight", _integers, _COMPRESSED),
        Form(".weight_scale", ".weight", ".weight", _plain_codes, _COMPRESSED),
    ),
}
FORMS["mxfp8"] = FORMS["fp8"]
FORMS[INT8] = (Form(".SCB", ".weight", ".weight", _int8, {".weight_format": "order"}),)
_OF_TORCHAO = {"._weight_zero_point": "zeros", "._weight_act_pre_scale": "before"}
FORMS[TORCHAO] = (Form("._weight_scale", "._weight_qdata", ".weight", _torchao, _OF_TORCHAO),)
_CALIBRATED = {".input_activation_scale": None, ".output_activation_scale": None}
FORMS[GEMMA] = (
    Form(".weight_scale", ".weight", ".weight", _gemma, _CALIBRATED),
    Form(".embedding_scale", ".embedding_quantized", ".weight", _gemma, {}),
)
"""Map the name of each quantization method to the ways (:class:`Form`) in which checkpoints store its weights. For each
weight, the first way whose tensor names match is used.
"""

_ENDINGS = (".weight", "_proj", "_packed", "_blocks", "_qdata", "_quantized")
_CODES = {torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8, torch.int32}


def as_plain(
    stored: Mapping[str, TensorOnDisk], described: StoredForm | None
) -> dict[str, TensorOnDisk]:
    """Return a checkpoint's tensors, by name, with every weight in the quantization format ``described`` replaced by a
    lazy dequantized tensor. Raise :class:`CheckpointError` if a weight's scales are missing or have the wrong shape.
    """
    return dict(stored) if described is None else _dequantized(stored, described)


def _dequantized(
    stored: Mapping[str, TensorOnDisk], described: StoredForm
) -> dict[str, TensorOnDisk]:
    weights: dict[str, TensorOnDisk] = {}
    used: set[str] = set()
    for name in stored:
        for form in FORMS[described.method]:
            base = name.removesuffix(form.scales)
            values = stored.get(base + form.values)
            if base == name or values is None or values.dtype not in _CODES:
                continue
            beside = {
                part: stored[base + end]
                for end, part in form.beside.items()
                if part and base + end in stored
            }
            found = {"values": values, "scales": stored[name], **beside}
            if f"{base}.weight_g_idx" in stored:
                raise CheckpointError(
                    f"{base} is stored with its columns in another order than the model's (weight_g_idx), which "
                    "neither transformers nor hfscale can undo: use a checkpoint that was quantized without actorder"
                )
            weight = form.make(base, found, described.scheme(base))
            weight.stored_as = {
                name: ("scales", stored[name]),
                base + form.values: ("values", values),
            }
            others = {base + end: part for end, part in form.beside.items() if base + end in stored}
            weight.stored_as |= {other: (part, stored[other]) for other, part in others.items()}
            weights[base + form.shown] = weight
            used |= {name, base + form.values, *(base + end for end in form.beside)}
            break
    rest = {name: tensor for name, tensor in stored.items() if name not in used}
    lost = next(
        (name for name, t in rest.items() if t.dtype in _CODES and name.endswith(_ENDINGS)), None
    )
    if lost is not None:
        raise CheckpointError(
            f"{lost} is stored in {str(rest[lost].dtype).removeprefix('torch.')} without scales, which "
            f"{described.method} stores for every quantized weight, so the checkpoint's quantization_config does not "
            "describe these files: use a checkpoint with weights of 16 or 32 bits"
        )
    return {**rest, **weights}


def load_weights_as(
    stored: Mapping[str, TensorOnDisk],
    targets: Mapping[str, Destination],
    dtypes: Mapping[str, torch.dtype],
) -> None:
    """Set, for every lazy quantized weight, the dtype to which it is dequantized (that of its parameter in the model),
    and whether transformers merges it with other weights into one parameter, for which it dequantizes differently.
    """
    for key, tensor in stored.items():
        if isinstance(tensor, DequantizedOnDisk):
            found = targets[key]
            tensor.load_as(dtypes.get(found.name, tensor.dtype), found.converter is not None)


def _matrices(tensor: TensorOnDisk, values: TensorOnDisk) -> TensorOnDisk:
    """Return the scales of quantized ``values`` as a view with as many dims as the values; they may be one scale, one
    per row, one per matrix, or a grid of blocks.
    """
    missing = len(values.shape) - len(tensor.shape)
    if not missing:
        return tensor
    # Scales per row or per matrix get dims of size 1 at the end; other scales get these dims in front.
    shape = (
        (*tensor.shape, *(1,) * missing)
        if tensor.shape[:1] == values.shape[:1]
        else (1,) * missing + tensor.shape
    )
    return tensor.viewed(shape)


def _grid(
    key: str,
    scales: TensorOnDisk,
    shape: tuple[int, ...],
    block: tuple[int, int] | None = None,
) -> StoredPart:
    """Return the scales of the weight ``key`` with the number of rows and of columns that share a scale: those of
    ``block`` if they agree with the number of stored scales, otherwise the weight's size divided by the number of
    scales.
    """
    along = []
    for dim, size, wanted in zip(
        (-2, -1),
        shape[-2:],
        block or (0, 0),
        strict=True,
    ):
        count = scales.shape[dim]
        if wanted and count == -(-size // wanted):
            along.append(Along(wanted))
        elif count and size % count == 0:
            along.append(Along(size // count))
        else:
            raise CheckpointError(
                f"{key} of shape {shape} has scales of shape {scales.shape}, which do not correspond to blocks of this "
                "weight: download the checkpoint again, or set weight_block_size in its config.json"
            )
    if prod(scales.shape[:-2]) not in (1, prod(shape[:-2])):
        raise CheckpointError(
            f"{key} of shape {shape} has scales of shape {scales.shape}, which are neither for one matrix nor for all "
            "of its matrices: download the checkpoint again"
        )
    return StoredPart(scales, *along)
