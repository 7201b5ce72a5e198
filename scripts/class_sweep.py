"""Train a tiny model of every family of every class that people train, in each of a few layouts, against one process;
write docs/classes.md.

    python scripts/class_sweep.py [--part sequences images] [--only bert vit] [--new] [--out docs/classes.md]

Every family is judged in processes forked for it, so that one that hangs or dies is a verdict; it is written to the
file at once, and ``--new`` leaves out what is in the file already, so that a sweep goes on where it was stopped.

equal: loss, every gradient, norm, weights after two steps and the saved checkpoint agree with plain transformers in one
process to 1e-9 in float64, by ``train_step`` where that runs the class's loss, else by a plain loop. refused: hfscale
says what does not fit before weights are read. stock: one process cannot train it either. wrong, crash, hang, late (a
refusal afterwards): defects. Beside it: the share of all numbers that the fullest rank holds.
"""

import argparse
import json
import re
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import torch
import transformers
from class_cases import KINDS, Kind, OwnLossPictureCase, RewardCase, case_of, configs
from notes import note
from tqdm import tqdm

import hfscale
from hfscale._compat.transformers.classes import from_config as host_from_config
from hfscale._compat.transformers.experts import use_eager_experts
from hfscale.extras.pictures.picture_parity import PictureCase, PlainPictureCase
from hfscale.models.precision import keep_float64
from hfscale.plan.feature_plans import OwnLossPlan, TowersPlan
from hfscale.testing import measure_parity, plain
from hfscale.testing.parity import Case, Parity, in_float64

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.fuzz.children import await_all, in_a_child
from tests.fuzz.forked import ForkedRanks, RanksFailed
from tests.fuzz.many import import_everything

TOLERANCE = 1e-9
TIMEOUT = 40.0
STAGE_LAYERS = 4
COLUMNS = ("tp2", "dp_shard2", "pp2", "LoRA tp2")
RECIPE = "recipe"
_PROJECTORS = "proj|connector|merger|align|adapt|resampler|abstractor"
DEFECTS = ("wrong", "crash", "hang", "late")


def judge(kind: Kind, family: str, columns: tuple[str, ...], only_plan: bool) -> dict[str, str]:
    """Column -> verdict, and ``""`` -> remarks, which are all where stock code cannot train a tiny model."""
    ranks = ForkedRanks(2, TIMEOUT)
    config, why = trainable(kind, family, ranks)
    if config is None:
        return {"": why}
    verdicts = dict[str, str]()
    remarks = dict[str, list[str]]()
    for column in columns:
        chosen = (
            trainable(kind, family, ranks, STAGE_LAYERS)[0] if column == "pp2" else None
        ) or config
        verdict, detail = judge_layout(kind, chosen, column, None if only_plan else ranks)
        verdicts[column] = verdict
        if detail:
            remarks.setdefault(detail, []).append(column)
    verdicts[""] = "; ".join(
        f"{', '.join(columns)}: {detail}" for detail, columns in remarks.items()
    )
    return verdicts


def trainable(kind: Kind, family: str, ranks: ForkedRanks, layers: int = 2) -> tuple[Any, str]:
    """A config that stock code trains; ``None`` and why not."""
    try:
        found = configs(kind, family, layers)
    except Exception as error:  # whatever stock code says of fields that it does not want
        return None, short(error)
    why = ""
    for config in found:
        try:
            ranks.alone(try_stock, kind, config)
        except RanksFailed as failed:
            why = short(failed)
        else:
            return config, ""
    return None, why


def try_stock(kind: Kind, config: Any) -> None:
    """One pass forward and backward in one process."""
    case = case_of(kind, config)
    model = in_float64(host_from_config(case.auto_class, case.config, dtype=torch.float64).train())
    use_eager_experts(model)  # the host's grouped matrix products take no float64
    size = sum(parameter.numel() for parameter in model.parameters())
    if size > 1e7:
        raise ValueError(f"the clone has {size / 1e6:.0f} million parameters")
    batch = case.batches(1)[0][0][0]
    with keep_float64():
        loss = (
            case.loss_of(model, batch) if isinstance(case, plain.PlainCase) else model(**batch).loss
        )
        loss.backward()
    if not torch.isfinite(loss):
        raise ValueError(f"the loss is {loss}")


def reload_stock(kind: Kind, config: Any) -> None:
    """What one process saves it has to load: a layout, and what it is compared with, begin with a checkpoint."""
    case = case_of(kind, config)
    model = host_from_config(case.auto_class, case.config, dtype=torch.float64)
    with tempfile.TemporaryDirectory(prefix="hfscale-class-") as name:
        model.save_pretrained(name)
        again = case.auto_class.from_pretrained(name, dtype=torch.float64).state_dict()
    lost = [
        name for name, tensor in model.state_dict().items() if not torch.equal(again[name], tensor)
    ]
    if lost:
        raise ValueError(
            f"stock code does not load {len(lost)} tensors of its own checkpoint back: {lost[0]}"
        )


def judge_layout(
    kind: Kind, config: Any, column: str, ranks: ForkedRanks | None
) -> tuple[str, str]:
    """Verdict of a column with share, and detail; without ranks, of the plan alone."""
    adapters = RECIPE if kind.recipe else column.startswith("LoRA")
    return judge_case(kind, config, lambda case: layout_of(case, column), ranks, adapters)


def judge_case(
    kind: Kind,
    config: Any,
    choose: Callable[[Case], hfscale.ParallelConfig],
    ranks: ForkedRanks | None,
    adapters: bool | str = False,
    change: Callable[[Case], Case] = lambda case: case,
) -> tuple[str, str]:
    """The same of any layout, with LoRA on all linear layers, by the usual recipe (see :func:`recipe`), or without."""
    case = case_of(kind, config)
    try:
        layout = choose(case)
        case, share = planned_case(case, layout)
        case = change(case)
    except (hfscale.HFScaleError, ValueError) as error:
        return "refused", refusal(error)
    except Exception as error:
        return "crash", f"plan: {short(error)}"
    if ranks is None:
        return f"planned {share:.0%}", ""
    if adapters:
        case = replace(case, peft=recipe(case) if adapters == RECIPE else all_linear(kind))
    try:
        parity = measure_parity(case, layout, ranks)
    except RanksFailed as failed:
        return ended(failed)
    except Exception as error:  # after the ranks: files that cannot be loaded, names that differ
        return "crash", short(error)
    if not parity.worst() <= TOLERANCE:
        try:
            ranks.alone(reload_stock, kind, config)
        except RanksFailed as failed:
            return "stock", short(failed.ended[0].error)
        return "wrong", difference(parity)
    return f"equal {share:.0%}", ""


def all_linear(kind: Kind) -> Any:
    """LoRA on all linear layers."""
    import peft

    return peft.LoraConfig(r=2, target_modules="all-linear", task_type=kind.task)


def recipe(case: Case) -> Any:
    """What vision-language models are fine-tuned by: the tower frozen, LoRA in the text, the projector whole."""
    import peft

    plan = hfscale.plan(case.config, auto_class=case.auto_class, dtype=torch.float64)
    towers = plan.feature(TowersPlan)
    text = towers.text if towers is not None and towers.text else plan.layers[0].rpartition(".")[0]
    with torch.device("meta"):
        model = host_from_config(case.auto_class, case.config)
    named = (name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear))
    leaves = sorted({name.rpartition(".")[2] for name in named if name.startswith(f"{text}.")})
    parts = (
        item
        for item in (towers.items if towers is not None else ())
        if re.search(_PROJECTORS, item)
    )
    saved = [part for part in parts if part in dict(model.named_modules())]
    return peft.LoraConfig(
        r=2,
        target_modules=rf"{re.escape(text)}\..*\.({'|'.join(leaves)})",
        modules_to_save=saved or None,
    )


def difference(parity: Parity) -> str:
    """What differs, and by how much."""
    named = {
        "gradient": parity.worst_gradient,
        "weight": parity.worst_weight,
        "replicas": parity.worst_replica,
    }
    found = {
        name: getattr(parity, name)
        for name in ("loss", "gradient", "norm", "weight", "saved", "replicas")
    }
    return ", ".join(
        f"{k} {v:.0e} {named.get(k, '')}".strip() for k, v in found.items() if not v <= TOLERANCE
    )


def layout_of(case: Case, column: str) -> hfscale.ParallelConfig:
    """The layout of a column; stages have half of the layers each."""
    if not column.endswith("pp2"):
        return hfscale.ParallelConfig(
            **{"dp_shard_size" if column.startswith("dp") else "tp_size": 2}
        )
    count = len(hfscale.plan(case.config, auto_class=case.auto_class).layers)
    halves = [count // 2, count - count // 2] if count > 1 else None
    return hfscale.ParallelConfig(pp_size=2, pipeline_schedule="1f1b", stage_layers=halves)


def planned_case(case: Case, layout: hfscale.ParallelConfig) -> tuple[Case, float]:
    """The case as the layout trains it, and what the fullest rank holds of all numbers."""
    plan = hfscale.plan(case.config, layout, auto_class=case.auto_class, dtype=torch.float64)
    own = plan.feature(OwnLossPlan)
    if own is not None and type(case) is plain.PlainCase:
        case = plain.OwnLossCase(
            case.config, auto_class=case.auto_class, make_batch=case.make_batch, over=own.over
        )
    if own is not None and type(case) is PictureCase:
        case = OwnLossPictureCase(case.config, text_alone=case.text_alone, over=own.over)
    if plan.no_step and isinstance(case, PictureCase):
        case = PlainPictureCase(case.config, text_alone=case.text_alone)
    if plan.stages is not None and isinstance(case, RewardCase):
        case = case.by_step()
    parameters = list(plan.owned())
    if any("expert" in parameter.name for parameter in parameters):
        case = replace(case, hf_kwargs={"experts_implementation": "eager"})
    if layout.batch_world > 1 and any(parameter.dtype != torch.float64 for parameter in parameters):
        # Data ranks hold parameters that cannot be given another type.
        case = replace(case, build="parallelize")
    if layout.batch_world > 1:
        with torch.device("meta"):
            model = host_from_config(case.auto_class, case.config)
        # Some are stored under names without the prefix of the base model.
        case = replace(
            case,
            unlike=tuple(
                n.removeprefix(f"{model.base_model_prefix}.") for n, _ in model.named_buffers()
            ),
        )
    axes = {axis: range(layout.size(axis)) for axis in ("pp", "tp", "dp_shard")}
    held = []
    for place in product(*axes.values()):
        at = dict(zip(axes, place, strict=True))
        names = plan.local_names(at["pp"])
        held.append(sum(prod(p.local_shape(at)) for p in parameters if p.name in names))
    return case, max(held) / sum(prod(p.shape) for p in parameters)


def ended(failed: RanksFailed) -> tuple[str, str]:
    """Of processes that did not all return: an error counts more than those it left waiting."""
    if len(failed.ended) == 1:  # the reference: adapters that stock code cannot put there, say
        return "stock", short(failed.ended[0].error)
    errors = [end for end in failed.ended if end.error and not end.hung]
    own = [
        end
        for end in errors
        if not re.search("gloo|Connection (reset|closed)|Broken pipe", end.error)
    ]
    if not errors:
        return "hang", "ranks stand still"
    # the rank that says why, before those that only heard of it
    first = min(own or errors, key=lambda end: "other rank(s)" in end.error)
    if not first.refused:
        return "crash", short(first.error)
    # What a batch is refused for cannot be known before there is one.
    early = not re.search("(load|save)\\.py", first.trace) and (
        "train_step" not in first.trace or "microbatch" in first.error
    )
    return ("refused" if early else "late"), note(first.error, 200)


def refusal(error: Exception) -> str:
    """The first reason, without what to do."""
    lines = str(error).split("\n  - ")
    # Where there is no blueprint: why none could be inferred.
    why = lines[min(1, len(lines) - 1)].rpartition("Also, ")[2]
    why = re.split(": use (?:tp_size|pp_size|dp_shard)", why)[0]
    return note(re.sub("pp_size=2 does not fit .*?:", "stages:", why), 200)


def short(error: Any) -> str:
    """An error in one line of a table."""
    return note(error if isinstance(error, str) else f"{type(error).__name__}: {error}")


def judged(kind: Kind, family: str, columns: tuple[str, ...], only_plan: bool) -> dict[str, str]:
    """The same in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="hfscale-class-") as name:
        directory = Path(name)

        def run(_: Any) -> None:
            (directory / "verdict.json").write_text(
                json.dumps(judge(kind, family, columns, only_plan))
            )

        end = await_all({"judge": in_a_child(run, directory, "judge")}, directory, 12 * TIMEOUT)[
            "judge"
        ]
        if end.error:
            return {**dict.fromkeys(columns, "crash"), "": short(f"the judge: {end.error}")}
        found: dict[str, str] = json.loads((directory / "verdict.json").read_text())
        return found


HEAD = f"""# Classes of models

The tables on this page, written by `scripts/class_sweep.py`, compare model classes other than causal LMs with stock
code in one process. For each class, a tiny model of every family in transformers {transformers.__version__} that
stock code can train is compared in four layouts in float64 (loss, every gradient, gradient norm, weights after two
steps, saved checkpoint). A percentage is the fraction of the parameters on the rank that holds most: 50% means two
equal halves, 100% means that nothing is sharded. Buffers (running statistics of batch norms) differ between data
ranks, as under DDP, and are not compared over data ranks. "planned" means planned, but not run yet; "stock" means
that stock code cannot train the model.
"""


def read(path: Path) -> dict[str, dict[str, list[str]]]:
    """Part -> family -> the cells of its row, of a file that this script wrote."""
    found: dict[str, dict[str, list[str]]] = {}
    rows: dict[str, list[str]] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        if line.startswith("## "):
            rows = found.setdefault(
                next(part for part, kind in KINDS.items() if kind.title == line[3:]), {}
            )
        elif line.startswith("| ") and not line.startswith("| family"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            rows[cells[0]] = cells[1:]
        elif line.startswith(
            "Families not compared, since stock code cannot train tiny models of them: "
        ):
            rows.update(
                {
                    name: []
                    for name in line.removeprefix(
                        "Families not compared, since stock code cannot train tiny models of them: "
                    )
                    .strip(".")
                    .split(", ")
                }
            )
    return found


def page(rows: dict[str, dict[str, list[str]]]) -> str:
    """docs/classes.md."""
    lines = [HEAD, f"| class | trains | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 2) + "|"]
    parts = [part for part in KINDS if rows.get(part)]
    for part in parts:
        own = [cells for cells in rows[part].values() if cells]
        lines.append(
            f"| {KINDS[part].title} | {len(own)} | {' | '.join(count(own, i) for i in range(len(COLUMNS)))} |"
        )
    for part in parts:
        lines += ["", f"## {KINDS[part].title}", "", f"`{KINDS[part].auto}`.", ""]
        lines += [f"| family | {' | '.join(COLUMNS)} | |", "|---" * (len(COLUMNS) + 2) + "|"]
        lines += [
            f"| {family} | {' | '.join(cells)} |"
            for family, cells in sorted(rows[part].items())
            if cells
        ]
        without = sorted(family for family, cells in rows[part].items() if not cells)
        lines += (
            [
                "",
                f"Families not compared, since stock code cannot train tiny models of them: {', '.join(without)}.",
            ]
            if without
            else []
        )
    return "\n".join(lines) + "\n"


def remarks_but(columns: list[str], text: str) -> list[str]:
    """What is said of other columns than these."""
    names = "|".join(COLUMNS)
    found = []
    for remark in re.split(f"; (?=(?:{names})(?:, (?:{names}))*: )", text):
        said_of, _, detail = remark.partition(": ")
        left = [name for name in said_of.split(", ") if name in COLUMNS and name not in columns]
        found += [f"{', '.join(left)}: {detail}"] if left else []
    return found


def count(rows: list[list[str]], column: int) -> str:
    """``98 equal, 18 refused, 3 wrong``."""
    kinds = Counter(cells[column].split()[0] for cells in rows)
    known = [kind for kind in ("equal", "planned", "refused", "stock", *DEFECTS) if kinds[kind]]
    return ", ".join(f"{kinds[kind]} {kind}" for kind in known) or "-"


def main() -> int:
    """Write the tables; the exit status is 1 where there is a defect."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", nargs="*", choices=KINDS, default=list(KINDS))
    parser.add_argument("--only", nargs="*", default=[], help="these families")
    parser.add_argument("--columns", nargs="*", choices=COLUMNS, default=COLUMNS)
    parser.add_argument("--new", action="store_true", help="leave out what the file has")
    parser.add_argument(
        "--defects",
        action="store_true",
        help="those alone that are wrong, crash or hang in the file",
    )
    parser.add_argument(
        "--plan", action="store_true", help="plan, and train nothing: who is refused, and why"
    )
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    import_everything(())
    rows = read(arguments.out) if arguments.out else {}
    for part in arguments.part:
        own = rows.setdefault(part, {})
        columns = [
            column
            for column in arguments.columns
            if not (KINDS[part].recipe and column.startswith("LoRA"))
        ]
        names = [
            name for name in KINDS[part].names() if not arguments.only or name in arguments.only
        ]
        names = [name for name in names if not arguments.new or name not in own]
        if arguments.defects:
            names = [name for name in names if any(cell in DEFECTS for cell in own.get(name, ()))]
        for family in tqdm(names, desc=part):
            verdicts = judged(KINDS[part], family, tuple(columns), arguments.plan)
            before = own.get(family) or ["-"] * (len(COLUMNS) + 1)
            cells = [verdicts.get(column, before[i]) for i, column in enumerate(COLUMNS)]
            remarks = filter(None, [*remarks_but(columns, before[-1]), verdicts[""]])
            own[family] = [*cells, "; ".join(remarks)] if len(verdicts) > 1 else []
            if not arguments.out or arguments.only or any(cell in DEFECTS for cell in cells):
                tqdm.write(f"{family}: {verdicts}")
            elif not own[family]:
                tqdm.write(f"{family}: no clone, {verdicts['']}")
            if arguments.out:
                arguments.out.write_text(page(rows))
    everything = [cell for own in rows.values() for cells in own.values() for cell in cells]
    return int(any(cell in DEFECTS for cell in everything))


if __name__ == "__main__":
    raise SystemExit(main())
