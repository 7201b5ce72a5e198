"""Quantize weights while they are loaded: a rank reads its shard of a weight, quantizes it, and frees the 16-bit shard.

transformers replaces ``nn.Linear`` by bitsandbytes' modules on the meta device, and quantizes every weight after it is
read (QLoRA, Dettmers et al. 2023). hfscale gives these modules this rank's sizes, and transformers quantizes this
rank's shard, so a projection stays a stock module with local sizes. hfscale itself encodes two kinds of weights as
plain bytes (:mod:`...distributed.ops.four_bit`): weights that data ranks shard, and experts, which transformers does
not quantize.
"""

import json
from collections.abc import Collection, Mapping
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn

from ..._compat.bitsandbytes import (
    functional,
    is_quantized_already,
    keep_layout,
    scales_of_rows,
    set_state,
)
from ..._compat.torch import own_parameters
from ...distributed.files.reader import PartOnDisk, TensorOnDisk
from ...distributed.mesh import Mesh
from ...distributed.ops.four_bit import FourBitEncoding, encode, quantization_state, split_row
from ...distributed.ops.quantized_weights import register_quantized
from ...errors import CheckpointError
from ...models.names import wild_name
from ...plan import ParameterPlan, Plan
from ...plan.cut import share_spans
from ...plan.quantized import BLOCK
from ...train.runtime.parameter_names import owner_of, put_parameter
from ...train.runtime.shards import LocalWeights

_STATE = ".quant_state.bitsandbytes__"
_BESIDE = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")


class QuantizedOnDisk:
    """Read, on demand, one weight ``[out, in]`` that bitsandbytes stored in 4 bits (``nf4`` or ``fp4``).

    The weight is stored as bytes of two values each, with one scale per block of 64 values. If the blocks of a shard
    are blocks of the full weight (:mod:`hfscale.plan.quantized`), the shard consists of spans of the bytes and of the
    scales, and nothing is quantized again. Scales that are quantized too (double quantization) are read in full, since
    their blocks and mean belong to the full weight, and are kept in float32. ``dtype`` is the dtype before
    quantization.

    Raises:
        CheckpointError: the blocks do not have 64 values.
    """

    def __init__(self, key: str, stored: Mapping[str, TensorOnDisk]) -> None:
        self._weight = stored[key]
        self._beside = {
            name: stored[f"{key}.{name}"] for name in _BESIDE if f"{key}.{name}" in stored
        }
        state = next(name for name in stored if name.startswith(key + _STATE))
        self._state: dict[str, Any] = json.loads(bytes(stored[state][...].tolist()))
        self.kind = state.rpartition("__")[2]
        self.shape = tuple(self._state["shape"])
        self.dtype: torch.dtype = getattr(torch, self._state["dtype"])
        if self._state["blocksize"] != BLOCK:
            raise CheckpointError(
                f"{key} is stored in blocks of {self._state['blocksize']} values, but hfscale reads only blocks of "
                f"{BLOCK}: use a checkpoint with 16-bit weights and quantization_config="
            )

    def share(
        self, planned: ParameterPlan, transposed: bool, ranks: dict[str, int]
    ) -> tuple[Tensor, Tensor]:
        """Return bytes ``[n]`` and float32 scales ``[blocks]`` of the shard at the coordinates ``ranks``, which must
        consist of whole blocks.
        """
        spans = share_spans(planned.shape, planned.cuts, ranks)
        down, across = spans[::-1] if transposed else spans
        rows, columns = self.shape
        scales = self._scales()
        flat = copy(self._weight)
        flat.dtype = torch.uint8
        if across == [(0, columns)]:
            runs = [(start * columns, stop * columns) for start, stop in down]
            flat.shape = (-(-rows * columns // 2),)
            part = PartOnDisk(
                flat,
                [[(start // 2, -(-stop // 2)) for start, stop in runs]],
            )[...]
            return part, torch.cat(
                [scales[start // BLOCK : -(-stop // BLOCK)] for start, stop in runs]
            )
        flat.shape = (rows, columns // 2)
        part = PartOnDisk(
            flat,
            [down, [(start // 2, stop // 2) for start, stop in across]],
        )[...]
        places = torch.cat([torch.arange(start, stop) for start, stop in down])
        blocks = torch.cat([torch.arange(start // BLOCK, stop // BLOCK) for start, stop in across])
        return part.flatten(), scales.view(rows, -1)[places][:, blocks].flatten()

    def _scales(self) -> Tensor:
        """Return all scales of the full weight."""
        stored = self._beside["absmax"][...]
        if "nested_absmax" not in self._beside:
            return stored.float()
        outer = self._beside["nested_absmax"][...]
        code = self._beside["nested_quant_map"][...]
        size = self._state["nested_blocksize"]
        scales: Tensor = functional().dequantize_blockwise(
            stored, absmax=outer, code=code, blocksize=size
        )
        return scales + torch.tensor(float(self._state["nested_offset"]))


def split_quantized(
    stored: dict[str, TensorOnDisk],
) -> tuple[dict[str, TensorOnDisk], dict[str, QuantizedOnDisk]]:
    """Return the stored tensors without quantization states and scales, and the quantized weights by key."""
    keys = [name.rpartition(_STATE)[0] for name in stored if _STATE in name]
    quantized = {key: QuantizedOnDisk(key, stored) for key in keys}
    states = {name for name in stored if _STATE in name}
    beside = {f"{key}.{name}" for key in keys for name in _BESIDE} | states
    return {name: tensor for name, tensor in stored.items() if name not in beside}, quantized


class Quantizing:
    """Quantize the weights on this rank that ``plan`` names while a model is loaded.

    Args:
        model: the stock model on the meta device, with this rank's modules, before parameters are sharded.
        host: transformers' quantizer; some of its methods are replaced until :meth:`collect`.
    """

    def __init__(self, model: Any, plan: Plan, mesh: Mesh, host: Any) -> None:
        assert plan.quantized is not None
        self.model = model
        self.plan = plan.quantized
        self.mesh = mesh
        self.host = host
        here = dict(model.named_parameters(remove_duplicate=False))
        self.weights = {name: plan.by_name[name] for name in self.plan.weights if name in here}
        self.originals = {name: here[name] for name in self.weights}
        self.whole: Collection[str] = ()
        self.encodings: dict[str, FourBitEncoding] = {}
        self.stored: dict[str, QuantizedOnDisk] = {}
        self.stock = host.get_quantize_ops()
        for name in self.plan.transposed & self.weights.keys():
            # The plan has the stored shape of a ``Conv1D`` weight, but bitsandbytes' module has the transposed shape.
            turned = torch.empty(
                self.weights[name].shape, dtype=self.originals[name].dtype, device="meta"
            )
            put_parameter(model, name, nn.Parameter(turned, requires_grad=False))

    def read_quantized(self, name: str, quantized: QuantizedOnDisk, converted: bool) -> None:
        """Use the 4-bit data of the checkpoint for weight ``name``. Raise :class:`CheckpointError` if the data cannot
        be sharded.
        """
        planned = self.weights[name]
        shape = quantized.shape[::-1] if name in self.plan.transposed else quantized.shape
        why = None
        if not self.plan.aligned(planned):
            why = "the shards do not consist of whole blocks of 64 values"
        elif converted:
            why = "transformers would convert it while loading"
        elif shape != planned.shape:
            why = f"its shape is {shape}, but the model needs {planned.shape}"
        if why is not None:
            raise CheckpointError(
                f"{wild_name(name)} is stored in 4 bits and cannot be sharded, since {why}: use smaller tp_size and "
                "dp_shard_size, or a checkpoint with 16-bit weights and quantization_config="
            )
        self.stored[name] = quantized

    def shape(self, whole: Collection[str]) -> None:
        """Set the modules' local sizes after parameters are sharded. The weights ``whole`` are read in full, and
        sharded before they are quantized.
        """
        self.whole = whole
        for name, planned in self.weights.items():
            holder, attribute = owner_of(self.model, name)
            module: Any = holder
            share = planned.local_shape(self.mesh.ranks)
            original = self.originals[name]
            if hasattr(module, "in_features"):
                local = planned.model_shape(self.mesh.ranks)
                turned = name in self.plan.transposed
                module.out_features, module.in_features = local[::-1] if turned else local
                keep_layout(module)  # bitsandbytes would use another memory layout in evaluation
                empty = torch.empty(share, dtype=original.dtype, device="meta")
                own_parameters(module)[attribute] = type(original)(
                    empty, requires_grad=False, **original.__dict__
                )
            if self.plan.bits == 4 and (self.mesh.data_world > 1 or planned.shape[2:]):
                self.encodings[name] = encoding = self._encoding(planned, module)
                if (
                    name in self.stored
                    and encoding.dim == 2
                    and encoding.shape[2] % encoding.shards
                ):
                    raise CheckpointError(
                        f"{name} has {encoding.shape[2]} columns, which do not divide evenly over {encoding.shards} "
                        "data ranks, as weights stored in 4 bits must: use another dp_shard_size, or a checkpoint "
                        "with 16-bit weights and quantization_config="
                    )
        self.host.param_needs_quantization = lambda model, name, **kwargs: name in self.weights
        self.host.get_quantize_ops = lambda: self

    def convert(
        self,
        input_dict: dict[str, Any],
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Return ``input_dict`` with this rank's shards quantized; called in place of transformers' quantizer."""
        result = dict(input_dict)
        for name in input_dict.keys() & self.weights.keys():
            if name in self.stored:
                result[name] = self._from_stored(name)
                continue
            value = input_dict[name]
            value = value[0] if isinstance(value, list) else value
            if name in self.whole:
                value = self.weights[name].take(value, self.mesh.ranks)
            if name not in self.encodings:
                result.update(self.stock.convert({name: value}, **kwargs))
                continue
            matrices = value.T if name in self.plan.transposed else value
            matrices = matrices if matrices.ndim == 3 else matrices.unsqueeze(0)
            row = encode(matrices.to(self.mesh.device), self.encodings[name])
            result[name] = nn.Parameter(row, requires_grad=False)
        return result

    def collect(self, shares: LocalWeights) -> None:
        """Move the quantized weights into ``shares``, and restore transformers' quantizer. Raise
        :class:`CheckpointError` for a weight that the checkpoint lacks.
        """
        del self.host.param_needs_quantization, self.host.get_quantize_ops
        for name in self.weights:
            module, attribute = owner_of(self.model, name)
            parameter: Any = own_parameters(module)[attribute]
            if parameter.is_meta or not is_quantized_already(parameter):
                raise CheckpointError(
                    f"the checkpoint has no {name}, which quantization_config would quantize: load the checkpoint "
                    "without quantization_config, or with the config with which the checkpoint was saved"
                )
            if self.plan.bits == 8 and self.mesh.data_world > 1:
                from .sharded_linears import shard_8bit  # imports bitsandbytes

                shares.tensors[name] = parameter.data.to(self.mesh.device)
                rows = (
                    scales_of_rows(parameter)
                    .to(self.mesh.device, torch.float32)
                    .view(torch.uint8)
                    .view(-1, 4)
                )
                shares.quantized.append((module, "scales", rows))
                shard_8bit(module)
                continue
            if name not in self.encodings:
                parameter = parameter.to(self.mesh.device)
                shares.tensors[name] = parameter.data
                shares.quantized.append((module, attribute, parameter))
                continue
            shares.tensors[name] = parameter.data
            if hasattr(module, "in_features"):
                from .sharded_linears import shard_4bit  # imports bitsandbytes

                shard_4bit(module, self.encodings[name])
            else:
                register_quantized(module, attribute, self.encodings[name])

    def _from_stored(self, name: str) -> nn.Parameter:
        quantized = self.stored[name]
        planned = self.weights[name]
        weight, scales = quantized.share(planned, name in self.plan.transposed, self.mesh.ranks)
        weight = weight.to(self.mesh.device)
        scales = scales.to(self.mesh.device)
        if name in self.encodings:
            row = weight.new_zeros((1, self.encodings[name].row_shape[1]))
            bytes_row, scales_row = split_row(row, self.encodings[name])
            bytes_row[0, : weight.numel()] = weight
            scales_row[0, : 4 * scales.numel()] = scales.contiguous().view(torch.uint8)
            return nn.Parameter(row, requires_grad=False)
        module, _ = owner_of(self.model, name)
        original: Any = self.originals[name]
        encoding = self._encoding(planned, module)
        parameter = type(original)(
            weight.view(original.quant_storage).view(-1, 1), **original.__dict__
        )
        set_state(
            module, parameter, quantization_state(weight, scales.view(torch.uint8), encoding)[1]
        )
        return parameter

    def _encoding(self, planned: ParameterPlan, module: Any) -> FourBitEncoding:
        data = planned.data_cuts
        shape = planned.model_shape(self.mesh.ranks)
        dim = data[0].dim if data else 0
        if len(shape) == 2:
            dim += 1
            shape = (1, *shape)
            if planned.name in self.plan.transposed:
                shape = (1, shape[2], shape[1])
                dim = 3 - dim
        config = self.host.quantization_config
        return FourBitEncoding(
            shape=(shape[0], shape[1], shape[2]),
            quant_type=config.bnb_4bit_quant_type,
            double=self.plan.double,
            dtype=self.stored[planned.name].dtype
            if planned.name in self.stored
            else self.model.dtype,
            compute_dtype=config.bnb_4bit_compute_dtype,
            shards=data[0].size if data else 1,
            dim=dim,
        )
