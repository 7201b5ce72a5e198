"""Plan expert parallelism: which modules hold experts, and how their parameters are sharded.

transformers keeps the experts of one MoE layer as a module of 3-D parameters ``[experts, ...]`` that is called as
``experts(hidden_states, top_k_index, top_k_weights)``. With expert parallelism, the module on each expert rank holds
some whole experts, and tokens are sent to the ranks of their experts (Lepikhin et al. 2020, GShard). Routers and
shared experts are sharded only over the axes other than ``ep``.
"""

from ...config.parallel import ParallelConfig
from ...models.module_kinds import holds_experts
from ...models.names import wild_name
from ...plan.cut import Cut, cut_shape
from ...plan.drafting.draft import Draft, Planned
from ...plan.modules import ExpertsPlan
from ...plan.parameter import data_cut


def plan_experts(draft: Draft) -> None:
    """Find the modules that hold experts, and plan to shard their parameters over the expert axis ``ep``."""
    size = draft.layout.ep
    mixtures = list[ExpertsPlan]()
    for name, module in draft.modules.items():
        if holds_experts(module):
            owner = next((layer for layer in draft.layers if name.startswith(f"{layer}.")), "")
            mixtures.append(ExpertsPlan(name, int(module.num_experts), owner))
    draft.mixtures = tuple(mixtures)
    if size == 1:
        return
    draft.experts = draft.mixtures
    if not draft.experts:
        draft.problem(
            f"ep_size={size} needs an experts module that is called with the indices of each token's experts "
            f"(transformers' use_experts_implementation), but {type(draft.model).__name__} has no such module: use "
            "ep_size=1"
        )
    for planned in draft.experts:
        name = planned.name
        count = planned.count
        if count % size:
            fits = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
            draft.problem(
                f"ep_size={size} does not divide the {count} experts of {wild_name(name)}: use ep_size {fits}"
            )
        for parameter, value in draft.modules[name].named_parameters(prefix=name):
            if value.ndim < 2 or value.shape[0] != count:
                draft.problem(
                    f"ep_size={size}: {wild_name(parameter)} of shape {tuple(value.shape)} has no dim of {count} "
                    "experts, so it cannot be sharded by expert: use ep_size=1"
                )
            draft.spread.add(parameter)
            if draft.tp == 1 or draft.layout.slices_tokens:
                draft.rules[parameter] = (None, ())


def expert_cuts(
    layout: ParallelConfig,
    shape: tuple[int, ...],
    cuts: list[Cut],
) -> list[Cut]:
    """Return all cuts of an expert parameter: first over the expert axis, then ``cuts`` over the tensor axis, then over
    the data axis. Data ranks get different experts or, if a rank's experts do not divide evenly, different rows of
    every expert.
    """
    cuts = [Cut("ep", 0, layout.ep), *cuts]
    shards = layout.size("edp_shard")
    by_rows = False
    if shards > 1:
        local = cut_shape(shape, cuts, {})
        by_rows = local[0] % shards != 0 and local[1] % shards == 0
    return [*cuts, *data_cut(layout, spread=True, dim=1 if by_rows else 0)]


def has_mixtures(model: Planned) -> bool:
    """Return whether layers have experts."""
    return bool(model.plan.mixtures)


def exchanges_tokens(model: Planned) -> bool:
    """Return whether the experts' forward may have to be replaced, to exchange tokens between ranks or for hfscale's
    own routing.
    """
    return has_mixtures(model) or model.options.routing is not None


def has_routers(model: Planned) -> bool:
    """Return whether the model has experts, or may return the logits of a router."""
    return has_mixtures(model) or hasattr(model.model.config, "output_router_logits")
