"""Shorten and match names of modules and parameters that repeat in every layer."""


def wild_name(name: str) -> str:
    """Replace indices by ``*`` (``model.layers.3.mlp`` -> ``model.layers.*.mlp``), to name a module of all layers."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
