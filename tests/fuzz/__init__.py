"""Random layouts, families and options against plain transformers in one process; see scripts/layout_fuzz.py.

``choose`` makes a draw of a seed and an index, ``judge`` runs it in forked processes and says what became of it,
``shrink`` makes a failing one small.
"""

from .choose import choose
from .choose_crossing import choose_crossing
from .draw import Draw, read
from .judge import DEFECTS, OUTCOMES, Verdict, judge
from .shrink import shrink

__all__ = [
    "DEFECTS",
    "OUTCOMES",
    "Draw",
    "Verdict",
    "choose",
    "choose_crossing",
    "judge",
    "read",
    "shrink",
]
