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
"""Name of the MTP layers' targets in a batch, ``[b, depths, s]``. Like the inputs (``IDS``), the targets are removed
from the arguments before the stock model is called.
"""


@dataclass(frozen=True)
class PredictionPlan(Feature):
    """Plan the MTP layers: layer ``k`` predicts the token ``k`` positions after the next one (DeepSeek-AI 2024, V3,
    section 2.2).
    """

    layers: tuple[str, ...]  # the MTP layers, one for each depth
    # for each MTP layer, a layer of the model of the same kind, whose masks it receives
    like: tuple[str, ...]
    text: str  # the text model, whose output is the input of the first MTP layer

    def describe(self, plan: PlanContents) -> list[str]:
        """Return a line that names the MTP layers and the module whose output they read."""
        where = "; on the last stage" if plan.stages is not None else ""
        return [f"multi-token prediction: {', '.join(self.layers)} after {self.text}{where}"]

    @property
    def batch_fields(self) -> tuple[BatchField, ...]:
        """The inputs and targets of the MTP layers, as fields of a batch."""
        return (BatchField(IDS, -1, is_target=True), BatchField(TARGETS, -1, is_target=True))

    def fill(
        self,
        batch: Mapping[str, Any],
        shift: int,
    ) -> dict[str, Tensor]:
        """Return the inputs and targets of the MTP layers. They are computed before the batch is sharded, because after
        sharding the later tokens that a position needs may be on another rank.
        """
        from .look_ahead import look_ahead

        ids, targets = look_ahead(batch, len(self.layers), shift)
        return {IDS: ids, TARGETS: targets}

    @property
    def optional_layers(self) -> tuple[str, ...]:
        """All MTP layers, since they run only in training passes."""
        return self.layers

    @property
    def adds_loss(self) -> str:
        """The option of ``from_pretrained`` that adds the MTP loss, for messages."""
        return "mtp_loss_weight of hfscale.from_pretrained"


def plan_prediction(draft: Draft) -> None:
    """Plan the MTP layers if ``mtp_loss_weight`` adds their loss."""
    if draft.added != PREDICTION:
        return
    name = type(draft.model).__name__
    config = text_config(draft.config)
    if draft.no_step or draft.loss is None or draft.lookup is None:
        draft.problem(
            "mtp_loss_weight needs a model that has the stock loss of a causal language model and a plain embedding, "
            f"but {name} lacks one of them: leave mtp_loss_weight out"
        )
    if draft.embedding is not None:
        draft.cut(f"{PREDICTION.lookup}.weight", 0, draft.modules[PREDICTION.lookup].num_embeddings)
    kinds = getattr(config, "layer_types", None) or [""] * len(draft.stack)
    wanted = getattr(config.get_mtp_config(), "layer_types", None) or [""] * len(draft.added_layers)
    last = dict(zip(kinds, draft.stack, strict=True))
    if missing := [kind for kind in wanted if kind not in last]:
        draft.problem(
            f"mtp_loss_weight: the MTP layers of {name} need the attention mask of a layer of type {missing[0]!r} "
            f"(see layer_types in the config), but {name} has no such layer: leave mtp_loss_weight out"
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
