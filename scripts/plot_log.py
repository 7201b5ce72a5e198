"""Plot a number that a Trainer logged by step, beside its log, and print its first and last values.

python scripts/plot_log.py runs/examples/grpo/trainer_state.json reward
"""

import argparse
import json
from pathlib import Path

from matplotlib.figure import Figure


def main() -> None:
    """Read the log, and write the picture beside it, by the number's name."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "log", type=Path, help="trainer_state.json, which Trainer.save_state writes"
    )
    parser.add_argument("name", help="a key of the log, as reward or loss")
    arguments = parser.parse_args()
    rows = [
        row for row in json.loads(arguments.log.read_text())["log_history"] if arguments.name in row
    ]
    if not rows:
        parser.error(f"{arguments.log} logs no {arguments.name}")
    steps = [row["step"] for row in rows]
    values = [float(row[arguments.name]) for row in rows]
    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(steps, values, marker="o")
    axes.set(xlabel="step", ylabel=arguments.name)
    axes.grid(alpha=0.3)
    out = arguments.log.with_name(f"{arguments.name}.png")
    figure.savefig(out, dpi=150)
    print(
        f"{arguments.name}: {values[0]:.4f} at step {steps[0]}, {values[-1]:.4f} at step {steps[-1]}; plotted in {out}"
    )


if __name__ == "__main__":
    main()
