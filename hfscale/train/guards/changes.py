"""Refuse calls that would change or copy a model without its plan."""

from typing import Any

from ..._compat.transformers.classes import class_name
from ...config.parallel import ParallelConfig
from ...errors import ConfigError


def refuse_changes(model: Any, layout: ParallelConfig) -> None:
    """Replace ``resize_token_embeddings`` and ``copy.deepcopy`` of a model by errors that say what to do instead."""
    kind = class_name(model)

    def resize(new_num_tokens: int | None = None, *_: Any, **__: Any) -> Any:
        if new_num_tokens in (None, model.config.get_text_config().vocab_size):
            return model.get_input_embeddings()  # as transformers does if nothing changes
        raise ConfigError(
            f"resize_token_embeddings({new_num_tokens}) would change this {kind} behind the back of its plan, by which "
            "its loss is computed and its weights are saved. Resize it while it is loaded: "
            f"hfscale.from_pretrained(directory, parallel=..., resize_token_embeddings={new_num_tokens}); "
            "hfscale.parallelize(model, parallel) takes a resized model from memory"
        )

    def deepcopy(_: Any) -> Any:
        raise ConfigError(
            f"{kind} is spread over {layout.describe()}, and a copy of this rank's part has no processes to compute "
            "with: build a second one with hfscale.from_pretrained(path, parallel=...). For an average of its "
            "weights, or to go back to them, clone model.state_dict()'s tensors on every rank"
        )

    model.resize_token_embeddings = resize
    if layout.total_size > 1:
        model.__deepcopy__ = deepcopy
