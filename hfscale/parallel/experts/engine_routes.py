"""Convert routing decisions of inference engines (``--enable-return-routed-experts``) for replay in training.

vLLM and SGLang return the experts of every token that they fed to the model: the prompt, and the sampled tokens except
the last one, after which no forward pass ran. Their arrays have an entry for each layer, zeros for dense layers. The
result is passed to ``train_step(..., routes=)``.
"""

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...errors import ConfigError
from ...models.fields import text_config
from ...models.module_kinds import experts_per_token
from ...train.runtime import runtime_of
from .replay import replayed


def routes_from_vllm(model: nn.Module, outputs: Sequence[Any], attention_mask: Tensor) -> Tensor:
    """Convert the experts that vLLM chose for each token of a batch to the argument ``routes=`` of
    :func:`hfscale.train_step`.

    Args:
        model: the loaded model, whose MoE layers replay the choices.
        outputs: ``routed_experts`` of each row: an array ``[tokens, layers, k]`` or, from a server, base64 of a
            ``.npy`` file. vLLM 0.21 and 0.22 return the prompt's array separately: ``np.concatenate`` both arrays.
        attention_mask: ``[rows, tokens]``, 1 for prompt and completion; padding may be on any side.

    Returns:
        ``[rows, tokens, MoE layers, k]``: indices of experts, and -1 for last tokens and padding, for which the
        model's router chooses in training.

    Raises:
        ConfigError: the arrays' numbers of tokens or layers do not match the rows or the model.
    """
    arrays = [
        np.load(io.BytesIO(base64.b64decode(output))) if isinstance(output, str) else output
        for output in outputs
    ]
    layers = [int(planned.layer.rpartition(".")[2]) for planned in replayed(runtime_of(model))]
    if len(arrays) != len(attention_mask):
        raise ConfigError(
            "outputs must have one entry, the experts that an engine recorded, for each row of attention_mask, got "
            f"{len(arrays)} entries for {len(attention_mask)} rows: give one entry for each row"
        )
    k = arrays[0].shape[-1] if arrays else experts_per_token(runtime_of(model).model.config) or 1
    routes = torch.full(
        (*attention_mask.shape, len(layers), k),
        -1,
        dtype=torch.int32,
    )
    for row, (array, mask) in enumerate(
        zip(
            arrays,
            attention_mask.cpu().bool(),
            strict=True,
        )
    ):
        places = mask.nonzero().squeeze(-1)
        if len(array) not in (len(places), len(places) - 1):
            raise ConfigError(
                f"row {row} of attention_mask has {len(places)} tokens, but the engine recorded the experts of "
                f"{len(array)} tokens: pass the experts that it recorded for prompt and completion, with or without "
                "the last token"
            )
        if array.shape[1] != len(layers) and array.shape[1] <= layers[-1]:
            raise ConfigError(
                f"row {row} has the experts of {array.shape[1]} layers, but the model has {layers[-1] + 1} layers or "
                "more: pass experts that an engine recorded with this model"
            )
        own = array if array.shape[1] == len(layers) else array[:, layers]
        routes[row, places[: len(array)]] = torch.from_numpy(own.astype(np.int32))
    return routes


def routes_from_sglang(model: nn.Module, outputs: Sequence[Any], attention_mask: Tensor) -> Tensor:
    """Convert the experts that SGLang chose for each token of a batch to the argument ``routes=`` of
    :func:`hfscale.train_step`.

    Args:
        model: the loaded model, whose MoE layers replay the choices.
        outputs: for each row, ``meta_info`` (for a server's choice ``sgl_ext``), or its entry ``routed_experts``: the
            base64 text, or the flat array that the text encodes.
        attention_mask: as for :func:`hfscale.routes_from_vllm`, which also describes the result.
    """
    config = runtime_of(model).model.config
    arrays = []
    for output in outputs:
        told = output if isinstance(output, Mapping) else {"routed_experts": output}
        values = told["routed_experts"]
        dtype = told.get("routed_experts_dtype") or "int32"
        flat = (
            np.frombuffer(base64.b64decode(values), dtype)
            if isinstance(values, str)
            else np.asarray(values)
        )
        arrays.append(
            flat.reshape(-1, text_config(config).num_hidden_layers, experts_per_token(config) or 1)
        )
    return routes_from_vllm(model, arrays, attention_mask)
