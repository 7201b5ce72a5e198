"""Mixtures of experts: whole experts on each rank, the exchange of tokens between them, routing and balance."""

from .history import ExpertLoadHistory
from .install import install_passes
from .load import ExpertLoad, LayerLoad, expert_load
from .mixture import Mixture, install_experts
from .options import RoutingConfig

__all__ = [
    "ExpertLoad",
    "ExpertLoadHistory",
    "LayerLoad",
    "Mixture",
    "RoutingConfig",
    "expert_load",
    "install_experts",
    "install_passes",
]
