"""Plan the layers of multi-token prediction (DeepSeek-AI 2024, V3, section 2.2)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..._compat.transformers.prediction import PREDICTION
from ...models.fields import text_config
from ...plan.batch_fields import BatchField
from ...plan.contents import Feature, PlanContents
from ...plan.drafting.draft import Draft, Planned

IDS = "mtp_input_ids"
TARGETS = "mtp_labels"
"""Arguments of a pass, ``[b, depths, s]``, which the stock model never sees."""


@dataclass(frozen=True)
class PredictionPlan(Feature):
    """Plan of layers behind the model that predict tokens further ahead (DeepSeek-AI 2024, V3, section 2.2)."""

    layers: tuple[str, ...]  # one for each depth
    # For each of them a layer of the model of its kind, which is given the same masks.
    like: tuple[str, ...]
    text: str  # the module whose output they begin with

    def describe(self, plan: PlanContents) -> list[str]:
        """Return the layers, and what they read."""
        where = "; on the last stage" if plan.stages is not None else ""
        return [f"multi-token prediction: {', '.join(self.layers)} behind {self.text}{where}"]

    @property
    def batch_fields(self) -> tuple[BatchField, ...]:
        """The ids and targets further ahead."""
        return (BatchField(IDS, -1, is_target=True), BatchField(TARGETS, -1, is_target=True))

    def fill(
        self,
        batch: Mapping[str, Any],
        shift: int,
    ) -> dict[str, Tensor]:
        """Return ids and targets further ahead, which may lie with another rank's tokens."""
        from .look_ahead import look_ahead

        ids, targets = look_ahead(batch, len(self.layers), shift)
        return {IDS: ids, TARGETS: targets}

    @property
    def optional_layers(self) -> tuple[str, ...]:
        """All of its layers: they run in training passes alone."""
        return self.layers

    @property
    def adds_loss(self) -> str:
        """The option of ``from_pretrained``."""
        return "mtp_loss_weight of hfscale.from_pretrained"


def plan_prediction(draft: Draft) -> None:
    """Plan the layers that predict tokens further ahead, if a loss of theirs is asked for."""
    if draft.added != PREDICTION:
        return
    name = type(draft.model).__name__
    config = text_config(draft.config)
    if draft.no_step or draft.loss is None or draft.lookup is None:
        draft.problem(
            f"mtp_loss_weight needs the loss of a causal language model and a plain embedding, and {name} has others: "
            "leave it out"
        )
    if draft.embedding is not None:
        draft.cut(f"{PREDICTION.lookup}.weight", 0, draft.modules[PREDICTION.lookup].num_embeddings)
    kinds = getattr(config, "layer_types", None) or [""] * len(draft.stack)
    wanted = getattr(config.get_mtp_config(), "layer_types", None) or [""] * len(draft.added_layers)
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
        PredictionPlan(tuple(draft.added_layers), tuple(last[kind] for kind in wanted), text)
    )


def predicts_ahead(model: Planned) -> bool:
    """Return whether there are layers of multi-token prediction."""
    return model.plan.feature(PredictionPlan) is not None
