"""The pure part: a model's config and a layout in, a frozen :class:`Plan` out."""

from .blueprint import Block, Blueprint, find_blueprint
from .build import build_plan
from .cut import Cut, cut_shape, write_share
from .families import FAMILIES
from .plan import LOSSES, BlockPlan, ParameterPlan, Plan
from .table import render, to_json
from .translate import translate_host_plan

__all__ = [
    "FAMILIES",
    "LOSSES",
    "Block",
    "BlockPlan",
    "Blueprint",
    "Cut",
    "ParameterPlan",
    "Plan",
    "build_plan",
    "cut_shape",
    "find_blueprint",
    "render",
    "to_json",
    "translate_host_plan",
    "write_share",
]
