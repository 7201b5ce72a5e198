"""Plan multi-token prediction, as data."""

from dataclasses import dataclass

from .contents import Feature, PlanContents

IDS, TARGETS = "mtp_input_ids", "mtp_labels"
"""Arguments of a forward pass, ``[b, depths, s]``, which the model itself never sees."""


@dataclass(frozen=True)
class PredictionPlan(Feature):
    """Plan of layers behind the model that predict tokens further ahead (DeepSeek-AI 2024, V3, section 2.2)."""

    layers: tuple[str, ...]  # one for each depth
    like: tuple[str, ...]  # for each of them a layer of the model of its kind, which is given the same masks
    text: str  # the module whose output they begin with

    def describe(self, plan: PlanContents) -> list[str]:
        """Return the line about multi-token prediction in the plan's printout."""
        where = "; on the last stage" if plan.stages is not None else ""
        return [f"multi-token prediction: {', '.join(self.layers)} behind {self.text}{where}"]
