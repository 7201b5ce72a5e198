"""Keep a run's newest state in the memory of its machines, restart failed ranks in place, and rehearse failures."""

from ...extensions import Extension

_HERE = "hfscale.extras.states_in_memory"

EXTENSION = Extension(
    name="states in memory",
    exports={
        "StatesInMemory": f"{_HERE}.in_memory:StatesInMemory",
        "StatesInMemoryCallback": f"{_HERE}.callback:StatesInMemoryCallback",
        "restart_in_place": f"{_HERE}.restarts:restart_in_place",
    },
    commands={"drill": f"{_HERE}.command"},
)
