"""What is put into a model after it was spread over ranks is refused, and hooks that see a part are named."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import hfscale
from hfscale import ParallelConfig
from hfscale.testing import RankPool
from hfscale.testing.parity import stored

from ...refusals import refusal_of
from ...tiny_models import tiny

Pools = Callable[[int], RankPool]
LAYOUTS = [
    {"tp_size": 2, "sequence_parallel": True},
    {"dp_shard_size": 2},
    {"dp_replicate_size": 2},
    {"pp_size": 2},
]
IDS = torch.arange(12).reshape(2, 6)


def built(layout: dict[str, Any]) -> Any:
    return hfscale.from_config(
        tiny("llama"), parallel=ParallelConfig(**layout), dtype=torch.float64
    ).train()


class _Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def new_mlp(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp = nn.Linear(32, 32, dtype=torch.float64)


def new_loss(model: Any) -> None:
    model.loss_function = lambda logits, labels, vocab_size, **_: logits.float().mean()


CHANGES: dict[str, Callable[[Any], Any]] = {
    "another head": lambda m: setattr(
        m, "lm_head", nn.Linear(32, 67, bias=False, dtype=torch.float64)
    ),
    "another mlp": new_mlp,
    "fewer layers": lambda m: setattr(m.model, "layers", m.model.layers[:1]),
    "one more module": lambda m: setattr(m, "value_head", nn.Linear(32, 1, dtype=torch.float64)),
    "one more parameter": lambda m: setattr(m.model, "scale", nn.Parameter(torch.ones(1))),
    "another weight": lambda m: setattr(
        m.model.norm, "weight", nn.Parameter(torch.ones(32, dtype=torch.float64))
    ),
    "another loss": new_loss,
    "a child of a projection": lambda m: m.model.layers[-1].mlp.up_proj.add_module(
        "low_rank", nn.Linear(32, 2, dtype=torch.float64)
    ),
    "a parameter of a list": lambda m: m.model.layers.register_parameter(
        "gate", nn.Parameter(torch.ones(1))
    ),
}
IN_LEAVES = ("a child of a projection", "a parameter of a list")
"""Changes after a first pass, which has looked at every module: later ones count what such modules usually lack."""

CHANGED_BEFORE_A_SAVE = ("another head", "fewer layers", "another weight")


def refused(layout: dict[str, Any]) -> dict[str, list[str]]:
    """What a step, and in layouts whose ranks have all layers a plain loop, say to each change."""
    said = {}
    for name, change in CHANGES.items():
        model = built(layout)
        if name == "another weight" and not isinstance(model.model.norm, LlamaRMSNorm):
            continue  # the last norm is the other stage's
        batch = {"input_ids": IDS, "labels": IDS}
        if name in IN_LEAVES:
            hfscale.eval_step(model, batch)
        change(model)
        calls = [lambda: hfscale.train_step(model, batch), lambda: hfscale.eval_step(model, batch)]  # noqa: B023
        if "pp_size" not in layout:
            calls.append(lambda: model(**batch))  # noqa: B023
        said[name] = [refusal_of(call) for call in calls]
    return said


@pytest.mark.daily("{'tp_size': 2, 'sequence_parallel': True}", "{'dp_shard_size': 2}")
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_changes_are_refused_in_steps_and_plain_loops(pools: Pools, layout: dict[str, Any]) -> None:
    for rank, said in enumerate(pools(2).run(refused, layout)):
        for name, messages in said.items():
            for message in messages:
                expected = (
                    "model.loss_function was set since"
                    if name == "another loss"
                    else "since this Llama"
                )
                assert expected in message, (rank, name, message)


def saved(layout: dict[str, Any], directory: str) -> list[str]:
    """Save a model before and after each of three changes; returns the warnings."""
    heard = _Heard()
    log = logging.getLogger("hfscale.train.guards.structure")
    log.addHandler(heard)
    model = built(layout)
    hfscale.train_step(model, {"input_ids": IDS, "labels": IDS})
    hfscale.save_pretrained(model, f"{directory}/before")
    try:
        for name in CHANGED_BEFORE_A_SAVE:
            model = built(layout)
            hfscale.train_step(model, {"input_ids": IDS, "labels": IDS})
            if name != "another weight" or isinstance(model.model.norm, LlamaRMSNorm):
                CHANGES[name](model)
            modules = list(model.modules())
            hfscale.save_pretrained(model, f"{directory}/{name}")
            assert list(model.modules()) == modules
    finally:
        log.removeHandler(heard)
    return heard.said


@pytest.mark.daily("{'pp_size': 2}")
@pytest.mark.parametrize("layout", LAYOUTS[:2] + LAYOUTS[3:], ids=str)
def test_a_save_writes_what_was_trained_and_warns_of_changes(
    pools: Pools, layout: dict[str, Any], tmp_path: Path
) -> None:
    said = pools(2).run(saved, layout, str(tmp_path))
    expected = stored(tmp_path / "before")
    for name in CHANGED_BEFORE_A_SAVE:
        found = stored(tmp_path / name)
        assert found.keys() == expected.keys(), name
        assert all(torch.equal(found[key], expected[key]) for key in expected), name
    for warnings in said:
        assert len(warnings) >= len(CHANGED_BEFORE_A_SAVE) - 1
        assert all(
            "the save has the model that was trained, without this change" in warning
            for warning in warnings
        )


def goes_on(layout: dict[str, Any]) -> list[float]:
    """A model that was only used: passes, evaluation, a state that is put back, types, frozen parts."""
    model = built(layout)
    batch = {"input_ids": IDS, "labels": IDS}
    losses = [hfscale.train_step(model, batch)]
    with torch.no_grad():
        if "pp_size" not in layout:
            model(**batch)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    model.model.layers[0].requires_grad_(False)
    losses.append(hfscale.train_step(model, batch))
    # FSDP2 keeps buffers of the first type.
    if "dp_shard_size" not in layout and "dp_replicate_size" not in layout:
        model.to(torch.float32)
    losses.append(hfscale.eval_step(model, batch))
    assert model.num_parameters() == 20192
    return [float(loss) for loss in losses]


@pytest.mark.daily("{'tp_size': 2, 'sequence_parallel': True}", "{'pp_size': 2}")
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_use_is_no_change(pools: Pools, layout: dict[str, Any]) -> None:
    for first, second, third in pools(2).run(goes_on, layout):
        assert first == pytest.approx(second)
        assert first == pytest.approx(third, rel=1e-4)


def hooked(layout: dict[str, Any], where: str) -> list[str]:
    model = built(layout)
    for module in model.modules() if where == "*" else [model.get_submodule(where)]:
        module.register_forward_hook(lambda module, args, output: None)
    heard = _Heard()
    log = logging.getLogger("hfscale.train.guards.structure")
    log.addHandler(heard)
    try:
        for _ in range(2):
            hfscale.train_step(model, {"input_ids": IDS, "labels": IDS})
    finally:
        log.removeHandler(heard)
    return heard.said


@pytest.mark.parametrize(
    ("layout", "where", "seen"),
    [
        ({"tp_size": 2}, "model.layers.1", None),
        ({"tp_size": 2}, "model.layers.1.mlp", None),
        (
            {"tp_size": 2},
            "model.layers.1.mlp.down_proj",
            "inside model.layers.1.mlp it gets this rank's heads",
        ),
        ({"tp_size": 2}, "lm_head", "slice of the vocabulary"),
        ({"tp_size": 2, "sequence_parallel": True}, "model.layers.1", "cut by sequence_parallel"),
        ({"cp_size": 2}, "model.layers.1", "of sequences that context ranks share"),
        ({"dp_shard_size": 2}, "model.layers.1.mlp.down_proj", None),
    ],
    ids=str,
)
def test_a_hook_that_sees_a_part_is_named_once(
    pools: Pools, layout: dict[str, Any], where: str, seen: str | None
) -> None:
    for said in pools(2).run(hooked, layout, where):
        if seen is None:
            assert said == []
        else:
            assert len(said) == 1, said
            assert (
                f"a hook on {where}, and any similar hook, reads and changes only this rank's shard"
                in said[0]
            )
            assert seen in said[0]


def test_hooks_everywhere_are_named_once_for_each_way_of_seeing_a_part(pools: Pools) -> None:
    for said in pools(2).run(hooked, {"tp_size": 2, "sequence_parallel": True}, "*"):
        assert len(said) == 4, said  # tokens between blocks, attention, MLP, the head


def part_called(layout: dict[str, Any]) -> str:
    return refusal_of(lambda: built(layout).model(input_ids=IDS))


def test_a_part_of_the_model_cannot_be_called_where_it_is_not_whole(pools: Pools) -> None:
    assert pools(2).run(part_called, {"tp_size": 2}) == ["accepted"] * 2
    for said in pools(2).run(part_called, {"pp_size": 2}):
        assert "is on another pipeline stage" in said
    for said in pools(2).run(part_called, {"dp_shard_size": 2}):
        assert "LlamaModel was called directly, but FSDP2 gathers the weights" in said


def counted(layout: dict[str, Any]) -> list[int]:
    model = built(layout)
    for parameter in model.get_submodule("model.layers.0").parameters():
        parameter.requires_grad_(False)
    adapted = hfscale.get_peft_model(
        built(layout), LoraConfig(r=2, target_modules=["q_proj", "down_proj"])
    )
    counts = [model.num_parameters(exclude_embeddings=each) for each in (False, True)]
    if "pp_size" not in layout:
        counts.append(model.num_parameters(only_trainable=True))
    return [*counts, adapted.get_base_model().num_parameters(only_trainable=True)]


@pytest.mark.daily("{'dp_shard_size': 2}", "{'tp_size': 2, 'sequence_parallel': True}")
@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[1], LAYOUTS[3]], ids=str)
def test_parameters_are_counted_whole(
    pools: Pools, layout: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    expected = counted({})
    if "pp_size" in layout:
        del expected[2]
    assert pools(2).run(counted, layout) == [expected] * 2


def total_norm(layout: dict[str, Any]) -> str:
    model = built(layout)
    hfscale.train_step(model, {"input_ids": IDS, "labels": IDS})
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return refusal_of(lambda: torch.nn.utils.get_total_norm(gradients))


@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[3]], ids=str)
def test_a_norm_of_parts_is_refused(pools: Pools, layout: dict[str, Any]) -> None:
    for said in pools(2).run(total_norm, layout):
        assert "get_total_norm would return, on each rank of" in said


def test_of_what_fsdp_shards_torch_knows_the_norm(pools: Pools) -> None:
    assert pools(2).run(total_norm, {"dp_shard_size": 2}) == ["accepted"] * 2


def retyped() -> list[str]:
    """Types before and behind the first pass."""
    model = built({"dp_shard_size": 2})
    batch = {"input_ids": IDS, "labels": IDS}
    said = []
    model.to(torch.float32)
    hfscale.train_step(model, batch)
    model.to(torch.float32)
    hfscale.train_step(model, batch)
    model.to(torch.bfloat16)
    for call in (lambda: hfscale.train_step(model, batch), lambda: model(**batch)):
        said.append(refusal_of(call))
    model.to(torch.float32)
    hfscale.train_step(model, batch)
    return said


def test_another_type_behind_a_pass_is_refused_where_data_ranks_shard(pools: Pools) -> None:
    for said in pools(2).run(retyped):
        for message in said:
            assert (
                "was converted to another dtype (torch.bfloat16) after a forward pass, but over dp_shard2"
                in message
            )
            assert "call model.to(...) before the first pass" in message
