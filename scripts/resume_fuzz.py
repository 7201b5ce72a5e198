"""Draw runs that are killed and go on in another layout, and compare each with one process that nothing interrupted.

    python scripts/resume_fuzz.py --seed 1 --draws 20 [--first 0]
    python scripts/resume_fuzz.py --seed 1 --draws 20 --lever fp16 gradient_compression

Everything of a draw follows from the seed and its index. The exit status is 1 where a draw is wrong.
"""

import argparse
import sys
import tempfile
import time
import warnings
from itertools import count, islice
from pathlib import Path

import torch

from hfscale.testing.pool import RankPool

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.fuzz.lever_values import LEVERS
from tests.fuzz.resume import choose_resume, judge_resume


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="index of the first draw")
    parser.add_argument(
        "--lever", nargs="*", choices=LEVERS, default=[], help="draws alone that have one of these"
    )
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    wrong = 0
    pools = dict[int, RankPool]()
    try:
        every = ((index, choose_resume(arguments.seed, index)) for index in count(arguments.first))
        wanted = (
            each for each in every if not arguments.lever or {*arguments.lever} & {*each[1].levers}
        )
        for index, draw in islice(wanted, arguments.draws):
            begun = time.perf_counter()
            with tempfile.TemporaryDirectory() as directory:
                problem = judge_resume(draw, Path(directory), pools)
            wrong += bool(problem)
            verdict = f"WRONG: {problem}" if problem else "equal"
            seconds = time.perf_counter() - begun
            print(
                f"{arguments.seed}/{index} [{seconds:.0f} s] {draw.write()}\n  {verdict}",
                flush=True,
            )
    finally:
        for pool in pools.values():
            pool.close()
    print(f"{arguments.draws - wrong} of {arguments.draws} equal")
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
