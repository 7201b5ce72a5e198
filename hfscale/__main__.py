"""``python -m hfscale``: the same as the ``hfscale`` command."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
