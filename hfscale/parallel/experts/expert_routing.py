"""Make the objects that choose experts in every MoE layer, and find the routers and the biases that they use."""

from functools import partial

from torch import nn

from ..._compat.peft import ORIGINAL
from ..._compat.transformers.classes import class_name
from ..._compat.transformers.experts import router_logits
from ...config.routing import RoutingConfig
from ...errors import ConfigError
from ...models.module_kinds import scores_by_sigmoid
from ...models.names import wild_name
from ...plan import ExpertsPlan
from ...train.runtime import Runtime
from ...train.runtime.parameter_names import stock_name
from .choice_bias import choice_bias, choice_biases
from .layer import LayerRouting, RouterLogits, Routing


def routing_of_layers(
    runtime: Runtime, options: RoutingConfig | None
) -> tuple[Routing, list[LayerRouting]]:
    """Make the objects that choose experts according to ``options``: one that all MoE layers of the model use together,
    and one for each MoE layer on this rank.
    """
    chosen = options or RoutingConfig()
    _check(runtime, chosen)
    routing = Routing(runtime.mesh, chosen)
    names = choice_biases(runtime) if chosen.bias_update_rate else {}
    here = [
        (number, planned)
        for number, planned in enumerate(runtime.plan.mixtures)
        if runtime.is_local(planned.name)
    ]
    for _, planned in here:
        if (inner := names.get(wild_name(planned.name))) is None:
            continue
        if (bias := choice_bias(runtime, planned, inner)) is not None:
            routing.biases[planned.name] = bias
    return routing, [_routing_of(runtime, routing, planned, number) for number, planned in here]


def _routing_of(
    runtime: Runtime, routing: Routing, planned: ExpertsPlan, number: int
) -> LayerRouting:
    options = routing.options
    layout = runtime.mesh.layout
    logits = None
    scores = options.balance_scores or "softmax"
    times = 1.0
    if options.needs_logits:
        name, router, place = _router(runtime, planned)
        logits = RouterLogits(router, place)
        if options.balance_scores is None and scores_by_sigmoid(router):
            scores = "sigmoid"
        if any(
            "tp" in runtime.plan.by_name[f"{name}.{p}"].partial
            for p, _ in router.named_parameters()
        ):
            times = 1 / layout.tp

    is_cut = partial(has_part_of_tokens, runtime, planned)
    return LayerRouting(planned, number, routing, is_cut, logits, scores, times)


def has_part_of_tokens(runtime: Runtime, planned: ExpertsPlan) -> bool:
    """Return whether the router receives only this tensor rank's shard of the tokens in the current forward pass."""
    return runtime.mesh.layout.slices_tokens and runtime.sequence.is_seq_sharded(planned.layer)


def _check(runtime: Runtime, options: RoutingConfig) -> None:
    model = runtime.model
    kind = class_name(runtime.model)
    if not runtime.plan.mixtures:
        raise ConfigError(
            f"routing={options} needs experts whose weights transformers keeps in one module, as 3-D parameters, but "
            f"{kind} has no such experts: leave routing out"
        )
    if options.needs_tokens and getattr(model.config, "is_encoder_decoder", False):
        raise ConfigError(
            f"routing={options} needs one sequence per row, but {kind} has two (an encoder's and a decoder's): use "
            "RoutingConfig() (which only counts), or force_balanced alone"
        )
    if options.balance_loss and getattr(model.config, "output_router_logits", False):
        raise ConfigError(
            f"balance_loss={options.balance_loss} and config.output_router_logits=True would balance experts twice: "
            "set config.output_router_logits = False"
        )
    most = min(planned.count for planned in runtime.plan.mixtures)
    if options.router == "gshard" and most < 2:
        raise ConfigError(
            "router='gshard' needs at least two experts in every layer, but one layer has a single expert: use "
            "router='switch'"
        )


def _router(runtime: Runtime, planned: ExpertsPlan) -> tuple[str, nn.Module, int]:
    """Return name and module of a layer's router, and the index of the router logits in the module's output. It is the
    router whose logits transformers records (``output_router_logits``).
    """
    recorded = router_logits(runtime.model)
    for owner in dict.fromkeys((planned.name.rpartition(".")[0], planned.layer)):
        routers = [
            (stock_name(f"{owner}.{name}"), module, place)
            for name, module in runtime.model.get_submodule(owner).named_modules()
            for kind, place in recorded.items()
            # PEFT keeps a frozen copy of a router in modules_to_save, which is never called.
            if name and isinstance(module, kind) and not name.endswith(ORIGINAL)
        ]
        if len(routers) == 1:
            return routers[0]
    family = runtime.plan.family
    raise ConfigError(
        f"{wild_name(planned.name)}: the router's logits cannot be found, because {family!r} does not name them "
        "(_can_record_outputs of its PreTrainedModel class), but balance_loss, z_loss and router='switch', 'gshard' "
        "or 'noisy_topk' need router logits: use bias_update_rate, capacity_factor or force_balanced, which do not "
        "need them"
    )
