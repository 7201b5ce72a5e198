"""List the layers that features add to stock models (MTP layers, for example), for callers that have a config or a file
but no model yet.
"""

from collections.abc import Iterable

from .._compat.transformers.added_layers import AddedLayers
from .._compat.transformers.prediction import PREDICTION
from ..config.options import Options
from ..errors import ConfigError

ADDED_LAYERS = (PREDICTION,)


def asked_for(options: Options) -> list[AddedLayers]:
    """Return the layers that ``options`` ask hfscale to add to the stock model (MTP layers, for example)."""
    return [added for added in ADDED_LAYERS if getattr(options, added.option) is not None]


def named_in(names: Iterable[str]) -> list[AddedLayers]:
    """Return those layers that hfscale may add to a stock model (MTP layers, for example) that have tensors among
    ``names``, the tensor names of a model.
    """
    prefixes = {name.partition(".")[0] for name in names}
    return [added for added in ADDED_LAYERS if added.name in prefixes]


def refuse_adapters(keys: Iterable[str], what: str) -> None:
    """Raise :class:`ConfigError` if ``keys``, an adapter's keys, name layers that hfscale adds to stock models (MTP
    layers, for example). Callers load the adapter onto transformers' model, which lacks such layers. ``what`` names the
    adapter in the message.
    """
    for added in ADDED_LAYERS:
        if any(f".{added.name}.layers." in key for key in keys):
            raise ConfigError(
                f"{what} has weights for {added.words}, which transformers' model does not have: load model and "
                f"adapter with hfscale.from_pretrained(base, peft_config=adapter, {added.option}=...), and merge them "
                "with hfscale.merge_and_unload"
            )
