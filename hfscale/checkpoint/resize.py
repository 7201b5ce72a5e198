"""Change the vocabulary size of a model while it is loaded."""

import copy
from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from .._compat.transformers.classes import class_name
from ..errors import ConfigError


def resize_vocabulary(
    build: Callable[[PreTrainedConfig], Any], config: PreTrainedConfig, tokens: int
) -> tuple[PreTrainedConfig, frozenset[str]]:
    """Return the config of a model with ``tokens`` tokens, and the names of parameters with a row for each token, which
    transformers finds by resizing a model that ``build`` makes of a config on the meta device.

    Raises:
        ConfigError: the vocabulary size changes more than the numbers of rows of parameters.
    """
    before = build(copy.deepcopy(config))
    shapes = _shapes(before)
    before.resize_token_embeddings(tokens, mean_resizing=False)
    after, wanted = build(before.config), _shapes(before)
    changed = {name for name, shape in wanted.items() if shape != shapes[name]}
    fits = all(wanted[name] == (tokens, *shapes[name][1:]) for name in changed)
    if not fits or _shapes(after) != wanted or changed - dict(after.named_parameters(remove_duplicate=False)).keys():
        raise ConfigError(
            f"resize_token_embeddings={tokens}: {class_name(before)} has sizes other than rows of parameters that "
            f"depend on the number of tokens ({', '.join(sorted(changed))}): resize it with stock transformers "
            "(model.resize_token_embeddings(...); model.save_pretrained(directory)), and load that"
        )
    return before.config, frozenset(changed)


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers())
    return {name: tuple(tensor.shape) for name, tensor in named}
