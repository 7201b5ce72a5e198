"""Prove a layout on any machine: pools of rank processes over gloo, parity with one process, counted communication."""

from ..models.precision import keep_float64
from .counting import Traffic, count_traffic
from .parity import Case, Parity, assert_layout_equal, measure_parity
from .plain import PlainCase
from .pool import RankError, RankPool
