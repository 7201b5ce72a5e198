"""Draw layouts for tiny models of every class that people train, and run each against one process.

    python scripts/class_draws.py [--seed 1] [--draws 100] [--first 0] [--part sequences images]

Where scripts/class_sweep.py has a few layouts of every family, this has products of axes, schedules, microbatches,
adapters, frozen parts and recomputation, of families and axes drawn among those that are equal in docs/classes.md; the
verdicts are the same. A draw depends on the seed, its number and that table, so that ``--first N --draws 1`` repeats
one.
"""

import argparse
import sys
import tempfile
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import transformers
from class_cases import KINDS, Kind
from class_sweep import COLUMNS, DEFECTS, RECIPE, TIMEOUT, judge_case, read, short, trainable
from tqdm import tqdm
from transformers import AutoConfig

import hfscale
from hfscale.config.parallel import AXES
from hfscale.testing.parity import Case

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.fuzz.children import await_all, in_a_child
from tests.fuzz.choose_family import has_experts
from tests.fuzz.forked import ForkedRanks
from tests.fuzz.layouts import choose_layout, stages_of
from tests.fuzz.many import import_everything
from tests.plain_cases import UserLossCase

MAX_RANKS = 4
Table = dict[str, dict[str, set[str]]]
_FROZEN = ("embed", "norm", "layer.0.", "layers.0.", "attention", "bias", "classifier", "vision")


def draw(
    seed: int, index: int, table: Table
) -> tuple[str, str, dict[str, Any], dict[str, Any], bool]:
    """Part, family, fields of the layout, of the case, and whether there are adapters."""
    random = Random(f"{seed}/{index}")
    part = random.choice(sorted(table))
    family = random.choice(sorted(table[part]))
    axes = table[part][family]
    layout: dict[str, Any] = {}
    mixture = has_experts(AutoConfig.for_model(family).get_text_config().to_dict())
    while not 1 < _ranks(layout) <= MAX_RANKS or not axes.issuperset(_axes(layout)):
        layout = choose_layout(random, mixture)
    case = {
        "accumulation": random.choice((1, 2, 3)),
        "rows": random.choice((2, 3, 4)) if part not in ("reward", "embeddings") else 4,
        "lengths": random.choice(((13, 8), (9,), (12, 5, 8))),
        "checkpointing": random.random() < 0.2,
        "build": random.choice(("from_pretrained", "from_pretrained", "parallelize")),
        "frozen": (random.choice(_FROZEN),) if random.random() < 0.2 else (),
    }
    return part, family, layout, case, random.random() < 0.2


def families(path: Path, parts: list[str]) -> Table:
    """Those that train, and the axes that they do not refuse."""
    found: Table = {}
    for part in parts:
        for family, cells in read(path).get(part, {}).items():
            known = {column: cell.split()[0] for column, cell in zip(COLUMNS, cells, strict=False)}
            axes = {axis for axis in ("tp", "pp") if known.get(f"{axis}2") in ("equal", "planned")}
            if known.get("dp_shard2") in ("equal", "planned"):
                context = (
                    {"cp"} if KINDS[part].auto == "AutoModelForImageTextToText" else set[str]()
                )
                found.setdefault(part, {})[family] = axes | {"dp_shard", "dp_replicate"} | context
    return found


def _axes(layout: dict[str, Any]) -> set[str]:
    # As no one process does.
    late = {"delayed"} if "pipedream" in str(layout.get("pipeline_schedule")) else set[str]()
    return late | {axis for axis in AXES if layout.get(f"{axis}_size", 1) > 1 and axis != "ep"}


def _ranks(layout: dict[str, Any]) -> int:
    found = 1
    for name, size in layout.items():
        found *= size if name.endswith("_size") and name not in ("ep_size", "expert_tp_size") else 1
    return found


def judge(
    kind: Kind, family: str, layout: dict[str, Any], fields: dict[str, Any], adapters: bool
) -> tuple[str, str]:
    """Verdict and detail."""
    ranks = ForkedRanks(_ranks(layout), TIMEOUT)
    config, why = trainable(kind, family, ranks, max(2, stages_of(layout)))
    if config is None:
        return "stock", why

    def chosen(case: Case) -> hfscale.ParallelConfig:
        return hfscale.ParallelConfig(**layout)

    if adapters or kind.recipe:
        fields = {**fields, "build": "from_pretrained", "frozen": ()}

    def changed(case: Case) -> Case:
        return fitted(case, chosen(case), fields)

    return judge_case(kind, config, chosen, ranks, RECIPE if kind.recipe else adapters, changed)


def fitted(case: Case, layout: hfscale.ParallelConfig, fields: dict[str, Any]) -> Case:
    """The case with these fields, as far as it and the layout take them."""
    # Stages that split a batch into microbatches would part the pairs of a user's loss.
    if layout.num_microbatches or isinstance(case, UserLossCase):
        fields = {**fields, "accumulation": layout.microbatches_of(fields["accumulation"])}
    if case.build == "parallelize":  # data ranks build some models in one way only
        fields = {**fields, "build": case.build}
    return replace(case, **fields)


def judged(*drawn: Any) -> tuple[str, str]:
    """The same in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="hfscale-draw-") as name:
        directory = Path(name)

        def run(_: Any) -> None:
            (directory / "verdict").write_text("\n".join(judge(*drawn)))

        end = await_all({"judge": in_a_child(run, directory, "judge")}, directory, 6 * TIMEOUT)[
            "judge"
        ]
        if end.error:
            return "crash", short(f"the judge: {end.error}")
        verdict, _, detail = (directory / "verdict").read_text().partition("\n")
        return verdict, detail


def main() -> int:
    """Print what is not equal, and how many of each kind there are; the exit status is 1 where there is a defect."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", nargs="*", choices=KINDS, default=list(KINDS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--table", type=Path, default=Path("docs/classes.md"))
    parser.add_argument("--draws", type=int, default=100)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    import_everything(())
    found = Counter[str]()
    table = families(arguments.table, arguments.part)
    for index in tqdm(range(arguments.first, arguments.first + arguments.draws)):
        part, family, layout, fields, adapters = draw(arguments.seed, index, table)
        verdict, detail = judged(KINDS[part], family, layout, fields, adapters)
        found[verdict.split()[0]] += 1
        tqdm.write(
            f"{index} {verdict}: {part} {family} {layout} {fields} {'LoRA' if adapters else ''} {detail}"
        )
    print(dict(found))
    return int(any(found[kind] for kind in DEFECTS))


if __name__ == "__main__":
    raise SystemExit(main())
