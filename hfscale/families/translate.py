"""Turn Hugging Face's ``base_model_tp_plan`` into a :class:`Blueprint`.

The host names a style per module, for DTensor; hfscale wants blocks with edges. Rules of one parent module make one
block. A mixture-of-experts module is one block with everything in it - experts, shared experts, router - because its
parts are summed before they leave it. A block whose parts the host gathers in its middle (a norm over the full width of
a cut projection) is kept whole: right on every rank, only not shared out.
"""

from ..errors import PlanError
from .blueprint import TRANSLATED, Block, Blueprint

_STYLES = {"colwise": "column", "rowwise": "row", "replicated_with_grad_allreduce": "shared", "mla_kv_a_proj": "shared"}
# Which dim, and how many matrices side by side in it, of a parameter with one matrix per expert [experts, out, in].
_EXPERT_STYLES = {"colwise": (1, 1), "packed_colwise": (1, 2), "rowwise": (2, 1), "packed_rowwise": (2, 2)}
_GATHERED = ("colwise_gather_output", "rowwise_split_input")


def translate_host_plan(host_plan: dict[str, str], family: str) -> Blueprint:
    """``{"layers.*.self_attn.q_proj": "colwise", ...}`` as a blueprint.

    Raises:
        PlanError: a rule is outside the layer list, or has a style hfscale does not translate.
    """
    layers, rules, unknown = set(), [], []
    prefix_of: dict[str, str] = {}
    for pattern, style in host_plan.items():
        prefix, star, rest = pattern.partition(".*.")
        if style == "embedding_rowwise":
            continue  # the vocabulary is always cut, whatever the host says of it
        if not star or "*" in rest or ("." not in rest and style != "local_params"):
            unknown.append(f"{pattern}: {style}")
            continue
        layers.add(prefix)
        prefix_of[rest] = prefix
        rules.append((rest, style))
    experts = tuple(rest for rest, style in rules if style == "moe_tp_experts")
    mixtures = tuple(path.rpartition(".")[0] for path in experts)
    own_heads = tuple(rest for rest, style in rules if style == "local_params")
    roles: dict[str, dict[str, list[str]]] = {}
    cut: dict[str, dict[str, tuple[int, int]]] = {}
    whole = set()
    for rest, style in rules:
        mixture = next((path for path in mixtures if rest.startswith(f"{path}.")), None)
        block = mixture or rest.rpartition(".")[0]
        name = rest.removeprefix(f"{block}.")
        if style in ("moe_tp_experts", "local_params"):
            continue
        if style in _GATHERED:
            whole.add(block)
        elif any(rest.startswith(f"{path}.") for path in experts) and style in _EXPERT_STYLES:
            cut.setdefault(block, {})[name] = _EXPERT_STYLES[style]
            roles.setdefault(block, {"column": [], "row": [], "shared": []})
        elif style in _STYLES:
            roles.setdefault(block, {"column": [], "row": [], "shared": []})[_STYLES[style]].append(name)
            if style == "mla_kv_a_proj":  # low-rank attention computes its latents whole, inside the edges
                mixtures += (block,)
        else:
            unknown.append(f"{prefix_of[rest]}.*.{rest}: {style}")
    roles = {block: role for block, role in roles.items() if block not in whole}
    if unknown or len(layers) != 1:
        raise PlanError(
            f"tp_size > 1 cannot use the tensor-parallel plan of {family!r}: hfscale does not translate "
            f"{'; '.join(unknown) or 'rules for more than one layer list: ' + ', '.join(sorted(layers))}. "
            "Use tp_size=1, or add the family to hfscale.families.FAMILIES"
        )
    incomplete = [block for block, role in roles.items() if not (role["column"] and role["row"]) and block not in cut]
    if incomplete:
        raise PlanError(
            f"tp_size > 1 cannot use the tensor-parallel plan of {family!r}: the blocks {', '.join(incomplete)} "
            "lack a column or a row projection. Use tp_size=1, or add the family to hfscale.families.FAMILIES"
        )
    for block in cut:  # plans made for experts alone leave the shared expert out
        for name in ("shared_expert", "shared_experts", "shared_mlp"):
            roles[block]["column"] += [f"{name}.{part}" for part in ("gate_proj", "up_proj", "gate_up_proj")]
            roles[block]["row"].append(f"{name}.down_proj")
    return Blueprint(
        layers=layers.pop(),
        blocks={
            block: Block(
                column=tuple(dict.fromkeys(role["column"])),
                row=tuple(dict.fromkeys(role["row"])),
                shared=tuple(role["shared"]),
                cut=cut.get(block, {}),
                parts={name: 2 for name in role["column"] if name.endswith(".gate_up_proj")},
                own_heads=block in own_heads,
                rest_shared=block in mixtures,
                optional=bool(experts),  # dense layers and mixtures share an entry
                dropout=() if block in cut else ("attention_dropout",),
            )
            for block, role in roles.items()
        },
        source=TRANSLATED,
    )
