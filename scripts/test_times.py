"""Print where the time of a test run went: files and tests by seconds, from what pytest's ``--junit-xml`` wrote.

    .venv/bin/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder --junit-xml build/tests.xml
    python scripts/test_times.py build/tests.xml

``make test`` runs on two workers: its tests may take BUDGET seconds together, or it takes longer than a quarter of an
hour. A test that is over its share names in ``@pytest.mark.daily`` the cases that stay, or is marked ``slow``.
"""

import argparse
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

BUDGET = 1500


def times(report: Path) -> dict[tuple[str, str], float]:
    """Return the seconds of each test, set-up included, by module and name."""
    cases = ElementTree.parse(report).getroot().iter("testcase")
    return {
        (case.get("classname") or "", case.get("name") or ""): float(case.get("time") or 0)
        for case in cases
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("report", type=Path, help="what pytest --junit-xml wrote")
    parser.add_argument(
        "--top", type=int, default=30, help="how many files and how many tests to print"
    )
    arguments = parser.parse_args()
    tests = times(arguments.report)
    files: dict[str, float] = defaultdict(float)
    for (module, _), seconds in tests.items():
        files[module] += seconds
    for module, seconds in sorted(files.items(), key=lambda item: -item[1])[: arguments.top]:
        print(f"{seconds:8.1f}  {module}")
    print()
    for (module, name), seconds in sorted(tests.items(), key=lambda item: -item[1])[
        : arguments.top
    ]:
        print(f"{seconds:8.1f}  {module}::{name}")
    print(
        f"\n{sum(tests.values()):.0f} of {BUDGET} seconds in {len(tests)} tests of {len(files)} files"
    )


if __name__ == "__main__":
    main()
