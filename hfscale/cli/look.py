"""Functions for the output of all subcommands: print progress, text and JSON, and check that files can be written."""

import argparse
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..extensions import added

_PICTURES = (".png", ".svg")
_STAGING = ".incomplete"  # directory that a killed command leaves, and the next one removes


def print_json(document: Any) -> None:
    """Print a document as JSON; nothing else is printed on standard output."""
    print(json.dumps(document, indent=1, default=str))


def show(arguments: argparse.Namespace, document: Any, text: str) -> None:
    """Print a result: ``document`` as JSON with ``--json``, else ``text``."""
    if arguments.json:
        print_json(document)
    else:
        print(text)


def check_writable(*files: Path | None) -> None:
    """Refuse files whose parent directory does not exist, before the command spends time on their contents."""
    for path in filter(None, files):
        if not path.absolute().parent.is_dir():
            raise ConfigError(
                f"{path} cannot be written, because {path.parent} is not a folder: make that folder first"
            )


def check_directory(directory: Path, of: str) -> None:
    """Refuse a path that is not a directory; the error ends with "give the directory of ``of``"."""
    if not directory.is_dir():
        problem = "is a file" if directory.exists() else "does not exist"
        raise ConfigError(f"{directory} {problem}: give the directory of {of}")


def working(what: str) -> None:
    """Print what the command is doing (``what``) to standard error, if this is a terminal."""
    if sys.stderr.isatty():
        print(f"{what} ...", file=sys.stderr, flush=True)


def add_output(parser: argparse.ArgumentParser) -> None:
    """Add ``--max-shard-size`` and ``--overwrite``, for a command that writes a checkpoint to the directory OUT."""
    parser.add_argument(
        "--max-shard-size",
        default="5GB",
        metavar="SIZE",
        help="largest file (default: %(default)s)",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="write into OUT even if it has files: weights and files of the same "
        "names are replaced, other files stay"
    )  # fmt: skip


def add_conversion(parser: argparse.ArgumentParser) -> None:
    """Add the flags of :func:`add_output`, ``--trust-remote-code``, and a flag for each form of weights that an
    extension adds, for a command that writes the weights of a model again.
    """
    add_output(parser)
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run the code that comes with the model"
    )
    parser.set_defaults(quantization=None)
    for name in added("written_forms"):
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            dest="quantization",
            action="store_const",
            const=name,
            help="quantize the weights again, in the format of the checkpoint that training started from",
        )


def conversion_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the values of the flags of :func:`add_conversion` that say what is written."""
    names = ("max_shard_size", "trust_remote_code", "quantization")
    return {name: getattr(arguments, name) for name in names}


def check_target(out: Path, overwrite: bool, **sources: Path | str) -> None:
    """Refuse the output directory ``out`` if it is one of the ``sources``, which the command reads, or if it has files
    and ``overwrite`` is not set.
    """
    for name, source in sources.items():
        if out.resolve() == Path(source).resolve():
            raise ConfigError(
                f"OUT {out} must not be the directory that is read as {name}: name another directory"
            )
    if out.exists() and not out.is_dir():
        raise ConfigError(f"OUT {out} is a file: name a directory")
    names = (
        sorted(path.name for path in out.iterdir() if path.name != _STAGING) if out.exists() else []
    )
    if names and not overwrite:
        shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        raise ConfigError(
            f"OUT {out} has files already ({shown}): name another directory, or replace them (--overwrite)"
        )


def check_drawing(path: Path) -> None:
    """Refuse ``path`` if no picture can be written to it (suffix, directory, or matplotlib is missing), before the
    picture is computed.
    """
    if path.suffix.lower() not in _PICTURES:
        raise ConfigError(f"{path} has the suffix {path.suffix!r}: use {' or '.join(_PICTURES)}")
    check_writable(path)
    if find_spec("matplotlib") is None:
        raise ConfigError(
            "drawing needs matplotlib, which is not installed: pip install 'hfscale[plots]'"
        )
