"""Draw random scripts with transformers' Trainer or one of TRL's, and compare each layout with one process.

    python scripts/trainer_fuzz.py --seed 1 --draws 60 [--only 17]
    python scripts/trainer_fuzz.py --spec '{"layout": {"tp_size": 2}, "arguments": {"bf16": true}}'

Everything of a draw follows from the seed and its index; a draw prints as one line of JSON that can be given back. The
exit status is 1 where a draw is wrong, crashes or hangs.
"""

import argparse
import collections
import sys
import tempfile
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.fuzz.many import import_everything


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="index of the first draw")
    parser.add_argument("--only", type=int, nargs="*", help="these indices alone")
    parser.add_argument("--spec", nargs="*", help="draws as JSON, instead of a seed's")
    parser.add_argument(
        "--verbose", action="store_true", help="every draw, and where the failing ones failed"
    )
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    warnings.filterwarnings("ignore")
    from tests.fuzz.trainers import choose, judge, read

    import_everything([])
    import trl.experimental  # noqa: F401
    from trl import DPOTrainer, KTOTrainer, SFTTrainer  # noqa: F401

    indices = arguments.only or range(arguments.first, arguments.first + arguments.draws)
    draws = [("", read(text)) for text in arguments.spec or ()]
    draws = draws or [
        (f"{arguments.seed}/{index}", choose(arguments.seed, index)) for index in indices
    ]
    outcomes: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory(prefix="hfscale-models-") as models:
        for name, draw in draws:
            verdict = judge(draw, Path(models))
            outcomes[verdict.outcome] += 1
            print(
                f"{verdict.outcome.upper()} {name} [{verdict.seconds:.1f} s] {verdict.kind}",
                flush=True,
            )
            if verdict.outcome != "equal" or arguments.verbose:
                print(f"  {draw.write()}\n  {verdict.detail}", flush=True)
            if verdict.trace and arguments.verbose:
                print(verdict.trace)
    print(", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common()))
    return int(any(outcomes[kind] for kind in ("wrong", "crash", "hang", "late")))


if __name__ == "__main__":
    raise SystemExit(main())
