"""Print what runs measured and where their files are: ``python scripts/summary.py runs/NAME ...``."""

import json
import sys
from pathlib import Path


def main() -> None:
    for run in map(Path, sys.argv[1:]):
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        training = [record for record in records if "loss" in record]
        evaluation = [record for record in records if "validation_loss" in record]
        merged = [
            record["merged_validation_loss"]
            for record in records
            if "merged_validation_loss" in record
        ]
        first = evaluation[0]
        last = evaluation[-1]
        print(f"{run.name}: {training[-1]['step']} steps, train loss {training[-1]['loss']:.4f}")
        own = ("step", "validation_loss", "validation_accuracy")
        beside = ", ".join(
            f"{name.replace('_', ' ')} {last[name]:.4f}" for name in last if name not in own
        )
        print(
            f"  validation loss {first['validation_loss']:.4f} -> {last['validation_loss']:.4f} nats ({beside})"
        )
        if "validation_accuracy" in last:
            print(
                f"  accuracy {first['validation_accuracy']:.1%} -> {last['validation_accuracy']:.1%}"
            )
        if merged:
            print(f"  merged into the base: validation loss {merged[-1]:.4f}")
        written = [
            f"{run}/{part} (card: README.md)"
            for part in ("adapter", "checkpoint")
            if (run / part).is_dir()
        ]
        print(f"  {', '.join([*written, f'{run}/metrics.jsonl', f'{run}/loss.png'])}")


if __name__ == "__main__":
    main()
