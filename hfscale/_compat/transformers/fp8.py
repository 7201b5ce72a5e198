"""Quantize weights to 8-bit floating point with a scale per block, as transformers' quantizer does on a GPU."""

import copy
from typing import Any

from torch import Tensor
from transformers import FineGrainedFP8Config
from transformers.quantizers.auto import AutoHfQuantizer

from ...errors import ConfigError
from .classes import class_name, empty_copy


class Fp8Encoder:
    """Encode the tensors of ``model``, the stock model or a rank's shard of it, that transformers would quantize; raise
    :class:`ConfigError` for any config but ``FineGrainedFP8Config``, or if transformers cannot quantize this model.
    """

    def __init__(self, model: Any, config: Any) -> None:
        if not isinstance(config, FineGrainedFP8Config):
            raise ConfigError(
                f"quantization_config must be a transformers.FineGrainedFP8Config, got {type(config).__name__}: "
                "pass one, or leave it out"
            )
        quantizer: Any = AutoHfQuantizer.from_config(copy.deepcopy(config), pre_quantized=False)
        whole = empty_copy(model)
        names = [name for name, _ in whole.named_parameters()]
        try:
            quantizer._process_model_before_weight_loading(whole)
        except Exception as error:  # a mixture that its layers do not fit
            raise ConfigError(
                f"transformers cannot hold {class_name(model)} in 8-bit floating point ({type(error).__name__}: "
                f"{error}): leave quantization_config out"
            ) from error
        self._wanted = {name for name in names if quantizer.param_needs_quantization(whole, name)}
        self._operation = quantizer.get_quantize_ops()

    def wants(self, name: str) -> bool:
        """Return whether transformers would quantize a parameter of the model."""
        return name in self._wanted

    def made_of(self, key: str, tensor: Tensor) -> dict[str, Tensor]:
        """Return the quantized tensor and its scales, ``KEY_scale_inv``; unchanged if blocks do not fit."""
        return self._operation.convert({key: tensor})
