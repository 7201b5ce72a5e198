"""Train a tiny model of every causal-LM family transformers has under tp2, under pp2 and under cp2 against one process,
of every mixture of experts under ep2, and of other classes (classification, masked tokens, sequence to sequence,
speech, images); write docs/families.md.

    python scripts/family_sweep.py [--only gemma opt] [--part families experts context classes] [--out docs/families.md]

With ``--part``, other tables of the file stay as they are; with ``--only``, other rows of the first three.

Equal: loss, every gradient, norm, weights after two steps and the saved checkpoint agree with plain transformers in one
process to 1e-9 in float64; by a plain loop (``loss = model(**batch).loss; loss.backward()``) where the class keeps a
loss of its own, which ``train_step`` refuses. Refused: hfscale names what is missing before training. Anything else is
a defect.
"""

import argparse
import re
import sys
import warnings
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import transformers
from family_clones import OTHERS
from family_tables import (
    CONTEXT,
    EXPERTS,
    STAGE_LAYERS,
    Section,
    Verdict,
    by_column,
    count,
    section_of,
    with_others,
    written,
)
from family_variants import CONFIGS, OPTIONS, PICKS, applies, in_stages, layout_of, pairs
from notes import note
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import hfscale
from hfscale.models.clone import tiny_clone
from hfscale.plan.context_plan import ContextPlan
from hfscale.plan.feature_plans import OwnLossPlan
from hfscale.testing import Case, RankPool, measure_parity, plain

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.families import MIXED, config_of

TOLERANCE = 1e-9
LAYOUT = hfscale.ParallelConfig(tp_size=2)
SEQUENCE = hfscale.ParallelConfig(tp_size=2, sequence_parallel=True)


def judge(family: str, pool: RankPool) -> Verdict:
    """One causal-LM family."""
    config, why = trainable(family)
    if config is None:
        return Verdict("no clone", why)
    return judge_case(Case(config), Case(deeper(family, config)), pool)


def trainable(family: str, **changes: Any) -> tuple[Any, str]:
    """A clone's config, and, where stock code cannot train it, ``None`` and why."""
    try:
        config = config_of(family, **changes)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
        ids = torch.randint(3, min(60, config.vocab_size), (2, 8))
        mask = torch.ones_like(ids).index_put((torch.tensor(1), torch.tensor(7)), torch.tensor(0))
        model(input_ids=ids, attention_mask=mask, labels=ids).loss.backward()
    except Exception as error:  # whatever stock code says of a clone it cannot train
        return None, note(f"{type(error).__name__}: {error}".split("\n")[0], 100)
    return config, ""


def judge_mixture(family: str, pool: RankPool) -> tuple[list[str], str] | None:
    """A verdict for each of :data:`EXPERTS` and the details; ``None`` for a family without experts."""
    config, _ = trainable(family, **MIXED.get(family, {}))
    if config is None:
        return None
    parameters = list(hfscale.plan(config, dtype=torch.float64).owned())
    if family not in MIXED and not any("expert" in parameter.name for parameter in parameters):
        return None
    # The data axes hold parameters that cannot be given another type afterwards.
    build = (
        "from_pretrained"
        if len({parameter.dtype for parameter in parameters}) == 1
        else "parallelize"
    )
    kinds = []
    details = []
    for layout in EXPERTS.values():
        kind, detail = measure(Case(config, build=build), layout, pool)
        kinds.append(kind)
        details.append(detail)
    return kinds, "; ".join(dict.fromkeys(details))


def judge_variants(
    family: str, pool_of: Callable[[int], RankPool]
) -> list[tuple[str, str, str, str]]:
    """``(option, config, verdict, detail)`` of the first few pairs that the family can have."""
    base, _ = trainable(family)
    found = list[tuple[str, str, str, str]]()
    for option, name in pairs(family) if base is not None else ():
        fields = base.to_dict()
        changes = CONFIGS[name](fields)
        if not changes or not applies(option, fields):
            continue
        stages = in_stages(option)
        config, _ = trainable(family, **changes, **({"layers": STAGE_LAYERS} if stages else {}))
        if config is None:
            continue
        layout = layout_of(option)
        kind, detail = measure(
            Case(config, accumulation=4 if stages else 2), layout, pool_of(layout.total_size)
        )
        found.append((option, name, kind, detail))
        if len(found) == PICKS:
            break
    return found


def deeper(family: str, config: Any) -> Any:
    """A clone with layers enough for two stages, where the family has one; else ``config``."""
    try:
        return config_of(family, STAGE_LAYERS)
    except Exception:  # a config that checks its numbers of layers against one another
        return config


def judge_class(
    family: str, auto_class: Any, maker: plain.Maker, changes: dict[str, Any], pool: RankPool
) -> Verdict:
    """The same for a class with a loss of its own."""
    config = tiny_clone(AutoConfig.for_model(family), **{"pad_token_id": None, **changes})
    if hasattr(config, "vision_config"):
        config.vision_config.image_size, config.vision_config.patch_size = 32, 8
    case = plain.PlainCase(config, auto_class=auto_class, make_batch=maker)
    return judge_case(case, case, pool)


def judge_case(case: Case, deep: Case, pool: RankPool) -> Verdict:
    """All layouts; stages with the clone that has more layers."""
    kind, detail = measure(case, LAYOUT, pool)
    details = [detail]
    sequence = "-"
    if kind.startswith("equal"):
        sequence, why = measure(case, SEQUENCE, pool)
        if sequence.startswith("equal"):
            sequence = "equal"
        else:
            details.append(why)
    stages, why = measure(deep, None, pool)
    details += [] if stages == "equal" else [why]
    return Verdict(kind, "; ".join(details), sequence, stages)


def measure(case: Case, layout: hfscale.ParallelConfig | None, pool: RankPool) -> tuple[str, str]:
    """``(verdict, detail)`` for one case, by a plain loop where ``train_step`` is not for it; ``None``: two stages."""
    try:
        layout = layout or two_stages(case)
        planned = hfscale.plan(case.config, layout, auto_class=case.auto_class)
    except hfscale.HFScaleError as error:
        why = str(error).split("\n  - ")[1]
        why = re.split(": use (?:tp_size|pp_size|ep_size|cp_size|sequence_parallel)", why)[0]
        return "refused", note(re.sub("pp_size=2 does not fit .*?:", "stages:", why))
    except Exception as error:  # planning must say what is missing, and nothing else
        return "FAILS", note(f"plan: {type(error).__name__}: {error}")
    verdict = "equal"
    if planned.loss is None:
        verdict = "equal (plain loop)"
        given = {field.name: getattr(case, field.name) for field in fields(case)}
        if not isinstance(case, plain.PlainCase):
            case = plain.PlainCase(**given)
        own = planned.feature(OwnLossPlan)
        # Which train_step runs.
        if own is not None and (planned.stages is not None or layout.cp_size > 1):
            verdict = "equal"
            case = plain.OwnLossCase(**given, over=own.over)
    total = len(list(planned.owned()))
    cut, spread = (
        sum(p.cut_over(axis) is not None for p in planned.owned()) for axis in ("tp", "ep")
    )
    try:
        # the host's grouped matrix products take no float64
        if any("expert" in parameter.name for parameter in planned.owned()):
            case.hf_kwargs = {"experts_implementation": "eager"}
        parity = measure_parity(case, layout, pool)
    except Exception as error:  # a family that breaks is a row, not the end of the sweep
        lines = [line for line in str(error).splitlines() if "Error" in line]
        return "FAILS", note(lines[-1] if lines else str(error))
    if parity.worst() > TOLERANCE:
        return "DIFFERS", note(str(parity))
    shares = (
        f"{spread} spread, {cut} cut of {total} parameters"
        if spread
        else f"{cut} of {total} parameters cut"
    )
    return verdict, f"{parity.worst():.0e}, {shares}"


def two_stages(case: Case) -> hfscale.ParallelConfig:
    """Two stages with half of the layers each, whatever lies around them."""
    count = len(hfscale.plan(case.config, auto_class=case.auto_class).layers)
    halves = [count // 2, count - count // 2] if count > 1 else None
    return hfscale.ParallelConfig(pp_size=2, pipeline_schedule="1f1b", stage_layers=halves)


def class_name(auto_class: Any, family: str) -> str:
    """The stock class behind an Auto class."""
    mapping = getattr(auto_class, "_model_mapping", None)
    found = mapping[type(AutoConfig.for_model(family))] if mapping is not None else auto_class
    return str((found[0] if isinstance(found, (list, tuple)) else found).__name__)


def sweep_families(chosen: list[str], pool: RankPool) -> Section:
    """Every causal-LM family under tensor ranks and in stages."""
    verdicts: dict[str, Verdict] = {}
    for family in tqdm(chosen or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), desc="families"):
        verdict = judge(family, pool)
        if verdict.kind != "no clone":
            verdicts[family] = verdict
        if chosen:
            tqdm.write(f"{family}: {verdict}")
    rows = [
        f"| {family} | {v.kind} | {v.sequence} | {v.stages} | {v.detail} |"
        for family, v in verdicts.items()
    ]
    return section_of(list(verdicts.values()), rows)


def sweep_mixtures(chosen: list[str], pool: RankPool) -> Section:
    """Every causal-LM family with experts, under those of :data:`EXPERTS`."""
    rows = []
    columns = list[list[str]]()
    for family in tqdm(chosen or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), desc="mixtures"):
        judged = judge_mixture(family, pool)
        if judged is not None:
            columns.append(judged[0])
            rows.append(f"| {family} | {' | '.join(judged[0])} | {judged[1]} |")
        if chosen:
            tqdm.write(f"{family}: {judged}")
    return Section(by_column(EXPERTS, columns), rows, [kind for kinds in columns for kind in kinds])


def sweep_context(chosen: list[str], pool: RankPool) -> Section:
    """Every causal-LM family with its sequences cut, under those of :data:`CONTEXT`."""
    rows = []
    columns = list[list[str]]()
    for family in tqdm(chosen or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), desc="sequences"):
        config, _ = trainable(family)
        if config is None:
            continue
        case, remarks = cut_case(config)
        judged = [measure(case, layout, pool) for layout in CONTEXT.values()]
        columns.append([kind for kind, _ in judged])
        details = dict.fromkeys(detail for kind, detail in judged if not kind.startswith("equal"))
        rows.append(f"| {family} | {' | '.join(columns[-1])} | {'; '.join([*remarks, *details])} |")
        if chosen:
            tqdm.write(rows[-1])
    return Section(by_column(CONTEXT, columns), rows, [kind for kinds in columns for kind in kinds])


def cut_case(config: Any) -> tuple[Case, list[str]]:
    """A case with what the family takes, and what is to be said of it."""
    case = Case(config, lengths=(13, 8))
    try:
        planned = hfscale.plan(config, next(iter(CONTEXT.values())), dtype=torch.float64)
    except Exception:  # measured, and named, again
        return case, []
    found = planned.feature(ContextPlan)
    assert found is not None
    names = dict.fromkeys(name.rpartition(".")[2] for name in found.whole)
    remarks = [f"{', '.join(names)} on whole sequences"] if names else []
    names = dict.fromkeys(name.rpartition(".")[2] for name in found.handing)
    remarks += [f"{', '.join(names)} with states handed on"] if names else []
    if not found.pads:
        case.rows = 1  # the second would be padded
        remarks.append("rows without padding only")
    if any(planned_parameter.dtype != torch.float64 for planned_parameter in planned.owned()):
        # Data ranks hold parameters that cannot be given another type afterwards.
        case.build = "parallelize"
    return case, remarks


def sweep_variants(chosen: list[str], pool: RankPool) -> Section:
    """Every causal-LM family with options of the layout and fields of its config away from their defaults."""
    rows = []
    kinds = list[str]()
    met = set[tuple[str, str]]()
    with RankPool(4) as four:
        for family in tqdm(chosen or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), desc="variants"):
            for option, name, kind, detail in judge_variants(
                family, {2: pool, 4: four}.__getitem__
            ):
                kinds.append(kind)
                met.add((option, name))
                rows.append(f"| {family} | {option} | {name} | {kind} | {detail} |")
                if chosen:
                    tqdm.write(rows[-1])
    return Section(
        f"{len(met)} of {len(OPTIONS) * len(CONFIGS)} pairs, {len(kinds)} runs: {count(kinds)}",
        rows,
        kinds,
    )


def sweep_classes(chosen: list[str], pool: RankPool) -> Section:
    """Classes with a loss of their own."""
    rows = []
    verdicts = list[Verdict]()
    for family, auto_class, maker, changes in tqdm(OTHERS, desc="classes"):
        if chosen and family not in chosen:
            continue
        v = judge_class(family, auto_class, maker, changes, pool)
        verdicts.append(v)
        name = class_name(auto_class, family)
        rows.append(f"| {family} | {name} | {v.kind} | {v.sequence} | {v.stages} | {v.detail} |")
        if chosen:
            tqdm.write(rows[-1])
    return section_of(verdicts, rows)


PARTS = {
    "families": sweep_families,
    "experts": sweep_mixtures,
    "context": sweep_context,
    "variants": sweep_variants,
    "classes": sweep_classes,
}


def main() -> int:
    """Write the tables; the exit status is 1 where a family fails or differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--part", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    # Tiny products: threads of this process would only wait for those of the ranks.
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    with RankPool(2) as pool:
        found = {part: PARTS[part](arguments.only, pool) for part in arguments.part}
    for part, section in found.items():
        print(f"{part}: {section.summary}")
    if arguments.out:
        before = arguments.out.read_text() if arguments.out.exists() else ""
        if arguments.only:
            found = {part: with_others(part, section, before) for part, section in found.items()}
        arguments.out.write_text(written(found, before))
    return int(
        any(kind in ("DIFFERS", "FAILS") for section in found.values() for kind in section.kinds)
    )


if __name__ == "__main__":
    raise SystemExit(main())
