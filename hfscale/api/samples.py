"""Compute a model's output for a few tokens, to measure how much two models differ."""

from typing import Any

from torch import Tensor, nn

from .._compat.transformers.classes import takes_argument


def reads_tokens(model: nn.Module) -> bool:
    """Return whether a model's main input is tokens, not pictures or sound."""
    return getattr(model, "main_input_name", "input_ids") == "input_ids"


def answer_to(model: Any, ids: Tensor) -> Tensor:
    """Return the model's logits for the tokens ``ids``, or its first output if it has no logits. In an encoder-decoder
    model, the encoder and the decoder both get ``ids``.
    """
    given = {"input_ids": ids}
    if model.config.is_encoder_decoder and takes_argument(model, "decoder_input_ids"):
        given["decoder_input_ids"] = ids
    output = model(**given)
    answer = getattr(output, "logits", None)
    sample: Tensor = output[0] if answer is None else answer
    return sample.detach()
