"""What the papers say a schedule costs: bubble and live activations, as closed formulas.

With ``p`` ranks, ``m`` microbatches, ``v`` stages per rank, and the durations of one stage ``F`` (forward), ``I`` and
``W`` (backward of input and weights), ``B`` (whole backward), the time a rank waits in one step is::

    gpipe, 1f1b                        (p-1) (F + B)          so (p-1)/m of the ideal m (F + B)
    interleaved1f1b, looped_bfs        (p-1) (F + B)          so (p-1)/(v m) of the ideal m v (F + B)
    interleaved_zero_bubble (ZB-H1)    (p-1) (F + I - W)
    zbv                                0 where F = I = W, as the rank sees it: each begins when its first input comes
                                       and ends as much later than the rank before; over all ranks (p-1) F
    dualpipev                          (p-1) (F&B + B - 3W)   F&B: the two as a pair, F + B if not overlapped
    pipedream, pipedream_2bw           0 once filled; (p-1) (F + B) to fill and drain

Huang et al. 2019 (GPipe); Narayanan et al. 2019, 2021a, 2021b (PipeDream, 2BW and Flush, PTD-P); Lamy-Poirier 2023
(breadth-first); Qi et al. 2023, sections 2.3 and 6 (zero bubble); the README of DeepSeek's DualPipe (its ``PP/2`` is
our ``p``). The formulas ask for enough microbatches; below that :func:`ideal_bubble` answers None.
"""

from hfscale.errors import ConfigError
from hfscale.parallel.pipeline.simulation import DEFAULT_COSTS, Costs


def ideal_bubble(
    schedule: str,
    pp_size: int,
    num_microbatches: int,
    virtual_stages: int = 1,
    costs: Costs = DEFAULT_COSTS,
) -> float | None:
    """Bubble time over ideal time, by the formula; None where the papers have none for these numbers.

    For ``zbv`` it is the bubble as a rank sees it (compare :attr:`Timeline.span_bubble`); otherwise that between the
    first and the last action over all ranks (:attr:`Timeline.bubble`), which is the same there.
    """
    p = pp_size
    m = num_microbatches
    v = virtual_stages
    forward = costs.forward
    backward = costs.backward
    inner = costs.backward_input
    outer = costs.backward_weight
    work = m * v * (forward + backward)
    if schedule in ("gpipe", "1f1b", "pipedream", "pipedream_2bw"):
        return (p - 1) * (forward + backward) / work
    if schedule in ("interleaved1f1b", "looped_bfs"):
        fits = m % p == 0 if schedule == "interleaved1f1b" else m >= p
        return (p - 1) * (forward + backward) / work if fits else None
    work = m * v * (forward + inner + outer)
    if schedule == "interleaved_zero_bubble":
        return (
            (p - 1) * (forward + inner - outer) / work if m % p == 0 and forward >= outer else None
        )
    if schedule == "zbv":
        return 0.0 if m >= 2 * p - 1 and forward == inner == outer else None
    if schedule == "dualpipev":
        pair = forward + backward if costs.pair is None else costs.pair
        return (p - 1) * (pair + backward - 3 * outer) / work if backward == inner + outer else None
    raise ConfigError(f"no formula is known for {schedule!r}")


def peak_formula(
    schedule: str, pp_size: int, num_microbatches: int, virtual_stages: int = 1
) -> tuple[int, ...] | None:
    """Per stage, the most microbatches alive at once, by the formula; None where the papers give only a rank's sum.

    GPipe and breadth-first keep all ``m``; 1F1B and its asynchronous kin ``min(p - s, m)`` on stage ``s``; ZB-H1 (one
    stage per rank) the ``p`` of 1F1B's worst stage everywhere; the V-shaped schedules ``min(2p - s, m)``.
    """
    p = pp_size
    m = num_microbatches
    stages = range(pp_size * virtual_stages)
    if schedule in ("gpipe", "looped_bfs"):
        return tuple(m for _ in stages)
    if schedule in ("1f1b", "pipedream", "pipedream_2bw"):
        return tuple(min(p - s, m) for s in stages)
    if schedule == "interleaved_zero_bubble" and virtual_stages == 1:
        return tuple(min(p, m) for _ in stages)
    if schedule in ("zbv", "dualpipev"):
        return tuple(min(2 * p - s, m) for s in stages)
    return None
