"""Random scripts with ``transformers.Trainer`` or a trainer of TRL's, each run in one process and in a layout.

::

    draw.py     what to run, as plain data         choose.py   one at random
    data.py     models, tokenizer, rows            script.py   the script itself, stock or in a layout
    judge.py    both in forked processes, and what differs
"""

from .choose import choose
from .draw import Draw, read
from .judge import Verdict, judge

__all__ = ["Draw", "Verdict", "choose", "judge", "read"]
