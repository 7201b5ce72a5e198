"""Vision-language models: the text cut like any, towers whole, and pictures in some of the batches only."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import AutoConfig, AutoModelForImageTextToText

import hfscale
from hfscale import ConfigError, ParallelConfig, PlanError
from hfscale.extras.pictures.picture_configs import with_pictures
from hfscale.extras.pictures.picture_parity import (
    PictureCase,
    PlainPictureCase,
    join_pictures,
    make_picture,
)
from hfscale.models.clone import tiny_clone
from hfscale.models.facts import prove
from hfscale.plan.feature_plans import TowersPlan
from hfscale.testing import RankPool, assert_layout_equal

from ..tiny_models import needs

# Mllama's, in 5.17.
pytestmark = pytest.mark.filterwarnings("ignore:`hidden_state` is deprecated:FutureWarning")
Pools = Callable[[int], RankPool]
# (step, distinct batch, microbatch): a rank without any picture, and ranks that have theirs in other microbatches
APART = frozenset([(0, 1, 0), (0, 1, 1), (1, 0, 0), (1, 1, 1)])
NOWHERE = frozenset((step, rank, index) for step in (0, 1) for rank in (0, 1) for index in (0, 1))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llava", "qwen3_vl", "mllama", "gemma4"])
def test_tensor_ranks(pools: Pools, family: str) -> None:
    assert_layout_equal(PictureCase(with_pictures(family)), ParallelConfig(tp_size=2), pools(2))


def test_the_sequence_cut(pools: Pools) -> None:
    layout = ParallelConfig(tp_size=2, sequence_parallel=True)
    assert_layout_equal(PictureCase(with_pictures("qwen2_vl")), layout, pools(2))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llava_next", "mllama"])
@pytest.mark.parametrize("axis", ["dp_shard_size", "dp_replicate_size"])
def test_ranks_with_and_without_pictures(pools: Pools, family: str, axis: str) -> None:
    """llava_next has a parameter beside its modules, and mllama layers that text alone leaves out."""
    case = PictureCase(with_pictures(family), text_alone=APART)
    assert_layout_equal(case, ParallelConfig(**{axis: 2}), pools(2))


@pytest.mark.parametrize("family", [pytest.param("chameleon", marks=pytest.mark.slow), "florence2"])
def test_towers_of_models_that_are_their_own_text(pools: Pools, family: str) -> None:
    """Codes of pictures beside a decoder, and a tower in front of an encoder and a decoder."""
    case = PlainPictureCase(with_pictures(family), text_alone=APART)
    assert_layout_equal(case, ParallelConfig(dp_shard_size=2), pools(2))


def test_layers_that_another_model_reads_by_a_cache(pools: Pools) -> None:
    """PI0's second model attends to keys and values of the first, whose layers' own outputs nothing comes back to."""
    assert_layout_equal(
        PlainPictureCase(with_pictures("pi0")), ParallelConfig(dp_shard_size=2), pools(2)
    )


@needs("inkling2")
def test_what_all_layers_read_pictures_included_is_on_one_stage() -> None:
    with pytest.raises(
        PlanError,
        match=r"all of its layers read the input of the first layer, images included.*: use",
    ):
        hfscale.plan(
            with_pictures("inkling2"),
            ParallelConfig(pp_size=2),
            auto_class=AutoModelForImageTextToText,
        )


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3"])
def test_stages(pools: Pools, family: str) -> None:
    layout = ParallelConfig(pp_size=2, num_microbatches=2)
    assert_layout_equal(PictureCase(with_pictures(family), text_alone=APART), layout, pools(2))


@pytest.mark.slow
def test_stages_and_data_ranks(pools: Pools) -> None:
    layout = ParallelConfig(pp_size=2, num_microbatches=2, dp_shard_size=2)
    assert_layout_equal(PictureCase(with_pictures("llava"), text_alone=APART), layout, pools(4))


def test_layers_that_read_pictures_are_on_one_stage() -> None:
    with pytest.raises(
        PlanError, match=r"inside its layers .*cross_attention_states.*: use pp_size=1"
    ):
        hfscale.plan(
            with_pictures("mllama"),
            ParallelConfig(pp_size=2),
            auto_class=AutoModelForImageTextToText,
        )


def behind_two_layers(layers: int) -> Any:
    """Pictures are added behind the first two layers."""
    config = with_pictures("qwen3_vl", layers=layers)
    config.vision_config.deepstack_visual_indexes = [0, 1]
    return config


@pytest.mark.daily("zbv")
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_pictures_that_are_added_behind_the_first_layers(pools: Pools, schedule: str) -> None:
    """Balanced stages would have one layer first."""
    layout = ParallelConfig(pp_size=2, num_microbatches=2, pipeline_schedule=schedule)
    case = PictureCase(behind_two_layers(3 if schedule == "1f1b" else 5), text_alone=APART)
    assert_layout_equal(case, layout, pools(2))


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ({"pp_size": 4}, r"first of 4 stages, but it has only 4 layers: use at most 3 stages"),
        (
            {"pp_size": 2, "stage_layers": [1, 3]},
            r"stage_layers=\[1, 3\] has 1 on that stage: use at least 2 as the first",
        ),
    ],
    ids=str,
)
def test_layers_behind_which_pictures_are_added_are_on_the_first_stage(
    layout: dict[str, Any], words: str
) -> None:
    with pytest.raises(
        PlanError, match=f"images are added after each of its first 2 layers, .*{words}"
    ):
        hfscale.plan(
            behind_two_layers(4), ParallelConfig(**layout), auto_class=AutoModelForImageTextToText
        )


@dataclass
class VideoCase(PictureCase):
    """Texts with a picture and a video, with one of them, or with none: by distinct batch."""

    kinds: tuple[str, ...] = ("both", "video", "image", "none")

    def batches(self, batch_world: int) -> list[list[list[Any]]]:
        """The kinds move on with every step and microbatch."""
        self.text_alone = frozenset(
            (step, rank, index) for step in (0, 1) for rank in range(4) for index in (0, 1)
        )
        kinds = self.kinds
        draws = torch.Generator().manual_seed(12)
        return [
            [[self._with(kinds[(step + rank + i) % len(kinds)], each, draws) for i, each in enumerate(ranks)]
             for rank, ranks in enumerate(distinct)]
            for step, distinct in enumerate(super().batches(batch_world))
        ]  # fmt: skip

    def _with(self, kind: str, batch: Any, draws: torch.Generator) -> Any:
        for each in [name for name in ("image", "video") if kind in (name, "both")]:
            made = [make_picture(self.config, self._arguments, draws) for _ in batch["input_ids"]]
            pictures = join_pictures(made)
            names = ("pixel_values", "image_grid_thw")
            if each == "video":
                names = ("pixel_values_videos", "video_grid_thw")
            token = getattr(self.config, f"{each}_token_id")
            fill = {"input_ids": token, "labels": -100, "attention_mask": 1}
            fill["mm_token_type_ids"] = 1 if each == "image" else 2
            rows = self._rows(made[0])
            batch = {
                name: torch.cat([value[:, :2], value.new_full((len(value), rows), fill[name]), value[:, 2:]], dim=1)
                if name in fill else value
                for name, value in batch.items()
            } | dict(zip(names, (pictures["pixel_values"], pictures["image_grid_thw"]), strict=True))  # fmt: skip
        return batch


@pytest.mark.daily("dp_shard_size")
@pytest.mark.parametrize(
    "layout",
    [{"dp_shard_size": 2}, {"dp_shard_size": 2, "pp_size": 2, "num_microbatches": 2}],
    ids=lambda layout: "-".join(layout),
)
def test_pictures_and_videos_in_one_batch_and_none_on_other_ranks(
    pools: Pools, layout: dict[str, Any]
) -> None:
    parallel = ParallelConfig(**layout)
    assert_layout_equal(VideoCase(behind_two_layers(3)), parallel, pools(parallel.total_size))


# Bidirectional among a picture's tokens, under windows too; positions of three kinds; features added in layers.
CONTEXT: dict[str, dict[str, Any]] = {
    "gemma3": {"cp_method": "gather"},
    "qwen2_5_vl": {"cp_method": "heads"},
    "qwen3_vl": {"cp_method": "ring"},
    "paligemma": {"cp_size": 4, "cp_method": "ring"},
    "gemma4": {"tp_size": 2},
    "qwen2_vl": {"tp_size": 2, "sequence_parallel": True},
    "llava": {"pp_size": 2, "num_microbatches": 2},
}


@pytest.mark.daily("qwen2_5_vl")
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(each, marks=pytest.mark.slow) if each in ("paligemma", "gemma4") else each
        for each in CONTEXT
    ],
)
def test_context_ranks(pools: Pools, family: str) -> None:
    """Towers see whole pictures on every rank, and the text is cut behind them."""
    layout = ParallelConfig(**{"cp_size": 2, **CONTEXT[family]})
    alone = APART if layout.size("pp") > 1 else frozenset[tuple[int, int, int]]()
    assert_layout_equal(
        PictureCase(with_pictures(family), text_alone=alone), layout, pools(layout.total_size)
    )


@pytest.mark.slow
def test_context_ranks_and_data_ranks_with_adapters(pools: Pools) -> None:
    """The usual recipe: factors in the text, and the projector whole."""
    peft = LoraConfig(
        r=3,
        target_modules=r".*language_model.*\.(q_proj|v_proj|down_proj)",
        modules_to_save=["multi_modal_projector"],
    )
    layout = ParallelConfig(cp_size=2, dp_shard_size=2)
    case = PictureCase(with_pictures("llava"), text_alone=APART, peft=peft, checkpointing=True)
    assert_layout_equal(case, layout, pools(4))


def test_pictures_that_layers_read_by_themselves_are_not_cut() -> None:
    with pytest.raises(
        PlanError, match=r"cp_size=2 does not fit 'mllama'.*cross_attention_states.*: use cp_size=1"
    ):
        hfscale.plan(
            with_pictures("mllama"),
            ParallelConfig(cp_size=2),
            auto_class=AutoModelForImageTextToText,
        )


def _cut(config: Any, batch: Any) -> str:
    layout = ParallelConfig(pp_size=2, num_microbatches=2)
    model = hfscale.from_config(
        config, parallel=layout, auto_class=AutoModelForImageTextToText, dtype=torch.float64
    )
    with pytest.raises(ConfigError) as refused:
        hfscale.train_step(model, batch)
    return str(refused.value)


def test_pictures_are_not_cut_by_rows(pools: Pools) -> None:
    case = PictureCase(with_pictures("llava"))
    for said in pools(2).run(_cut, case.config, case.batches(1)[0][0][0]):
        assert (
            "images cannot be split together with the rows to which they belong: pass train_step a list"
            in said
        )


@pytest.mark.slow
def test_no_pictures_anywhere(pools: Pools) -> None:
    """What nobody's batch went through has no gradient, rather than zeros, which optimizers would decay weights by."""
    case = PictureCase(with_pictures("llava"), text_alone=NOWHERE)
    assert_layout_equal(case, ParallelConfig(dp_shard_size=2), pools(2))


@pytest.mark.slow
def test_the_usual_recipe(pools: Pools) -> None:
    """A frozen tower, and all else trained, on mixed batches over tensor and data ranks."""
    case = PictureCase(with_pictures("llava"), text_alone=APART, frozen=("vision_tower",))
    assert_layout_equal(case, ParallelConfig(tp_size=2, dp_shard_size=2), pools(4))


def test_the_plan_names_what_stays_whole() -> None:
    plan = hfscale.plan(
        with_pictures("llava"), ParallelConfig(tp_size=2), auto_class=AutoModelForImageTextToText
    )
    towers = plan.feature(TowersPlan)
    assert towers is not None
    assert towers.items == ("model.vision_tower", "model.multi_modal_projector")
    assert (
        "beside the text of model.language_model: model.vision_tower, model.multi_modal_projector"
        in str(plan)
    )
    held = [parameter for parameter in plan.owned() if towers.holds(parameter.name)]
    assert sum(torch.Size(parameter.shape).numel() for parameter in held) == towers.parameters
    assert not any(parameter.cuts or parameter.partial for parameter in held)


def test_data_ranks_leave_layers_that_text_does_not_reach_to_the_root() -> None:
    plan = hfscale.plan(
        with_pictures("mllama"),
        ParallelConfig(dp_shard_size=2),
        auto_class=AutoModelForImageTextToText,
    )
    towers = plan.feature(TowersPlan)
    assert towers is not None
    assert [layer for layer in plan.layers if towers.holds(layer)] == [plan.layers[-1]]


@pytest.mark.parametrize("family", ["llava", "kosmos-2"])
def test_the_loss_is_known_by_what_it_is_given(family: str) -> None:
    """Both names are the same; kosmos-2 shifts labels itself."""
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(tiny_clone(AutoConfig.for_model(family)))
    assert model.loss_type == "ForConditionalGeneration"
    assert (prove("loss", model)[0] is None) == (family == "llava")
