"""What the pipeline ranks of a plan have: layers, ends of the model, neighbours."""

from math import prod

from ...plan import Plan
from .job import Job
from .recompute import trained_names
from .traffic import Place


def layers_of(plan: Plan) -> list[int]:
    """How many layers each pipeline rank has."""
    if plan.stages is None:
        return [len(plan.layers)]
    ranks = range(plan.layout.pp)
    return [sum(len(stage.layers) for stage in plan.stages.of_rank(rank)) for rank in ranks]


def places_of(plan: Plan, job: Job) -> list[Place]:
    """What each pipeline rank has."""
    return [_place(plan, job, rank, layers) for rank, layers in enumerate(layers_of(plan))]


def _place(plan: Plan, job: Job, rank: int, layers: int) -> Place:
    home = () if plan.stages is None else plan.stages.ranks
    own = [stage for stage, where in enumerate(home) if where == rank]
    here = {name: prod(plan.by_name[name].model_shape({"pp": rank})) for name in plan.local_names(rank)}
    spread, in_layers = (
        sum(entries for name, entries in here.items() if name.startswith(parts))
        for parts in (tuple(f"{each.name}." for each in plan.mixtures), tuple(f"{layer}." for layer in plan.layers))
    )
    trained, partial = _trained(plan, here)
    return Place(
        layers=layers,
        embedding=plan.stages is None or 0 in own,
        head=plan.head is not None and plan.is_local(rank, plan.head),
        forward=sum(stage + 1 < len(home) and home[stage + 1] != rank for stage in own),
        backward=sum(stage > 0 and home[stage - 1] != rank for stage in own),
        layer_weights=in_layers - spread,
        expert_weights=spread,
        table_weights=sum(here.values()) - in_layers,
        trained=trained / max(1, sum(here.values())),
        partial=partial / job.shards,
    )


def _trained(plan: Plan, here: dict[str, int]) -> tuple[int, int]:
    """Entries that train, of parameters with so many on a rank, and bytes of gradients partial over tensor ranks."""
    names = trained_names(plan) & here.keys()
    partial = [name for name in names if "tp" in plan.by_name[name].partial]
    return sum(here[name] for name in names), sum(here[name] * plan.by_name[name].dtype.itemsize for name in partial)
