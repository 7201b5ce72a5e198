"""Cut a model into pipeline stages: which layers and which other modules each of them holds."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from .._host.torch import passes_otherwise
from .._host.transformers.classes import input_embedding
from ..config import ParallelConfig
from ..errors import PlanError
from ..plan.stages import Stage, StagePlan, Tie, place_stages
from ..plan.towers import TowersPlan
from .around import items_around, tensors_of
from .costs import BATCH_TOKENS, SEQUENCE, Costs, layer_costs
from .draft import Draft, Ranks
from .layers import find_layers
from .probe import ALONE, PassageProbe, tiny_model
from .remembered import Remembered, said_by
from .resolve import find_blueprint

known = Remembered[PassageProbe]()


def assign_stages(
    model: Any,
    layout: ParallelConfig,
    ranks: Ranks | None = None,
    *,
    batch_tokens: int = BATCH_TOKENS,
    sequence: int = SEQUENCE,
) -> StagePlan:
    """Cut a stock Hugging Face model, whole and unpatched, into ``pp_size * virtual_stages`` stages.

    The layers are shared out as ``layout.stage_layers`` says, or such that the most expensive stage costs least. What
    the model does before its first layer is on the first stage, what it does after the last one is on the last stage.
    On all of them are modules without parameters, and those whose results all layers read (inputs per layer, a table of
    positions): nothing but the stream between layers travels.

    Args:
        model: on any device; the meta device is enough.
        ranks: the rank of each stage, where the schedule is a file; see :func:`hfscale.plan.stages.place_stages`.
        batch_tokens: tokens of one optimizer step that go through the pipeline, which weighs FLOPs against updates.
        sequence: tokens in one sequence, which attention's share depends on.

    Raises:
        PlanError: the model has no single list of layers with one stream through it, or not enough layers; every
            problem is listed.
        ConfigError: the schedule cannot have these stages.
    """
    draft = Draft(model, layout)
    try:
        blueprint = find_blueprint(model, may_infer=False)
    except PlanError:
        blueprint = None  # the host knows which classes are layers
    plan = plan_stages(draft, find_layers(draft, blueprint), ranks, batch_tokens=batch_tokens, sequence=sequence)
    if plan is None or draft.problems:
        raise PlanError(draft.report())
    return plan


def plan_pipeline(draft: Draft) -> None:
    """Cut the draft's layers into the stages that its layout asks for."""
    if draft.layout.size("pp") == 1:
        check_stage_layers(draft, draft.layers)
        return
    if draft.no_step:  # and nobody can call the model: a rank has but a part of it
        stage_problem(
            draft,
            "train_step does not run its loss (only that of causal language models with a Linear head), and nothing "
            f"else runs stages: {draft.no_step}",
        )
    draft.stages = plan_stages(draft, draft.layers, draft.ranks)


def plan_stages(
    draft: Draft,
    layers: list[str],
    ranks: Ranks | None = None,
    *,
    batch_tokens: int = BATCH_TOKENS,
    sequence: int = SEQUENCE,
) -> StagePlan | None:
    """The same for a draft whose layers are known; ``None`` where that fails, for reasons that the draft then has."""
    layout = draft.layout
    virtual = int(layout.virtual_stages or 1)
    count = layout.size("pp") * virtual
    layer_list = _single_list(draft, layers, count)
    if layer_list is None:
        return None
    places = place_stages(str(layout.pipeline_schedule), layout.size("pp"), virtual) if ranks is None else ranks
    if len(places) != count:
        stage_problem(draft, f"the schedule has {len(places)} stages, and the layout {count}", "a schedule that fits")
        return None
    passage = _trace(draft, layer_list)
    if passage is None:
        return None
    costs = layer_costs(
        draft.model,
        layers,
        passage.before,
        passage.after,
        passage.shared,
        batch_tokens=batch_tokens,
        sequence=sequence,
    )
    counts = layout.stage_layers or costs.balanced(count)
    return _stages(draft, layers, layer_list, passage, costs, counts, places)


@dataclass(frozen=True)
class _Passage:
    """What lies around the layers: names of modules and parameters, and what the modules return."""

    before: tuple[str, ...]
    after: tuple[str, ...]
    shared: tuple[str, ...]  # what all layers read
    everywhere: tuple[str, ...]
    returns: int | None
    item_returns: dict[str, int | None]


def check_stage_layers(draft: Draft, layers: list[str]) -> bool:
    """Note a problem where ``stage_layers`` does not add up to the layers that there are; True where it does."""
    asked = draft.layout.stage_layers
    if asked is None or sum(asked) == len(layers):
        return True
    draft.problem(
        f"stage_layers={list(asked)} shares out {sum(asked)} layers, and {type(draft.model).__name__} has "
        f"{len(layers)}: use numbers that sum up to {len(layers)}, or leave stage_layers out for a balanced split"
    )
    return False


def _single_list(draft: Draft, layers: list[str], count: int) -> str | None:
    """The name of the list that holds all layers, where there is one and it can be cut into ``count``."""
    lists = list(dict.fromkeys(layer.rpartition(".")[0] for layer in layers))
    if getattr(draft.config, "is_encoder_decoder", False):
        stage_problem(
            draft, "an encoder-decoder has two streams, and its decoder's layers all read the encoder's output"
        )
    elif len(lists) > 1:
        stage_problem(draft, f"stages are cut from one list of layers, and there are {len(lists)} ({', '.join(lists)})")
    elif not lists or not isinstance(draft.modules[lists[0]], nn.ModuleList):
        stage_problem(draft, "no list of layers was found", "pp_size=1, or a blueprint that names it")
    elif len(draft.modules[lists[0]]) != len(layers):
        stage_problem(draft, f"layers in {lists[0]} share parameters with the rest of the model")
    elif inside := _crosses_borders(draft):
        stage_problem(draft, *inside)
    elif check_stage_layers(draft, layers) and count > len(layers):
        _too_many(draft, len(layers))
    if draft.problems:
        return None
    return lists[0]


def _crosses_borders(draft: Draft) -> tuple[str, str] | None:
    """What layers of several stages would need of one another besides the stream, and what to do."""
    towers = draft.feature(TowersPlan)
    if towers is not None and towers.read_inside:
        inputs = ", ".join(towers.read_inside)
        return f"what its towers make of pictures is read inside of its layers ({inputs}){ALONE}", "pp_size=1"
    if getattr(draft.config, "output_router_logits", False):
        what = "output_router_logits=True makes a loss of what the layers of all stages compute"
        return what, "config.output_router_logits = False, or pp_size=1"
    for name in draft.layer_drops()[:1]:
        what = f"{name}={getattr(draft.config, name)} leaves out layers at random, at a border of stages too"
        return what, f"config.{name} = 0, or pp_size=1"
    return None


def _too_many(draft: Draft, layers: int) -> None:
    virtual = int(draft.layout.virtual_stages or 1)
    asked = f"pp_size={draft.layout.size('pp')}" + (f" x virtual_stages={virtual}" if virtual > 1 else "")
    most = layers // virtual
    fits = f"pp_size 1 to {most}" if most > 1 else "pp_size=1"
    with_virtual = f" with virtual_stages={virtual if most else 1}" if virtual > 1 else ""
    draft.problem(
        f"{asked} exceeds the {layers} layer{'s' if layers > 1 else ''} of {draft.config.model_type!r}: use "
        f"{fits}{with_virtual}"
    )


def stage_problem(draft: Draft, what: str, instead: str = "pp_size=1") -> None:
    """Note why a model cannot be cut into stages."""
    draft.problem(f"pp_size={draft.layout.size('pp')} does not fit {type(draft.model).__name__}: {what}: use {instead}")


def _trace(draft: Draft, layer_list: str) -> _Passage | None:
    """Run the model, or a tiny clone where its code looks at values, and sort what lies around the layers."""
    tensors = {item: set(tensors_of(draft.model, item)) for item in items_around(draft.model, layer_list)}
    if any(passes_otherwise(module) for module in draft.modules.values()):
        probe = _pass_through(draft.model, layer_list, list(tensors))
    else:
        key = _structure(draft, layer_list)
        probe = known.answer(key, lambda: _pass_through(draft.model, layer_list, list(tensors)))
    if probe.failure:
        stage_problem(draft, f"it cannot be traced, so what comes before its layers is unknown ({probe.failure})")
        return None
    for obstacle in probe.obstacles:
        stage_problem(draft, obstacle)
    _refuse_shared_pictures(draft, probe.shared)
    placed = {item: _phases(draft, probe, item, tensors) for item, held in tensors.items() if held}
    if draft.problems:
        return None
    used = {item: order for order, item in enumerate(probe.phases)}
    ordered = sorted(placed, key=lambda item: used.get(item, len(used)))
    return _Passage(
        before=tuple(item for item in ordered if "before" in placed[item] and item not in probe.shared),
        after=tuple(item for item in ordered if "after" in placed[item]),
        shared=tuple(item for item in ordered if item in probe.shared),
        everywhere=tuple(item for item, held in tensors.items() if not held),
        returns=probe.returns,
        item_returns=probe.item_returns,
    )


def _structure(draft: Draft, layer_list: str) -> Hashable:
    """What a run without values depends on: the config, classes of modules by name, and which names share a tensor."""
    modules = tuple((name, type(module), type(module).forward) for name, module in draft.modules.items())
    firsts: dict[int, str] = {}
    named = draft.model.named_parameters(remove_duplicate=False)
    tensors = tuple((name, firsts.setdefault(id(p), name), p.dtype, p.device.type) for name, p in named)
    return said_by(draft.config), layer_list, modules, tensors


def _pass_through(model: Any, layer_list: str, items: list[str]) -> PassageProbe:
    probe = PassageProbe(model, layer_list, items)
    clone = tiny_model(model) if probe.failure else None
    return probe if clone is None else PassageProbe(clone, layer_list, items)


def _refuse_shared_pictures(draft: Draft, shared: set[str]) -> None:
    """Where all layers read what tokens are looked up as, every stage looks them up, and pictures are on the first."""
    embedding = input_embedding(draft.model)
    if draft.feature(TowersPlan) is not None and any(draft.modules.get(item) is embedding for item in shared):
        stage_problem(draft, f"all of its layers read what goes into the first, pictures included{ALONE}")


def _phases(draft: Draft, probe: PassageProbe, item: str, tensors: dict[str, set[int]]) -> set[str]:
    """When ``item`` is used; refuses what cannot be on one stage, or on all."""
    phases, held, towers = probe.phases.get(item, set()), tensors[item], draft.feature(TowersPlan)
    reached = {tensor for used in probe.phases for tensor in tensors.get(used, ())}
    if "between" in phases:
        stage_problem(draft, f"{item} is used between layers, so every stage would need it")
    elif not phases and towers is not None and towers.holds(item):
        return {"before"}
    elif not phases and not held <= reached:
        stage_problem(draft, f"{item} has no part in a pass over tokens, so it belongs to no stage")
    elif probe.item_returns.get(item) == 0:
        stage_problem(draft, f"{item} returns neither a tensor nor a tuple that begins with one")
    elif not phases:  # a second name for what is used under another one
        twin = next(other for other in probe.phases if held & tensors.get(other, set()))
        return probe.phases[twin]
    return phases


def _stages(
    draft: Draft,
    layers: list[str],
    layer_list: str,
    passage: _Passage,
    costs: Costs,
    counts: Sequence[int],
    ranks: Ranks,
) -> StagePlan:
    sizes = {id(parameter): parameter.numel() for _, parameter in draft.named()}
    stages, start = [], 0
    holders: dict[int, list[int]] = {}
    each = costs.of_stages(counts)
    for index, (count, cost) in enumerate(zip(counts, each, strict=True)):
        own = layers[start : start + count]
        before = passage.before if index == 0 else ()
        after = passage.after if index == len(counts) - 1 else ()
        modules = tuple(dict.fromkeys((*passage.shared, *before, *after)))
        held = {tensor for name in (*own, *modules) for tensor in tensors_of(draft.model, name)}
        for tensor in held:
            holders.setdefault(tensor, []).append(index)
        parameters = sum(sizes[tensor] for tensor in held)
        stages.append(Stage(index, ranks[index], tuple(own), modules, parameters, cost.flops))
        start += count
    names: dict[int, list[str]] = {}  # in the model's order
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
            for name in dict.fromkeys((*passage.shared, *passage.before, *passage.after))
            if name in passage.item_returns
        ),
        ties=tuple(
            Tie(tuple(known), tuple(holders[tensor])) for tensor, known in names.items() if len(holders[tensor]) > 1
        ),
        work=tuple(cost.work(costs.batch_tokens) for cost in each),
    )
