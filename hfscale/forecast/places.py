"""What the pipeline ranks of a plan have: layers, ends of the model, neighbours."""

from math import prod

from ..estimate.job import Job
from ..estimate.model_shape import ModelShape
from ..estimate.recompute import is_matrix
from ..estimate.traffic import Place
from ..plan import Plan


def layers_of(plan: Plan) -> list[int]:
    """How many layers each pipeline rank has."""
    if plan.stages is None:
        return [len(plan.layers)]
    ranks = range(plan.layout.size("pp"))
    return [sum(len(stage.layers) for stage in plan.stages.of_rank(rank)) for rank in ranks]


def places_of(plan: Plan, shape: ModelShape, job: Job) -> list[Place]:
    """What each pipeline rank has."""
    inside = tuple(f"{layer}." for layer in plan.layers)
    home = () if plan.stages is None else plan.stages.ranks
    found = []
    for rank, layers in enumerate(layers_of(plan)):
        held = [plan.by_name[name] for name in plan.local_names(rank) if is_matrix(plan, name)]
        tables = [planned.model_shape({"pp": rank}) for planned in held if not planned.name.startswith(inside)]
        own = [stage for stage, where in enumerate(home) if where == rank]
        found.append(
            Place(
                layers=layers,
                embedding=plan.stages is None or 0 in own,
                head=plan.head is not None and plan.is_local(rank, plan.head),
                forward=sum(stage + 1 < len(home) and home[stage + 1] != rank for stage in own),
                backward=sum(stage > 0 and home[stage - 1] != rank for stage in own),
                layer_weights=layers * shape.held(job.tp, job.ep),
                table_weights=sum(map(prod, tables)),
            )
        )
    return found
