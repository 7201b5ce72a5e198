"""Mixtures of experts: whole experts on each rank, the exchange of tokens between them, routing and balance."""

from .history import ExpertLoadHistory
from .install import install_forward_contexts
from .mixture import Mixture, install_experts
from .options import RoutingConfig
from .token_counts import ExpertLoad, LayerLoad, expert_load

__all__ = [
    "ExpertLoad",
    "ExpertLoadHistory",
    "LayerLoad",
    "Mixture",
    "RoutingConfig",
    "expert_load",
    "install_experts",
    "install_forward_contexts",
]
