"""The pure part: a model's config and a layout in, a frozen :class:`Plan` out."""

from .blueprint import Block, Blueprint, find_blueprint
from .build import build_plan
from .cut import Cut, cut_shape, write_share
from .entry import as_python, describe_blueprint
from .families import FAMILIES
from .infer import infer_blueprint
from .plan import LOSSES, BlockPlan, ParameterPlan, Plan, StreamPlan
from .stream import share_evenly
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
    "StreamPlan",
    "as_python",
    "build_plan",
    "cut_shape",
    "describe_blueprint",
    "find_blueprint",
    "infer_blueprint",
    "render",
    "share_evenly",
    "to_json",
    "translate_host_plan",
    "write_share",
]
