"""Layouts of few ranks that tests run by name."""

from typing import Any

LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "tp2": {"tp_size": 2},
    "apart": {"tp_size": 2, "overlap": False},
    "sequence": {"tp_size": 2, "sequence_parallel": True},
    "regather": {"tp_size": 2, "sequence_parallel": True, "sequence_regather": True},
    "1f1b": {"pp_size": 2},
    "zbv": {"pp_size": 2, "pipeline_schedule": "zbv"},
    "pipedream": {"pp_size": 2, "pipeline_schedule": "pipedream_2bw"},
    "shard2": {"dp_shard_size": 2},
    "replicate2": {"dp_replicate_size": 2},
    "ep2": {"ep_size": 2},
    "ep2, tp2": {"ep_size": 2, "tp_size": 2},
    "cp2": {"cp_size": 2},
    "pp2, tp2": {"pp_size": 2, "tp_size": 2, "sequence_parallel": True},
}


OF_ADAPTERS: dict[str, dict[str, Any]] = {
    "tp2": {"tp_size": 2},
    "sp2": {"tp_size": 2, "sequence_parallel": True},
    "tp4": {"tp_size": 4},
    "shard2": {"dp_shard_size": 2},
    "replicate2": {"dp_replicate_size": 2},
    "pp2": {"pp_size": 2, "num_microbatches": 2},
    "tp2-shard2": {"tp_size": 2, "dp_shard_size": 2},
    "tp2-pp2": {"tp_size": 2, "pp_size": 2, "num_microbatches": 2},
}
"""Those over which types of adapters are compared with one process."""


def named(*names: str) -> dict[str, dict[str, Any]]:
    """Those of these names."""
    return {name: LAYOUTS[name] for name in names}
