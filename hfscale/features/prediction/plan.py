"""Plan the layers of multi-token prediction (DeepSeek-AI 2024, V3, section 2.2)."""

from ..._compat.transformers.prediction import PREDICTION_LOOKUP
from ...config.schedules import ASYNCHRONOUS
from ...models.fields import text_config
from ...plan.drafting.draft import Draft
from ...plan.feature_plans import PredictionPlan


def plan_prediction(draft: Draft) -> None:
    """Plan the layers that predict tokens further ahead, if a loss of theirs is asked for."""
    if not draft.predictors:
        return
    name = type(draft.model).__name__
    schedule = str(draft.layout.pipeline_schedule)
    config = text_config(draft.config)
    if draft.no_step or draft.loss is None or draft.lookup is None:
        draft.problem(
            f"mtp_loss_weight needs the loss of a causal language model and a plain embedding, and {name} has others: "
            "leave it out"
        )
    if draft.layout.pp > 1 and schedule in ASYNCHRONOUS:
        draft.problem(
            f"mtp_loss_weight needs a schedule with a flush, and {schedule} has none: use 1f1b"
        )
    if draft.embedding is not None:
        draft.cut(f"{PREDICTION_LOOKUP}.weight", 0, draft.modules[PREDICTION_LOOKUP].num_embeddings)
    kinds = getattr(config, "layer_types", None) or [""] * len(draft.stack)
    wanted = getattr(config.get_mtp_config(), "layer_types", None) or [""] * len(draft.predictors)
    last = dict(zip(kinds, draft.stack, strict=True))
    if missing := [kind for kind in wanted if kind not in last]:
        draft.problem(
            f"mtp_loss_weight: {name} has no layer of the kind {missing[0]!r} of such layers: leave it out"
        )
        return
    text = next(
        name for name, module in draft.modules.items() if module is draft.model.get_decoder()
    )
    draft.features.append(
        PredictionPlan(tuple(draft.predictors), tuple(last[kind] for kind in wanted), text)
    )
