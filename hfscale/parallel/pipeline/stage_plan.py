"""Split a model into pipeline stages: decide which layers and which other modules each stage holds.

Stages are balanced by the FLOPs and parameters of the model's parts, which are counted from shapes on the meta device,
without weights or a run.
"""

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from ...plan.drafting.boundary_modules import ALONE, tensors_of
from ...plan.drafting.draft import Draft, Ranks
from ...plan.feature_plans import TowersPlan
from ...plan.stages import Stage, StagePlan, Tie, place_stages
from .stage_costs import LayerCosts, layer_costs
from .stage_inputs import StageInputs, find_stacks, stage_problem, trace, trace_stacks


def plan_stages(draft: Draft) -> None:
    """Split the draft's layers into the stages of its layout; record problems if this is not possible."""
    layout = draft.layout
    layers = draft.stack
    if layout.pp == 1:
        _check_stage_layers(draft)
        return
    # a rank has only some layers, so the model cannot be called without train_step
    if draft.no_step:
        stage_problem(
            draft,
            "train_step does not run its loss (only that of causal language models with a Linear head), and nothing "
            f"else runs stages: {draft.no_step}",
        )
    virtual = int(layout.virtual_stages or 1)
    count = layout.pp * virtual
    lists = _lists(draft, layers, count)
    if lists is None:
        return
    ranks: Ranks | None = draft.ranks
    if ranks is None:
        ranks = place_stages(str(layout.pipeline_schedule), layout.pp, virtual)
    if len(ranks) != count:
        stage_problem(
            draft,
            f"the schedule has {len(ranks)} stages, and the layout {count}",
            f"a schedule of {count} stages",
        )
        return
    stacks = find_stacks(draft, lists) if len(lists) > 1 else None
    if draft.problems:
        return
    passage = trace(draft, lists[0]) if stacks is None else trace_stacks(draft, lists, stacks)
    if passage is None:
        return
    costs = layer_costs(
        draft.model, layers, passage.before, passage.after, passage.shared, beside=passage.beside
    )
    first = _layers_with_pictures(draft, len(layers), count)
    if draft.problems:
        return
    counts = layout.stage_layers or costs.balanced(count, first)
    draft.stages = replace(
        _stages(draft, lists[0], passage, costs, counts, ranks),
        stacks=stacks,
    )


def _check_stage_layers(draft: Draft) -> bool:
    """Return whether the layout's ``stage_layers`` (the number of layers of each stage) adds up to the model's number
    of layers; record a problem if not.
    """
    asked = draft.layout.stage_layers
    layers = draft.stack
    if asked is None or sum(asked) == len(layers):
        return True
    draft.problem(
        f"stage_layers={list(asked)} adds up to {sum(asked)} layers, and {type(draft.model).__name__} has "
        f"{len(layers)}: use numbers that sum up to {len(layers)}, or leave stage_layers out for a balanced split"
    )
    return False


def _lists(
    draft: Draft,
    layers: list[str],
    count: int,
) -> list[str] | None:
    """Return the names of the lists of layers to divide into stages: one list, or those of encoder and decoder. If
    there are problems, add them to ``draft`` and return ``None``.
    """
    lists = list(dict.fromkeys(layer.rpartition(".")[0] for layer in layers))
    if len(lists) > 1 and not getattr(draft.config, "is_encoder_decoder", False):
        stage_problem(
            draft,
            f"stages need one list of layers, and there are {len(lists)} ({', '.join(lists)})",
        )
    elif not lists or not all(isinstance(draft.modules[name], nn.ModuleList) for name in lists):
        stage_problem(
            draft, "no list of layers was found", "pp_size=1, or a blueprint that names it"
        )
    elif sum(len(draft.modules[name]) for name in lists) != len(layers):
        stage_problem(
            draft, f"layers in {', '.join(lists)} share parameters with the rest of the model"
        )
    elif inside := _crosses_borders(draft):
        stage_problem(draft, *inside)
    elif _check_stage_layers(draft) and count > len(layers):
        _too_many(draft, len(layers))
    return None if draft.problems else lists


def _crosses_borders(draft: Draft) -> tuple[str, str] | None:
    """Return why the layers cannot be divided into stages that exchange only hidden states, and what to use instead;
    ``None`` if they can.
    """
    towers = draft.feature(TowersPlan)
    if towers is not None and towers.read_inside and not towers.first_layers:
        inputs = ", ".join(towers.read_inside)
        return f"its towers' outputs are read inside its layers ({inputs}){ALONE}", "pp_size=1"
    if getattr(draft.config, "output_router_logits", False):
        what = "output_router_logits=True makes a loss of the router logits of all stages"
        return what, "config.output_router_logits = False, or pp_size=1"
    for name in draft.layer_drops()[:1]:
        what = f"{name}={getattr(draft.config, name)} skips layers at random, also those at the ends of stages"
        return what, f"config.{name} = 0, or pp_size=1"
    return None


def _layers_with_pictures(draft: Draft, layers: int, stages: int) -> int:
    """Return how many layers must be on the first stage of a model that adds images after each of its first layers."""
    towers = draft.feature(TowersPlan)
    asked = draft.layout.stage_layers
    first = 0 if towers is None else towers.first_layers
    if asked is not None and asked[0] < first:
        stage_problem(
            draft,
            f"images are added after each of its first {first} layers, which must be on the first stage, but "
            f"stage_layers={list(asked)} has {asked[0]} on that stage",
            f"at least {first} as the first of stage_layers",
        )
    elif asked is None and first + stages - 1 > layers:
        most = layers - first + 1
        stage_problem(
            draft,
            f"images are added after each of its first {first} layers, which must be on the first of {stages} stages, "
            f"but it has only {layers} layers",
            f"at most {most} stages (pp_size x virtual_stages)" if most > 1 else "pp_size=1",
        )
    return first


def _too_many(draft: Draft, layers: int) -> None:
    virtual = int(draft.layout.virtual_stages or 1)
    most = layers // virtual
    asked = f"pp_size={draft.layout.pp}"
    fits = f"pp_size 1 to {most}" if most > 1 else "pp_size=1"
    if virtual > 1:
        asked = f"{asked} x virtual_stages={virtual}"
        fits = f"{fits} with virtual_stages={virtual if most else 1}"
    many = f"{layers} layer{'s' if layers > 1 else ''}"
    draft.problem(
        f"{asked} asks for more stages than the {many} of {draft.config.model_type!r}: use {fits}"
    )


def _stages(
    draft: Draft,
    layer_list: str,
    passage: StageInputs,
    costs: LayerCosts,
    counts: Sequence[int],
    ranks: Ranks,
) -> StagePlan:
    stages = []
    start = 0
    holders: dict[int, list[int]] = {}
    stage_costs = costs.of_stages(counts)
    for index, (count, cost) in enumerate(zip(counts, stage_costs, strict=True)):
        own = draft.layers[start : start + count]
        before = passage.before if index == 0 else ()
        after = passage.after if index == len(counts) - 1 else ()
        modules = tuple(dict.fromkeys((*passage.shared, *before, *passage.beside_all(own), *after)))
        held: dict[int, int] = {}
        for name in (*own, *modules):
            held |= tensors_of(draft.model, name)
        for tensor in held:
            holders.setdefault(tensor, []).append(index)
        stages.append(
            Stage(
                index,
                ranks[index],
                tuple(own),
                modules,
                sum(held.values()),
                cost.flops,
            )
        )
        start += count
    names: dict[int, list[str]] = {}  # id of a tensor -> all its names, in the model's order
    for name, parameter in draft.named():
        names.setdefault(id(parameter), []).append(name)
    return StagePlan(
        stages=tuple(stages),
        everywhere=passage.everywhere,
        owner=layer_list.rpartition(".")[0],
        layer_list=layer_list,
        returns=passage.returns,
        module_returns=tuple(
            (name, passage.item_returns[name])
            for name in dict.fromkeys(
                name for stage in stages for name in (*stage.layers, *stage.modules)
            )
            if name in passage.item_returns
        ),
        ties=tuple(
            Tie(tuple(known), tuple(holders[key]))
            for key, known in names.items()
            if len(holders[key]) > 1
        ),
        work=tuple(cost.work() for cost in stage_costs),
        loans=passage.loans,
    )
