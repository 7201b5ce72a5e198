"""The pure part: a model's config and a layout in, a frozen :class:`Plan` out."""

from .assign import assign_stages
from .blueprint import Block, Blueprint, find_blueprint
from .build import build_plan
from .costs import Cost, Costs, layer_costs
from .cut import Cut, cut_shape, write_share
from .entry import as_python, describe_blueprint
from .families import FAMILIES
from .infer import infer_blueprint
from .plan import LOSSES, AdapterParameter, BlockPlan, ExpertsPlan, ParameterPlan, Plan, StreamPlan
from .stages import Stage, StagePlan, Tie, balance, place_stages
from .stream import share_evenly
from .table import render, to_json
from .translate import translate_host_plan

__all__ = [
    "FAMILIES",
    "LOSSES",
    "AdapterParameter",
    "Block",
    "BlockPlan",
    "Blueprint",
    "Cost",
    "Costs",
    "Cut",
    "ExpertsPlan",
    "ParameterPlan",
    "Plan",
    "Stage",
    "StagePlan",
    "StreamPlan",
    "Tie",
    "as_python",
    "assign_stages",
    "balance",
    "build_plan",
    "cut_shape",
    "describe_blueprint",
    "find_blueprint",
    "infer_blueprint",
    "layer_costs",
    "place_stages",
    "render",
    "share_evenly",
    "to_json",
    "translate_host_plan",
    "write_share",
]
