"""The texts that recipes fill in: the model card and job files, by Jinja; and chat templates, for tokenizers."""

import json
import shlex
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

DIRECTORY = Path(__file__).parent


def environment() -> Environment:
    """Return an environment that finds the templates: lines of blocks leave nothing, and unknown names are errors."""
    made = Environment(
        loader=FileSystemLoader(DIRECTORY),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )
    made.filters |= {"quote": shlex.quote, "json": json.dumps, "repr": repr}
    return made
