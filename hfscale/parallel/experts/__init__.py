"""Expert parallelism: complete experts on each rank, the exchange of tokens between them, routing and balance."""

from .load_report import ExpertLoad, ExpertLoadHistory, LayerLoad, expert_load
from .mixture import Mixture
from .part import ExpertParallel, ExpertRouting
from .replay import RouteReplay, record_routes
