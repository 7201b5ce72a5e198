"""Test layouts on any machine without GPUs: pools of rank processes that communicate by gloo, comparison of a layout
with one process, and counts of collectives.
"""

from ..models.precision import keep_float64
from .counting import Traffic, count_traffic
from .parity import Case, Parity, assert_layout_equal, measure_parity
from .plain import PlainCase
from .pool import RankError, RankPool
