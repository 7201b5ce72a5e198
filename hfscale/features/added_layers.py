"""List the layers that features add to stock models, for whoever has a config or a file and no model yet."""

from collections.abc import Iterable

from .._compat.transformers.added_layers import AddedLayers
from .._compat.transformers.prediction import PREDICTION
from ..config.options import Options
from ..errors import ConfigError

ADDED_LAYERS = (PREDICTION,)


def asked_for(options: Options) -> list[AddedLayers]:
    """Return the layers that ``options`` ask for."""
    return [added for added in ADDED_LAYERS if getattr(options, added.option) is not None]


def named_in(names: Iterable[str]) -> list[AddedLayers]:
    """Return the layers of which there are tensors among ``names``, those of a model."""
    prefixes = {name.partition(".")[0] for name in names}
    return [added for added in ADDED_LAYERS if added.name in prefixes]


def refuse_adapters(keys: Iterable[str], what: str) -> None:
    """Refuse adapters of added layers where the model that transformers builds is all there is."""
    for added in ADDED_LAYERS:
        if any(f".{added.name}.layers." in key for key in keys):
            raise ConfigError(
                f"{what} is of {added.words} too, which transformers leaves out: load both with "
                f"hfscale.from_pretrained(base, peft_config=adapter, {added.option}=...), and call "
                "hfscale.merge_and_unload"
            )
