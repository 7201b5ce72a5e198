"""Expert parallelism: each rank holds whole experts, and ranks exchange tokens; routing and load balancing."""

from .load_report import ExpertLoad, ExpertLoadHistory, LayerLoad, expert_load
from .mixture import Mixture
from .part import ExpertParallel, ExpertRouting
from .replay import RouteReplay, record_routes
