"""Features of a plan that the plan does not know by name."""

import json
from dataclasses import dataclass, replace

from transformers import LlamaConfig

import hfscale
from hfscale import ParallelConfig
from hfscale.plan.contents import Feature, PlanContents
from hfscale.plan.context_plan import ContextPlan
from hfscale.plan.table import to_json

CONFIG = LlamaConfig(
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    vocab_size=32,
    pad_token_id=None,
)


@dataclass(frozen=True)
class Unheard(Feature):
    """A feature that nothing in the package names."""

    words: str

    def describe(self, plan: PlanContents) -> list[str]:
        """One line."""
        return [f"unheard: {self.words} in {len(plan.layers)} layer"]


def test_any_feature_is_printed_written_and_found() -> None:
    plan = hfscale.plan(CONFIG, ParallelConfig(tp_size=2))
    assert plan.features == ()
    assert plan.feature(Unheard) is None
    plan = replace(plan, features=(Unheard("of before"),))
    assert "unheard: of before in 1 layer" in str(plan).splitlines()
    assert json.loads(to_json(plan))["features"] == {"Unheard": {"words": "of before"}}
    assert plan.feature(Unheard) == Unheard("of before")
    assert plan.feature(ContextPlan) is None


def test_context_is_such_a_feature() -> None:
    plan = hfscale.plan(CONFIG, ParallelConfig(cp_size=2, cp_method="ring"))
    found = plan.feature(ContextPlan)
    assert found is not None
    assert found.method == "ring"
    assert json.loads(to_json(plan))["features"]["ContextPlan"]["method"] == "ring"
    assert "attention reads the others' (ring)" in str(plan)
