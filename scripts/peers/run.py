"""Run the peers' tests with stock classes, those that pass then with hfscale's, and say which fail that should not.

Usage: python scripts/peers/run.py [--peer trl ...] [--layout one ...] [--sample 8] [--out docs/peers.md]
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from peers.hub import fill, named_in
from peers.judge import Judgement, by_words, judge, read_outcomes, read_refusals, to_ask
from peers.page import write_page
from peers.suites import SUITES, folder_of, paths_of

HERE = Path(__file__).parent
BUILD = Path("build/peers").resolve()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", nargs="+", choices=SUITES, default=list(SUITES))
    parser.add_argument("--layout", nargs="+", help="those of a suite by default")
    parser.add_argument(
        "--sample", type=int, default=1, help="run one of so many tests, and leave the page alone"
    )
    parser.add_argument("--out", type=Path, help="write the table of what passes to this page")
    options = parser.parse_args()
    BUILD.mkdir(parents=True, exist_ok=True)
    judgements: list[Judgement] = []
    for peer in options.peer:
        folder = folder_of(peer, BUILD)
        if folder is None:
            print(
                f"{peer}: its packages ship no tests; name a folder that has them: PEERS_{peer.upper()}=FOLDER"
            )
            continue
        judgements += run_suite(peer, folder, options.layout, options.sample)
    for each in judgements:
        describe(each)
    if options.out is not None and options.sample == 1:
        write_page(options.out, judgements)
    return int(any(each.faults for each in judgements))


def run_suite(
    peer: str, folder: Path, layouts: list[str] | None, sample: int = 1
) -> list[Judgement]:
    """Run what passes with stock classes in each layout with ours."""
    fill(
        BUILD / "hub" / "hub",
        named_in(path for paths in paths_of(peer, folder).values() for path in paths),
    )
    stock = BUILD / f"{peer}-stock.jsonl"
    # Of scripts, which are made for several processes, over as many with stock classes.
    first = SUITES[peer].layouts[0]
    run_tests(peer, folder, stock, ["--with", "stock", "--layout", first], sample)
    asked = to_ask(read_outcomes(stock))
    found: list[Judgement] = []
    for layout in layouts or SUITES[peer].layouts:
        wanted = asked if layout == "one" else asked[:: SUITES[peer].fraction]
        listed = BUILD / f"{peer}-{layout}.txt"
        results = BUILD / f"{peer}-{layout}.jsonl"
        listed.write_text("\n".join(wanted))
        run_tests(
            peer, folder, results, ["--with", "ours", "--layout", layout, "--only", str(listed)]
        )
        found.append(
            judge(
                peer, layout, read_outcomes(results).values(), read_refusals(HERE / "refused.json")
            )
        )
    return found


def run_tests(
    peer: str, folder: Path, results: Path, arguments: list[str], sample: int = 1
) -> None:
    """Run the suite's files in one pytest for each sample, from nothing; of each one test of ``sample``."""
    results.unlink(missing_ok=True)
    for every, files in paths_of(peer, folder).items():
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-c",
            str(HERE / "pytest.ini"),
            "--rootdir",
            ".",
            "-p",
            "peers.plugin",
        ]
        said = [
            "--peer",
            peer,
            "--every",
            "1" if "--only" in arguments else str(every * sample),
            "--results",
            str(results),
        ]
        subprocess.run(
            [*command, *said, *arguments, *map(str, files)],
            cwd=folder,
            env=environment(),
            check=False,
        )


def environment() -> dict[str, str]:
    """Return the environment of the peers' tests: offline, over the hub that is made here."""
    paths = [
        str(HERE.parent),
        str(HERE.parents[1]),
        str(BUILD / "packages"),
        os.environ.get("PYTHONPATH", ""),
    ]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(BUILD / "hub")}
    processor = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    return {
        **os.environ,
        **offline,
        **processor,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }


def describe(judgement: Judgement) -> None:
    """Print the counts, and every fault with its tests."""
    counts = f"{len(judgement.passed)} of {judgement.asked} pass, {len(judgement.refused)} are refused on purpose"
    print(f"{judgement.peer}, {judgement.layout}: {counts}, {len(judgement.faults)} at fault")
    for words, ids in by_words(judgement.faults).items():
        print(f"  {words}")
        for test in ids:
            print(f"    {test}")


if __name__ == "__main__":
    sys.exit(main())
