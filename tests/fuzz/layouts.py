"""Random layouts: pure."""

from random import Random
from typing import Any

_ONE_STAGE = ("gpipe", "1f1b")
_SEVERAL = ("interleaved1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv", "dualpipev")
_DELAYED = ("pipedream", "pipedream_2bw")
_AXES = ("tp", "pp", "dp_shard", "dp_replicate", "cp")


def choose_layout(random: Random, experts: bool) -> dict[str, Any]:
    """Fields of a :class:`hfscale.ParallelConfig`, which may not fit together."""
    world = random.choices((1, 2, 4, 8), (5, 55, 37, 3))[0]
    sizes = dict.fromkeys(_AXES, 1)
    for _ in range(world.bit_length() - 1):
        sizes[random.choices(_AXES, (4, 3, 2.5, 1.5, 2))[0]] *= 2
    layout: dict[str, Any] = {f"{axis}_size": size for axis, size in sizes.items() if size > 1}
    if sizes["tp"] > 1:
        if random.random() < 0.45:
            layout["sequence_parallel"] = True
            if random.random() < 0.4:
                layout["sequence_regather"] = True
        if random.random() < 0.25:
            layout["overlap"] = False
    if sizes["cp"] > 1:
        layout["cp_method"] = random.choice(("auto", "gather", "ring", "heads", "heads_ring"))
    if experts and random.random() < 0.65:
        layout.update(_experts(random, sizes))
    if sizes["pp"] > 1:
        layout.update(_pipeline(random, sizes["pp"]))
    if sizes["dp_shard"] * sizes["dp_replicate"] * sizes["cp"] > 1:
        if random.random() < 0.2:
            layout["reduce_each_microbatch"] = True
        if sizes["pp"] > 1 and random.random() < 0.3:
            layout["weights_regather"] = True
    return layout


def _experts(random: Random, sizes: dict[str, int]) -> dict[str, Any]:
    ranks = sizes["tp"] * sizes["dp_shard"] * sizes["dp_replicate"] * sizes["cp"]
    if sizes["tp"] > 1 and random.random() < 0.3:  # each expert cut, and spread over data ranks
        batches = ranks // sizes["tp"]
        fits = [n for n in (1, 2, 4) if batches % n == 0]
        return {"expert_tp_size": sizes["tp"], "ep_size": random.choice(fits)}
    fits = [n for n in (2, 4, 8) if ranks % n == 0 and n % sizes["tp"] == 0]
    return {"ep_size": random.choice(fits)} if fits else {}


def _pipeline(random: Random, stages: int) -> dict[str, Any]:
    kind = random.random()
    schedule = random.choice(_ONE_STAGE if kind < 0.45 else _SEVERAL if kind < 0.95 else _DELAYED)
    chosen: dict[str, Any] = {"pipeline_schedule": schedule}
    if (
        schedule in ("interleaved1f1b", "looped_bfs", "interleaved_zero_bubble")
        and random.random() < 0.25
    ):
        chosen["virtual_stages"] = random.choice((1, 2, 3))
    if random.random() < 0.75:
        per_rank = random.choice((1, 1, 2, 2, 3)) * stages
        chosen["num_microbatches"] = (
            per_rank if random.random() < 0.8 else random.randint(1, 3 * stages)
        )
    return chosen


def stages_of(layout: dict[str, Any]) -> int:
    """Stages that need a layer each."""
    several = layout.get("pipeline_schedule") in _SEVERAL
    return int(layout.get("pp_size", 1) * layout.get("virtual_stages", 2 if several else 1))


def choose_stage_layers(random: Random, layers: int, stages: int) -> list[int]:
    """Layers of each stage, at random."""
    cuts = sorted(random.sample(range(1, layers), stages - 1))
    return [stop - start for start, stop in zip([0, *cuts], [*cuts, layers], strict=True)]
