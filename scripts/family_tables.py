"""The tables of docs/families.md, for scripts/family_sweep.py."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

import transformers
from family_variants import PICKS

import hfscale

KINDS = ("equal", "refused", "DIFFERS", "FAILS")
STAGE_LAYERS = 4  # of a clone that is cut into two stages: each then has a layer within it
# Of mixtures, on two ranks: experts over ranks with a batch each; over ranks that share one; that with its tokens cut.
EXPERTS = {
    "data ranks": hfscale.ParallelConfig(ep_size=2),
    "tensor ranks": hfscale.ParallelConfig(ep_size=2, tp_size=2),
    "with the sequence cut": hfscale.ParallelConfig(ep_size=2, tp_size=2, sequence_parallel=True),
}
# How two context ranks read each other's tokens.
CONTEXT = {
    method: hfscale.ParallelConfig(cp_size=2, cp_method=method)
    for method in ("gather", "ring", "heads")
}


@dataclass
class Verdict:
    """What became of one class.

    Attributes:
        kind: one of :data:`KINDS`, or ``no clone``.
        sequence: the same with the sequence cut as well; ``-`` where it was not tried.
        stages: the same in two pipeline stages.
        detail: the largest difference, or why not.
    """

    kind: str
    detail: str
    sequence: str = "-"
    stages: str = "-"


@dataclass
class Section:
    """One table of the file: its summary, its rows, and every verdict in it."""

    summary: str
    rows: list[str]
    kinds: list[str]


def section_of(verdicts: list[Verdict], rows: list[str]) -> Section:
    """The table of verdicts of whole classes."""
    return Section(
        summarize(verdicts),
        rows,
        [kind for v in verdicts for kind in (v.kind, v.sequence, v.stages)],
    )


def by_column(names: Iterable[str], columns: list[list[str]]) -> str:
    """``172 families; gather: 126 equal, ...``: of each family what became of it under each of ``names``."""
    counted = (
        f"{name}: {count([kinds[index] for kinds in columns])}" for index, name in enumerate(names)
    )
    return f"{len(columns)} families; {'; '.join(counted)}"


def with_others(part: str, section: Section, before: str) -> Section:
    """A section of some families, with the rows that others had in the file ``before``, and counted again."""
    _, _, old = _parts(before).get(TEXTS[part][0], "").partition(f"{TEXTS[part][-1]}\n")
    rows = {_cells(row)[0]: row for row in [*old.splitlines(), *section.rows] if row}
    columns = [_cells(row)[1:4] for row in rows.values()]
    if part == "families":
        summary = summarize([Verdict(first, "", second, third) for first, second, third in columns])
    else:
        summary = by_column(EXPERTS if part == "experts" else CONTEXT, columns)
    return Section(summary, [rows[family] for family in sorted(rows)], section.kinds)


def _cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip("| ").split("|")]


def _parts(text: str) -> dict[str, str]:
    """The sections of the file by their first lines."""
    return {part.splitlines()[0]: part for part in re.split("(?m)^(?=#)", text) if part}


def written(found: dict[str, Section], before: str) -> str:
    """The file with the sections ``found``, and what was in it ``before`` of the others."""
    old = _parts(before)
    texts = []
    for part, lines in TEXTS.items():
        if part in found:
            summary = f"{found[part].summary}.".replace("; ", ";\n")
            filled = [line.replace("SUMMARY", summary) for line in lines]
            texts.append("\n".join([*filled, *found[part].rows]) + "\n")
        elif lines[0] in old:
            texts.append(old[lines[0]].rstrip("\n") + "\n")
    return "\n".join(texts)


TEXTS = {
    "families": [
        "# Families under tensor parallelism and in pipeline stages",
        "",
        "Written by `scripts/family_sweep.py`. For every model type (family) of transformers' causal",
        "language models, a tiny model is trained by hfscale and by stock transformers in one process, in",
        "float64, and everything is compared: loss, every gradient, norm, weights after two steps, saved",
        'checkpoint. The layouts are two tensor ranks, the same with `sequence_parallel=True` ("the',
        f'sequence cut"), and two pipeline stages (1F1B, {STAGE_LAYERS} layers if the model type allows',
        "it). Classes that compute their own loss are compared in a plain loop,",
        "`loss = model(**batch).loss; loss.backward()`; not in stages, which need `train_step`, and",
        "`train_step` refuses these classes.",
        "",
        f"Counts of model types, with transformers {transformers.__version__}, of those that stock",
        "transformers builds and trains. equal: everything that is compared agrees to 1e-9. refused:",
        "hfscale raises an error before training. DIFFERS and FAILS would be defects. The first line is",
        'for two tensor ranks, "the sequence cut" adds `sequence_parallel=True`, and "stages" are two',
        "pipeline stages:",
        "SUMMARY",
        "",
        "| family | tensor parallel | with the sequence cut | stages | |",
        "|---|---|---|---|---|",
    ],
    "experts": [
        "## Mixtures of experts",
        "",
        "For every model type whose tiny model has experts, training with whole experts distributed over",
        "two ranks is compared with stock transformers in one process, in float64: loss, every gradient,",
        "norm, weights after two steps, saved checkpoint. The two ranks are data ranks (each with its own",
        "batch), tensor ranks (which share a batch, and shard attention and shared experts), or tensor",
        "ranks with `sequence_parallel=True`.",
        "",
        "Counts of model types with experts, where experts are distributed over two data ranks, over two",
        'tensor ranks, and over two tensor ranks with `sequence_parallel=True` ("the sequence cut").',
        "equal: training agrees with one process to 1e-9. refused: hfscale raises an error before",
        "training. DIFFERS and FAILS would be defects:",
        "SUMMARY",
        "",
        f"| family | {' | '.join(EXPERTS)} | |",
        "|---" * (len(EXPERTS) + 2) + "|",
    ],
    "context": [
        "## Sequences cut over context ranks",
        "",
        "For every model type (family) of transformers' causal language models, training with each",
        "sequence sharded over two ranks (context parallelism) is compared with stock transformers in one",
        "process, in float64, for each `cp_method`. The last column of the table names modules that each",
        "rank ran on its own tokens, with states passed from rank to rank, and modules that both ranks ran",
        "on whole sequences.",
        "",
        "Counts of model types for each `cp_method` (gather, ring, heads) of two context ranks. equal:",
        "loss, gradients, weights and saved checkpoint agree with one process to 1e-9. refused: hfscale",
        "raises an error before training. DIFFERS and FAILS would be defects:",
        "SUMMARY",
        "",
        f"| family | {' | '.join(CONTEXT)} | |",
        "|---" * (len(CONTEXT) + 2) + "|",
    ],
    "variants": [
        "## Options and configs away from the default",
        "",
        f"{PICKS} pairs of an option and a config per causal-LM family, in a fixed shuffled order:",
        "`scripts/family_variants.py`.",
        "",
        "SUMMARY",
        "",
        "| family | option | config | | |",
        "|---|---|---|---|---|",
    ],
    "classes": [
        "## Other classes",
        "",
        "A tiny model of each of these classes, which are not causal language models, is trained by",
        "hfscale and by stock transformers in one process, in float64. equal: loss, gradients, weights and",
        "saved checkpoint agree to 1e-9. refused: hfscale raises an error before training. DIFFERS and",
        'FAILS would be defects. The first line is for two tensor ranks, "the sequence cut" adds',
        '`sequence_parallel=True`, and "stages" are two pipeline stages:',
        "SUMMARY",
        "",
        "| family | class | tensor parallel | with the sequence cut | stages | |",
        "|---|---|---|---|---|---|",
    ],
}


def summarize(verdicts: list[Verdict]) -> str:
    """``140 equal, 7 refused, ... of 147; with the sequence cut 130 equal, ...; in stages 135 equal, ...``."""
    return (
        f"{count([v.kind for v in verdicts])} of {len(verdicts)}; "
        f"with the sequence cut {count([v.sequence for v in verdicts])}; "
        f"in stages {count([v.stages for v in verdicts])}"
    )


def count(kinds: list[str]) -> str:
    """``140 equal, 7 refused, ...``."""
    return ", ".join(f"{sum(found.startswith(kind) for found in kinds)} {kind}" for kind in KINDS)
