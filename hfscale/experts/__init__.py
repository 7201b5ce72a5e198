"""Mixtures of experts: whole experts on each rank, and the exchange of tokens between them."""

from .mixture import Mixture, install_experts

__all__ = ["Mixture", "install_experts"]
