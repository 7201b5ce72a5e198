"""Draw random families, layouts and options, and compare each with plain transformers in one process.

    python scripts/layout_fuzz.py --seed 1 --draws 100 [--jobs 2] [--out docs/fuzz.md]
    python scripts/layout_fuzz.py --seed 1 --only 17 [--shrink]
    python scripts/layout_fuzz.py --seed 1 --draws 100 --levers 2
    python scripts/layout_fuzz.py --seed 1 --draws 100 --lever fp8 gradient_compression
    python scripts/layout_fuzz.py --seed 1 --draws 100 --crossing
    python scripts/layout_fuzz.py --spec '{"family": "llama", "layout": {"tp_size": 2}}' [--shrink]

Everything of a draw follows from the seed and its index; a draw prints as one line of JSON that can be given back. The
exit status is 1 where a draw is wrong, crashes, hangs, or is refused late.
"""

import argparse
import sys
import warnings
from dataclasses import replace
from itertools import count, islice
from pathlib import Path

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.fuzz import Draw, Verdict, choose, choose_crossing, judge, read, report_page, shrink
from tests.fuzz.judge import TIMEOUT
from tests.fuzz.many import import_everything, judge_many


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--draws", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="index of the first draw")
    parser.add_argument(
        "--levers",
        type=int,
        default=0,
        help="draws alone that have so many levers of memory or more",
    )
    parser.add_argument(
        "--lever", nargs="*", default=(), help="draws alone that have one of these levers, by name"
    )
    parser.add_argument(
        "--crossing",
        action="store_true",
        help="draws of what is kept between passes, by projections",
    )
    parser.add_argument("--only", type=int, nargs="*", help="these indices alone")
    parser.add_argument("--spec", nargs="*", help="draws as JSON, instead of a seed's")
    parser.add_argument(
        "--shrink", action="store_true", help="make what fails as small as it still fails"
    )
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=TIMEOUT, help="seconds until a draw hangs")
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--verbose", action="store_true", help="every draw, and where the failing ones failed"
    )
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    warnings.filterwarnings("ignore")
    chooses = choose_crossing if arguments.crossing else choose
    drawn = (
        (index, chooses(arguments.seed, index))
        for index in arguments.only or count(arguments.first)
    )
    asked = set(arguments.lever)
    wanted = (
        (index, draw)
        for index, draw in drawn
        if len(draw.levers) >= arguments.levers and (not asked or asked & {*draw.levers})
    )
    chosen = (
        [] if arguments.spec else list(islice(wanted, len(arguments.only or ()) or arguments.draws))
    )
    indices = [index for index, _ in chosen]
    draws = [read(text) for text in arguments.spec or ()] or [draw for _, draw in chosen]
    names = (
        [f"{arguments.seed}/{index}" for index in indices]
        if not arguments.spec
        else [""] * len(draws)
    )
    import_everything({draw.family for draw in draws})
    judged: dict[int, tuple[Draw, Verdict]] = {}
    bar = tqdm(total=len(draws), desc="draws", file=sys.stderr)
    for position, draw, verdict in judge_many(draws, arguments.jobs, arguments.timeout):
        judged[position] = (draw, verdict)
        bar.update()
        bar.set_postfix_str(report_page.summary(list(judged.values())))
        if verdict.defect or arguments.verbose or arguments.spec or arguments.only:
            tell(names[position], draw, verdict, arguments.verbose or len(draws) < 5)
    bar.close()
    everything = [judged[position] for position in sorted(judged)]
    print(report_page.summary(everything))
    if arguments.shrink:
        make_small(
            [(draw, verdict) for draw, verdict in everything if verdict.defect], arguments.timeout
        )
    if arguments.out:
        arguments.out.write_text(report_page.page(everything, arguments.seed))
    return int(any(verdict.defect for _, verdict in everything))


def tell(name: str, draw: Draw, verdict: Verdict, trace: bool) -> None:
    tqdm.write(
        f"{verdict.outcome.upper()} {name} [{verdict.seconds:.1f} s] {verdict.kind}\n  {draw.write()}"
    )
    tqdm.write(f"  {verdict.detail}")
    if trace and verdict.trace:
        tqdm.write(verdict.trace)


def make_small(failed: list[tuple[Draw, Verdict]], timeout: float) -> None:
    for draw, verdict in failed:
        known = min(timeout, 20.0) if verdict.outcome == "hang" else timeout
        small = shrink(draw, verdict, lambda other, limit=known: judge(other, limit))  # type: ignore[misc]
        again = replace(judge(small, known), trace="")
        print(f"SMALLEST {again.outcome} {again.kind}\n  {small.write()}\n  {again.detail}")


if __name__ == "__main__":
    raise SystemExit(main())
