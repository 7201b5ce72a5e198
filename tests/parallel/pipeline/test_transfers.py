"""Programs of ranks: computations and transfers, placed as torch's engine places them."""

from typing import Any

import pytest
from torch.distributed.pipelining.schedules import _Action, _add_send_recv, _ComputationType

from hfscale.config.schedules import schedule_of
from hfscale.errors import ConfigError
from hfscale.parallel.pipeline.orders import order
from hfscale.parallel.pipeline.timeline import Action, Order, stage_ranks
from hfscale.parallel.pipeline.transfers import rank_programs

LETTERS = {"forward": "F", "backward": "B", "backward_input": "I", "backward_weight": "W"}


def _of_torch(actions: Order) -> list[list[tuple[str, int, int]]]:
    rows: dict[int, list[Any]] = {}
    for rank, row in enumerate(actions):
        pieces: list[list[Any]] = [[]]
        for action in row:
            pieces[-1].append(
                _Action(action.stage, _ComputationType(LETTERS[action.kind]), action.microbatch)
            )
            if not action.paired:
                pieces.append([])
        pairs = [piece for piece in pieces if piece]
        both = _ComputationType.OVERLAP_F_B
        rows[rank] = [p[0] if len(p) == 1 else _Action(-1, both, None, tuple(p)) for p in pairs]
    homes = stage_ranks(actions)
    found = _add_send_recv(rows, homes.__getitem__, len(homes))
    kinds = {letter: kind for kind, letter in LETTERS.items()}
    return [
        [
            (
                kinds.get(part.computation_type.value, part.computation_type.value),
                part.stage_index,
                part.microbatch_index,
            )
            for action in found[rank]
            for part in (action.sub_actions or (action,))
        ]
        for rank in range(len(actions))
    ]


@pytest.mark.parametrize(
    "schedule", ["gpipe", "1f1b", "interleaved1f1b", "interleaved_zero_bubble", "zbv", "dualpipev"]
)
def test_transfers_stand_where_torch_puts_them(schedule: str) -> None:
    for ranks, microbatches in ((1, 4), (2, 4), (3, 6), (4, 8)):
        actions = order(schedule, ranks, microbatches, schedule_of(schedule).default_stages)
        assert rank_programs(actions) == _of_torch(actions)


def test_an_evaluation_has_forward_passes_alone() -> None:
    row = (
        (Action(0, "forward", 0), Action(0, "forward", 1)),
        (Action(1, "forward", 0), Action(1, "forward", 1)),
    )
    first, last = rank_programs(row)
    assert first == [("forward", 0, 0), ("SEND_F", 0, 0), ("forward", 0, 1), ("SEND_F", 0, 1)]
    assert last == [("RECV_F", 1, 0), ("forward", 1, 0), ("RECV_F", 1, 1), ("forward", 1, 1)]


def test_a_pair_that_waits_for_itself_is_refused() -> None:
    pair = (
        (Action(0, "forward", 0, paired=True), Action(0, "backward", 0)),
        (Action(1, "forward", 0), Action(1, "backward", 0)),
    )
    with pytest.raises(ConfigError, match="mine cannot be run: a pair"):
        rank_programs(pair, "mine")
    with pytest.raises(ConfigError, match=r"has updates \(U\) inside a step"):
        rank_programs(((Action(0, "update", 0),),))
