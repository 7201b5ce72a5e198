"""A layout: what is asked for, checked at once."""

import copy
import pickle
from dataclasses import fields, replace

import pytest
from accelerate import ParallelismConfig

from hfscale import ConfigError, ParallelConfig
from hfscale.config.parallel import AXES
from hfscale.config.schedules import schedule_names


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for field in fields(ParallelConfig):
        monkeypatch.delenv(f"PARALLELISM_CONFIG_{field.name.upper()}", raising=False)


def test_everything_is_one_by_default() -> None:
    layout = ParallelConfig()
    assert {axis: layout.size(axis) for axis in AXES} == dict.fromkeys(AXES, 1)
    assert (layout.total_size, layout.batch_world, layout.describe()) == (1, 1, "one process")
    assert layout.sequence_parallel is False
    assert layout.num_microbatches is None
    assert layout.pipeline_schedule == "1f1b"


def test_is_accelerates_config_with_accelerates_fields() -> None:
    layout = ParallelConfig(dp_replicate_size=2, dp_shard_size=3, tp_size=5)
    assert isinstance(layout, ParallelismConfig)
    assert {field.name for field in fields(ParallelismConfig)} <= {
        field.name for field in fields(ParallelConfig)
    }
    assert layout.tp_enabled
    assert not layout.cp_enabled


def test_sizes_multiply() -> None:
    layout = ParallelConfig(pp_size=2, dp_replicate_size=3, dp_shard_size=5, cp_size=11, tp_size=13)
    assert layout.total_size == 2 * 3 * 5 * 11 * 13
    assert layout.batch_world == 3 * 5


# (ep, tp, expert_tp, dp_shard, dp_replicate) -> processes, edp_shard, edp_replicate, distinct batches, sliced
_EXPERTS = {
    (2, 1, None, None, None): (2, 1, 1, 2, False),  # over data ranks, which are added
    (2, 1, None, 2, None): (2, 1, 1, 2, False),
    (2, 1, None, 6, 2): (12, 3, 2, 2, False),
    (4, 1, None, 2, 2): (4, 1, 1, 4, False),  # over replicas too
    (2, 1, None, None, 2): (2, 1, 1, 2, False),
    (2, 2, None, None, None): (2, 1, 1, 1, True),  # over tensor ranks
    (2, 2, None, 3, None): (6, 3, 1, 1, True),
    (4, 2, None, None, None): (4, 1, 1, 2, True),  # over both
    (2, 2, 2, None, None): (4, 1, 1, 2, False),  # over data ranks, each expert cut
    (3, 4, 4, 6, 2): (48, 2, 2, 3, False),
}


@pytest.mark.parametrize("sizes", list(_EXPERTS))
def test_expert_ranks_are_ranks_of_the_other_axes(sizes: tuple[int | None, ...]) -> None:
    names = ("ep_size", "tp_size", "expert_tp_size", "dp_shard_size", "dp_replicate_size")
    layout = ParallelConfig(**dict(zip(names, sizes, strict=True)))
    found = (
        layout.total_size,
        layout.size("edp_shard"),
        layout.size("edp_replicate"),
        layout.expert_batches,
    )
    assert (*found, layout.slices_tokens) == _EXPERTS[sizes]
    divided = (
        layout.size("edp_shard")
        * layout.size("edp_replicate")
        * layout.size("ep")
        * layout.size("expert_tp")
    )
    assert divided == layout.total_size


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"ep_size": 3, "tp_size": 2},
            "ep_size=3 does not fit tp_size=2, .* use a multiple of 2, or expert_tp_size=2",
        ),
        (
            {"ep_size": 2, "tp_size": 4, "expert_tp_size": 2},
            "expert_tp_size=2 is invalid .* use 1 .* or 4",
        ),
        (
            {"ep_size": 2, "expert_tp_size": 2},
            r"expert_tp_size=2 is invalid with tp_size=1: use 1 \(each expert whole on one rank\)$",
        ),
        (
            {"ep_size": 4, "dp_shard_size": 6},
            "ep_size=4 spreads experts over the tensor ranks of 4 .* use ep_size 1, 2, 3, 6, or",
        ),
        (
            {"ep_size": 4, "dp_shard_size": 3, "dp_replicate_size": 2},
            "use ep_size 1, 3, 6, or leave dp_shard_size out",
        ),
    ],
)
def test_expert_ranks_that_cannot_be_placed(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ParallelConfig(**sizes)


def test_describe_names_only_real_axes() -> None:
    assert ParallelConfig(tp_size=2, dp_shard_size=4).describe() == "tp2 x dp_shard4"


def test_environment_fills_what_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "4")
    monkeypatch.setenv("PARALLELISM_CONFIG_PP_SIZE", "3")
    monkeypatch.setenv("PARALLELISM_CONFIG_SEQUENCE_PARALLEL", "true")
    monkeypatch.setenv("PARALLELISM_CONFIG_NUM_MICROBATCHES", "6")
    layout = ParallelConfig(pp_size=2)
    assert (layout.tp_size, layout.pp_size, layout.sequence_parallel, layout.num_microbatches) == (
        4,
        2,
        True,
        6,
    )


def test_environment_is_checked_like_an_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "many")
    with pytest.raises(ConfigError, match="tp_size='many' is invalid"):
        ParallelConfig()


def test_strings_from_a_command_line_are_numbers() -> None:
    assert ParallelConfig(tp_size="2").tp_size == 2  # type: ignore[arg-type]


@pytest.mark.parametrize("schedule", [*schedule_names(), "mine.csv"])
def test_known_schedules(schedule: str) -> None:
    assert ParallelConfig(pipeline_schedule=schedule).pipeline_schedule == schedule


def test_replicated_data_with_tensor_is_a_layout() -> None:
    # Accelerate's own class refuses it.
    assert ParallelConfig(dp_replicate_size=2, tp_size=2).total_size == 4


@pytest.mark.parametrize(
    "again", [copy.deepcopy, lambda layout: pickle.loads(pickle.dumps(layout)), replace]
)
def test_copies_are_equal(again: object) -> None:
    layout = ParallelConfig(tp_size=2, pp_size=3, pipeline_schedule="gpipe")
    copied = again(layout)  # type: ignore[operator]
    assert copied == layout
    assert copied != ParallelConfig(tp_size=2, pp_size=4, pipeline_schedule="gpipe")
    assert repr(copied) == repr(layout)
    assert "tp_size=2" in repr(layout)


def test_a_layout_is_fixed_and_hashable() -> None:
    layout = ParallelConfig(tp_size=2)
    with pytest.raises(ConfigError, match=r"dataclasses\.replace"):
        layout.tp_size = 4
    wider = replace(layout, tp_size=4)
    assert (layout.tp_size, wider.tp_size, wider.total_size) == (2, 4, 4)
    assert hash(layout) == hash(ParallelConfig(tp_size=2)) != hash(wider)
    assert layout == ParallelConfig(tp_size=2) != wider
    assert pickle.loads(pickle.dumps(layout)) == copy.deepcopy(layout) == layout


@pytest.mark.parametrize("given", [[5, 6, 6, 5], (5, 6, 6, 5), "5,6,6,5", " 5, 6, 6, 5"])
def test_stage_layers(given: object, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = ParallelConfig(pp_size=2, virtual_stages=2, stage_layers=given)  # type: ignore[arg-type]
    assert layout.stage_layers == (5, 6, 6, 5)
    assert layout == replace(layout) == pickle.loads(pickle.dumps(layout))
    assert hash(layout) != hash(replace(layout, stage_layers=[6, 5, 5, 6]))
    assert "stage_layers=(5, 6, 6, 5)" in repr(layout)
    assert ParallelConfig(pp_size=4).stage_layers is None
    monkeypatch.setenv("PARALLELISM_CONFIG_STAGE_LAYERS", "5,6,6,5")
    assert ParallelConfig(pp_size=4).stage_layers == (5, 6, 6, 5)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            [5, 6],
            r"stage_layers=\[5, 6\] has 2 stages, and pp_size=3 x virtual_stages=1 makes 3: use one number per",
        ),
        ([5, 0, 6], r"stage_layers\[1\]=0 is invalid: use a whole number of at least 1"),
        ([5, 1.5, 6], r"stage_layers\[1\]=1\.5 is invalid"),
        ("5,many,6", r"stage_layers\[1\]='many' is invalid"),
        (
            5,
            r"stage_layers=5 is invalid: pass the number of layers of each stage, as in \[5, 6, 6, 5\]",
        ),
    ],
)
def test_impossible_stage_layers(given: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ParallelConfig(pp_size=3, stage_layers=given)  # type: ignore[arg-type]
