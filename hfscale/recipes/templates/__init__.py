"""Load the Jinja templates of model cards and job files, and the chat templates of tokenizers."""

import json
import shlex
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

DIRECTORY = Path(__file__).parent


def environment() -> Environment:
    """Return the Jinja environment of the templates. Lines with only a Jinja block leave no output, and undefined
    variables raise errors.
    """
    made = Environment(
        loader=FileSystemLoader(DIRECTORY),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )
    made.filters |= {"quote": shlex.quote, "json": json.dumps, "repr": repr}
    return made
