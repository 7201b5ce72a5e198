"""Write the page of what the peers' own tests came to."""

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from .judge import Judgement

COUNTS = Path(__file__).parent / "counts.json"
_START = "<!-- written by scripts/peers/run.py -->"
_END = "<!-- end -->"


def write_page(page: Path, judgements: Iterable[Judgement]) -> None:
    """Put the table of counts into ``page``; rows of what did not run stay as they were."""
    counts: dict[str, dict[str, int | dict[str, int]]] = (
        json.loads(COUNTS.read_text()) if COUNTS.exists() else {}
    )
    for each in judgements:
        reasons = Counter(refusal.reason for _, refusal in each.refused)
        counts[f"{each.peer}, {each.layout}"] = {
            "asked": each.asked,
            "passed": len(each.passed),
            "at fault": len(each.faults),
            "refused": dict(sorted(reasons.items())),
        }
    COUNTS.write_text(json.dumps(dict(sorted(counts.items())), indent=1) + "\n")
    before, _, rest = page.read_text().partition(_START)
    page.write_text(f"{before}{_START}\n\n{table(counts)}\n{_END}{rest.partition(_END)[2]}")


def table(counts: dict[str, dict[str, int | dict[str, int]]]) -> str:
    """Return the rows of the page."""
    lines = [
        "| tests of, layout | asked | pass | refused on purpose | at fault |",
        "|---|---|---|---|---|",
    ]
    for name, row in sorted(counts.items()):
        reasons = row["refused"]
        assert isinstance(reasons, dict)
        told = "; ".join(f"{number} {reason}" for reason, number in reasons.items())
        lines.append(f"| {name} | {row['asked']} | {row['passed']} | {told} | {row['at fault']} |")
    return "\n".join(lines) + "\n"
