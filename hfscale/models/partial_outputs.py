"""Name config fields that request outputs of which a tensor rank has only a part."""

from typing import Any

from .fields import field, text_config

_WHY = {
    "output_attentions": "would return the attention weights of this rank's heads only",
    "output_router_logits": "adds a loss on the router that every tensor rank would count once (load the model with "
    "routing=hfscale.RoutingConfig(balance_loss=...) for one that counts once in all)",
}


def partial_output(config: Any, arguments: dict[str, Any] | None = None) -> str | None:
    """Return, in words, the requested output (by config or ``arguments``) of which a tensor rank has only a part."""
    given = arguments or {}
    for name, why in _WHY.items():
        asked = given.get(name)
        if field(text_config(config), name, False) if asked is None else asked:
            return f"{name}=True {why}"
    return None
