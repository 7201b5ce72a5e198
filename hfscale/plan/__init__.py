"""Hold the plan as frozen data: how every parameter and module of a model is distributed over ranks by a layout."""

from .cut import Cut, write_share
from .modules import AdapterParameter, BlockPlan, ExpertsPlan, SequencePlan
from .parameter import ParameterPlan
from .plan import Plan
from .stages import Stage, StagePlan, balance
