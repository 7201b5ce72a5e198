"""Describe the features of a layout in lines that are printed under the plan's table, with one function per feature.

A function returns no lines if the plan does not have the feature.
"""

from collections import Counter

from ..models.names import wild_name
from .contents import PlanContents
from .modules import BlockPlan


def describe_tensor(plan: PlanContents) -> list[str]:
    """Return the lines about tensor-parallel communication: at the inputs and outputs of blocks, at the embedding and
    at the head.
    """
    if not plan.blocks:
        return []
    talk = "one all-reduce forward, one backward"
    if plan.sequence_regions:
        talk = "an all-gather and a reduce-scatter each way"
    counted = Counter((wild_name(block.name), _roles(block)) for block in plan.blocks)
    entries = [(f"{name} x{count}", roles) for (name, roles), count in counted.items()]
    if plan.embedding is not None:
        entries.append((plan.embedding, f"all-reduce forward, {_tokens(plan, plan.embedding)}"))
    if plan.head is not None:
        what = f"all-reduce backward, loss {plan.loss} on cut logits, {_tokens(plan, plan.head)}"
        entries.append((plan.head, what))
    width = max(len(name) for name, _ in entries)
    lines = (f"  {name.ljust(width)}  {what}" for name, what in entries)
    return [f"edges over tp (blocks: {talk} for each input)", *lines]


def _roles(block: BlockPlan) -> str:
    roles = {"column": block.column, "row": block.row, "shared": block.shared}
    inside = {
        role: [name.removeprefix(f"{block.name}.") for name in names]
        for role, names in roles.items()
    }
    return "; ".join(f"{role} {', '.join(names)}" for role, names in inside.items() if names)


def _tokens(plan: PlanContents, module: str) -> str:
    weight = plan.by_name[f"{module}.weight"]
    return f"{weight.model_shape({})[0]:,} of {weight.shape[0]:,} tokens per rank"


def describe_sequence(plan: PlanContents) -> list[str]:
    """Return, for each stack of layers under sequence parallelism, a line that says where hidden states are sharded,
    and which modules run on all tokens.
    """
    lines = []
    for region in plan.sequence_regions:
        gathered = ", ".join(dict.fromkeys(map(wild_name, region.gathered)))
        on_all = f"; run on all: {gathered}" if gathered else ""
        lines.append(
            f"sequence: from {region.layers[0]} to {region.exit or 'the end'}, each rank holds "
            f"1/{plan.layout.tp} of the tokens between blocks{on_all}"
        )
    return lines


def describe_experts(plan: PlanContents) -> list[str]:
    """Return the lines about experts: their number per rank, and how tokens are sent to them."""
    size = plan.layout.ep
    talk = f"two all-to-alls forward and two backward over ep{size}"
    if plan.layout.slices_tokens:
        talk += "; each tensor rank sends its share of a batch"
        talk += (
            ", or sums over them, whatever is fewer bytes"
            if plan.layout.expert_batches == 1
            else ""
        )
    names = [wild_name(experts.name) for experts in plan.experts]
    like = {wild_name(experts.name): experts.count for experts in plan.experts}
    return [
        f"experts: {name} x{names.count(name)}, {count // size} of {count} per rank, {talk}"
        for name, count in like.items()
    ]


def describe_parts(plan: PlanContents) -> list[str]:
    """Return the lines about all features, then the lines about stages. An empty line follows each group of lines."""
    features = [line for feature in plan.features for line in feature.describe(plan)]
    parts = [*describe_tensor(plan), *describe_sequence(plan), *features, *describe_experts(plan)]
    if plan.layout.data_world > 1:
        parts += [
            f"data axes: {len(plan.layers)} layers, each gathered and reduced as one, and the rest of the model"
        ]
    if plan.quantized is not None:
        parts += plan.quantized.lines(plan.by_name)
    stages = str(plan.stages).splitlines() if plan.stages else []
    return [line for lines in (parts, stages) if lines for line in (*lines, "")]
