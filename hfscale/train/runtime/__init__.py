"""Define the runtime object that is attached to a parallelized model: its plan, mesh, features of the layout and
executor of steps, and helpers that read them.
"""

from .forward_passes import recomputing
from .objective import Objective, StepLoss
from .runtime import Batch, Executor, Part, Runtime, find_runtime, runtime_of
from .shards import like_sharded, local_tensor, memory_of
