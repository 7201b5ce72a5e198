"""Several adapters of one model over ranks: added, switched, active together, saved, deleted and merged as in PEFT."""

import contextlib
import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import hfscale
from hfscale import ConfigError, ParallelConfig
from hfscale.checkpoint.load import load_weights
from hfscale.checkpoint.state_format import StateIndex
from hfscale.cli import main
from hfscale.models.precision import keep_float64
from hfscale.testing import RankPool

from ...mixtures import qwen3_moe
from ...tiny_models import tiny

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
    pytest.mark.filterwarnings("ignore:.*`past_key_values`:FutureWarning"),
]
Pools = Callable[[int], RankPool]
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp_size": 2},
    "shard2": {"dp_shard_size": 2},
    "pp2": {"pp_size": 2, "num_microbatches": 2},
    "tp2-shard2": {"tp_size": 2, "dp_shard_size": 2},
    "regather": {"tp_size": 2, "sequence_parallel": True, "sequence_regather": True},
}
IDS = torch.randint(3, 60, (4, 9), generator=torch.Generator().manual_seed(0))
BATCH = {"input_ids": IDS, "labels": IDS}


def _lora(targets: list[str], **changes: Any) -> peft.LoraConfig:
    return peft.LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM", **changes)


KINDS: dict[str, tuple[Any, Any]] = {
    "lora": (_lora(["q_proj", "down_proj"]), _lora(["q_proj", "o_proj", "up_proj"], lora_alpha=3)),
    "dora": (_lora(["q_proj", "down_proj"]), _lora(["q_proj", "down_proj"], use_dora=True)),
    "copies": (
        _lora(["q_proj"], modules_to_save=["lm_head"]),
        _lora(["v_proj"], modules_to_save=["lm_head", "norm"]),
    ),
    "tied copies": (
        _lora(["q_proj"]),
        _lora(["v_proj"], modules_to_save=["embed_tokens"], ensure_weight_tying=True),
    ),
    "embedding": (_lora(["embed_tokens", "lm_head"]), _lora(["embed_tokens", "k_proj"])),
    "ia3": (
        peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[], task_type="CAUSAL_LM"),
        peft.IA3Config(
            target_modules=["k_proj", "down_proj"],
            feedforward_modules=["down_proj"],
            task_type="CAUSAL_LM",
        ),
    ),
    "experts": (
        _lora(["q_proj"], target_parameters=["mlp.experts.down_proj"]),
        _lora(["v_proj"], target_parameters=["mlp.experts.down_proj"]),
    ),
    "oft": (
        peft.OFTConfig(oft_block_size=4, target_modules=["q_proj"], task_type="CAUSAL_LM"),
        peft.OFTConfig(
            oft_block_size=8, target_modules=["q_proj", "o_proj"], task_type="CAUSAL_LM"
        ),
    ),
}


def _three_steps(model: Any, names: Any, ours: bool) -> list[float]:
    """Train the adapters ``names``; return each step's loss and norm."""
    model.base_model.set_adapter(names)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.5) if trained else None
    told: list[float] = []
    for _ in range(3):
        if ours:
            loss = hfscale.train_step(model, BATCH)
            norm = hfscale.clip_grad_norm_(model, 0.3)
        else:
            loss = model(**BATCH).loss
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        told += [float(loss.detach()), float(norm)]
        if optimizer is not None:
            optimizer.step()
        model.zero_grad()
    return told


def _life(start: str, kind: str, out: str, sizes: dict[str, Any] | None) -> list[float]:
    """Train A, add B and train it, train both, look at the model without them, save, delete A, and train B again."""
    first, second = copy.deepcopy(KINDS[kind])
    ours = sizes is not None
    with keep_float64():
        if sizes is not None:
            base = hfscale.from_pretrained(
                start,
                parallel=ParallelConfig(**sizes),
                dtype=torch.float64,
                experts_implementation="eager",
            )
            torch.manual_seed(1)
            model = hfscale.get_peft_model(base, first, "a")
        else:
            torch.manual_seed(1)
            base = AutoModelForCausalLM.from_pretrained(
                start, dtype=torch.float64, experts_implementation="eager"
            )
            torch.manual_seed(1)
            model = peft.get_peft_model(base, first, "a")
        told = _three_steps(model, "a", ours)
        torch.manual_seed(2)
        model.add_adapter("b", second)
        assert model.active_adapters == ["a"]
        told += _three_steps(model, "b", ours)
        told += _three_steps(model, "a", ours)
        if "copies" not in kind:  # PEFT computes with one copy at a time
            told += _three_steps(model, ["a", "b"], ours)
        model.set_adapter("b")
        with model.disable_adapter(), torch.no_grad():
            loss = hfscale.eval_step(model, BATCH) if ours else model(**BATCH).loss
            told.append(float(loss))
        model.save_pretrained(out)
        model.delete_adapter("a")
        told += _three_steps(model, "b", ours)
        model.load_adapter(f"{out}/a", "c")
        assert model.active_adapters == ["b"]
        told += _three_steps(model, "c", ours)
        model.load_adapter(f"{out}/b", "b")  # over the one that has trained since
        told += _three_steps(model, "b", ours)
        merged = model.merge_and_unload()
        loss = hfscale.eval_step(merged, BATCH) if ours else merged(**BATCH).loss
        told.append(float(loss.detach()))
    return told


@pytest.fixture
def start(tmp_path: Path) -> str:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(tiny("llama")).save_pretrained(tmp_path / "start")
    return str(tmp_path / "start")


DAILY = (
    "tp2-copies",
    "pp2-tied copies",
    "shard2-lora",
    "pp2-embedding",
    "tp2-shard2-dora",
    "regather-lora",
)


@pytest.mark.daily(*DAILY, "tp2-experts")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_life_of_two(pools: Pools, start: str, tmp_path: Path, kind: str, layout: str) -> None:
    if kind == "experts":
        start = str(tmp_path / "experts")
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(qwen3_moe()).save_pretrained(start)
    if kind == "tied copies":
        start = str(tmp_path / "tied")
        torch.manual_seed(0)
        config = tiny("llama", tie_word_embeddings=True)
        AutoModelForCausalLM.from_config(config).save_pretrained(start)
    expected = _life(start, kind, str(tmp_path / "stock"), None)
    sizes = LAYOUTS[layout]
    ranks = ParallelConfig(**sizes).total_size
    found = pools(ranks).run(_life, start, kind, str(tmp_path / "ours"), sizes)
    assert found[0] == pytest.approx(expected, rel=1e-7)
    for name in ("a", "b"):
        path = Path(name) / "adapter_model.safetensors"
        mine = load_file(tmp_path / "ours" / path)
        theirs = load_file(tmp_path / "stock" / path)
        assert mine.keys() == theirs.keys()
        for key, value in theirs.items():
            torch.testing.assert_close(mine[key], value, rtol=1e-6, atol=1e-9, msg=key)


def _copies_with_gradients(start: str, sizes: dict[str, Any]) -> set[str]:
    """``load_adapter(is_trainable=True)`` leaves copies trainable, whichever adapter is active."""
    base = hfscale.from_pretrained(start, parallel=ParallelConfig(**sizes))
    for_both = _lora(["q_proj"], modules_to_save=["lm_head"])
    model = hfscale.get_peft_model(base, copy.deepcopy(for_both), "a")
    model.add_adapter("b", copy.deepcopy(for_both))
    copies = {
        name.split(".")[-2]: parameter
        for name, parameter in model.named_parameters()
        if "modules_to_save" in name
    }
    copies["b"].requires_grad_(True)
    ignored = {**BATCH, "labels": torch.full_like(IDS, -100)}
    hfscale.train_step(model, [BATCH, ignored])
    return {name for name, parameter in copies.items() if parameter.grad is not None}


def test_a_copy_of_the_head_that_no_pass_reads_gets_no_gradient(pools: Pools, start: str) -> None:
    """A gradient of zeros would let it decay."""
    assert pools(2).run(_copies_with_gradients, start, {"tp_size": 2}) == [{"a"}, {"a"}]


def _refused(start: str) -> list[str]:
    model = hfscale.from_pretrained(start, parallel=ParallelConfig(tp_size=2))
    model = hfscale.get_peft_model(model, _lora(["q_proj"]))
    before = float(hfscale.eval_step(model, BATCH))
    refused = {
        "name": lambda: model.add_adapter("default", _lora(["q_proj"])),
        "type": lambda: model.add_adapter("b", peft.IA3Config(target_modules=["q_proj"])),
        "target": lambda: model.add_adapter("b", _lora(["q_proj", "no_proj"])),
        "rows": lambda: model.add_adapter("b", _lora(["q_proj"], trainable_token_indices=[3])),
        "start": lambda: model.add_adapter("b", _lora(["q_proj"], init_lora_weights="pissa")),
        "file": lambda: model.load_adapter(start, "b"),
        "last": lambda: model.delete_adapter("default"),
        "unknown": lambda: model.delete_adapter("b"),
        "base": lambda: model.get_base_model().add_adapter(_lora(["q_proj"])),
        "inside": lambda: model.base_model.delete_adapter("default"),
        "weighted": lambda: model.add_weighted_adapter(["default"], [1.0], "b"),
        "selected": lambda: model.save_pretrained("nowhere", selected_adapters=["b"]),
        "merged": lambda: model.merge_and_unload(adapter_names=["b"]),
    }
    told = []
    for kind, call in refused.items():
        with pytest.raises((ConfigError, hfscale.CheckpointError)) as error:
            call()
        told.append(f"{kind}: {error.value}")
        assert list(model.peft_config) == ["default"]
        assert float(hfscale.eval_step(model, BATCH)) == before
    return told


def _words_of_a_merge(start: str, merged: str) -> str:
    """Return what the first rank prints as it merges one of two adapters, of which "a" is active."""
    model = hfscale.from_pretrained(start, parallel=ParallelConfig(tp_size=2))
    model = hfscale.get_peft_model(model, _lora(["q_proj"], init_lora_weights=False), "a")
    model.add_adapter("b", _lora(["o_proj"], init_lora_weights=False))
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed):
        hfscale.merge_and_unload(model, adapter_names=[merged])
    return printed.getvalue()


def test_a_merge_is_compared_with_the_adapters_that_it_merges(pools: Pools, start: str) -> None:
    assert "largest difference" in pools(2).run(_words_of_a_merge, start, "a")[0]
    assert "largest difference" not in pools(2).run(_words_of_a_merge, start, "b")[0]


def _of_shared_values(start: str) -> str:
    model = hfscale.from_pretrained(start, parallel=ParallelConfig(tp_size=2))
    config = peft.VeraConfig(r=8, target_modules=["q_proj"], task_type="CAUSAL_LM")
    model = hfscale.get_peft_model(model, config)
    before = float(hfscale.eval_step(model, BATCH))
    with pytest.raises(ConfigError) as error:
        model.add_adapter("b", config)
    assert list(model.peft_config) == ["default"]
    assert float(hfscale.eval_step(model, BATCH)) == before
    return str(error.value)


def test_adapters_of_shared_values_stand_alone(pools: Pools, start: str) -> None:
    for told in pools(2).run(_of_shared_values, start):
        assert "their own parameters alone, got the adapter 'default' of VeraConfig" in told


def test_what_cannot_be_had_is_refused_and_the_model_goes_on(pools: Pools, start: str) -> None:
    told = "\n".join(pools(2).run(_refused, start)[0])
    for words in (
        "already exists",
        "different peft types",
        "'no_proj', which matches nothing",
        "must have no trainable_token_indices",
        "must share one base, got the adapter 'b' with init_lora_weights='pissa'",
        "no adapter_config.json",
        "only adapter of a model that is sharded over ranks",
        "Adapter b does not exist",
        "add_adapter does not work on a sharded model: call it on the model that",
        "combine them in one process",
    ):
        assert words in told, told


def _classifiers(start: str) -> list[list[str]]:
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="SEQ_CLS")
    names = []
    for _ in range(2):
        model = hfscale.from_pretrained(
            start,
            parallel=ParallelConfig(tp_size=2),
            auto_class=AutoModelForSequenceClassification,
        )
        model = hfscale.get_peft_model(model, config)
        model.add_adapter("b", model.peft_config["default"])
        model.set_adapter("b")
        trained = (name for name, each in model.named_parameters() if each.requires_grad)
        names.append([name for name in trained if "modules_to_save" in name])
    return names


@pytest.mark.filterwarnings("ignore:.*score.weight")
def test_a_classifiers_config_may_be_given_again(pools: Pools, start: str) -> None:
    """PEFT completes it by both names that heads of classifiers have, of which a model has one."""
    first, second = pools(2).run(_classifiers, start)[0]
    assert first == second == ["base_model.model.score.modules_to_save.b.weight"]


def _resumed(start: str, directory: str, sizes: list[dict[str, Any]]) -> list[float]:
    told = []
    for number, each in enumerate(sizes):
        model = hfscale.from_pretrained(start, parallel=ParallelConfig(**each), dtype=torch.float64)
        torch.manual_seed(number)
        model = hfscale.get_peft_model(model, _lora(["q_proj", "o_proj"]))
        model.add_adapter("b", _lora(["q_proj", "down_proj"]))
        for name in ("b", "default") if number == 0 else ():
            _three_steps(model, name, ours=True)
        if number == 0:
            hfscale.save_state(model, directory)
            hfscale.save_pretrained(model, f"{directory}-adapters")
        else:
            hfscale.load_state(model, directory)
        for name in ("b", "default"):
            model.set_adapter(name)
            told.append(float(hfscale.eval_step(model, BATCH)))
            keys = [key for key, _ in hfscale.stream_weights(model, adapters_only=True)]
            assert all(
                ("o_proj" in key) == (name == "default") for key in keys if "q_proj" not in key
            )
    return told


def test_a_state_has_all_adapters_in_any_layout(
    pools: Pools, start: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sizes = [{"tp_size": 2}, {"dp_shard_size": 2}]
    told = pools(2).run(_resumed, start, str(tmp_path / "state"), sizes)[0]
    assert told[2:] == pytest.approx(told[:2], rel=1e-6)
    assert told[0] != told[1]
    assert main(["convert", str(tmp_path / "state"), str(tmp_path / "converted")]) == 0
    for place in (".", "b"):
        mine = tmp_path / "converted" / place
        model = tmp_path / "state-adapters" / place
        for file in ("adapter_config.json", "adapter_model.safetensors"):
            assert (mine / file).read_bytes() == (model / file).read_bytes()
    assert "lists only its active adapter" not in caplog.text
    read = StateIndex.read

    def of_earlier_versions(directory: Path) -> StateIndex:
        index = read(directory)
        index.stored = {key: name for key, name in index.stored.items() if "/" not in key}
        return index

    with patch.object(StateIndex, "read", of_earlier_versions):
        assert main(["convert", str(tmp_path / "state"), str(tmp_path / "alone")]) == 0
    assert "lists only its active adapter" in caplog.text
    assert not (tmp_path / "alone" / "b").exists()


def _read_again(start: str, out: str, first: str) -> list[float]:
    """Write both adapters, train both, and read them again while the second is active."""
    model = hfscale.from_pretrained(start, parallel=ParallelConfig(tp_size=2), dtype=torch.float64)
    model = hfscale.get_peft_model(model, _lora(["q_proj"], init_lora_weights=False), first)
    model.add_adapter("b", _lora(["q_proj"], init_lora_weights=False))

    def losses() -> list[float]:
        found = []
        for name in (first, "b"):
            model.set_adapter(name)
            found.append(float(hfscale.eval_step(model, BATCH)))
        return found

    told = losses()
    hfscale.save_pretrained(model, out)
    for name in (first, "b"):
        _three_steps(model, name, ours=True)
    told += losses()
    load_weights(model, out)
    return told + losses()


@pytest.mark.parametrize("first", ["a", "default"])
def test_weights_are_read_into_the_adapters_they_are_of(
    pools: Pools, start: str, tmp_path: Path, first: str
) -> None:
    """A Trainer reads its best checkpoint so: the file at the top, if there is one, is not the active adapter's."""
    told = pools(2).run(_read_again, start, str(tmp_path / "out"), first)[0]
    assert told[4:] == pytest.approx(told[:2], rel=1e-7)
    assert told[2:4] != pytest.approx(told[:2], rel=1e-6)


def _mixed_batch(start: str, sizes: dict[str, Any] | None) -> torch.Tensor:
    with keep_float64():
        model: Any
        adapt: Any = peft.get_peft_model
        if sizes is None:
            model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float64)
        else:
            parallel = ParallelConfig(**sizes)
            model = hfscale.from_pretrained(start, parallel=parallel, dtype=torch.float64)
            adapt = hfscale.get_peft_model
        torch.manual_seed(1)
        model = adapt(model, _lora(["q_proj", "down_proj"], init_lora_weights=False), "a")
        model.add_adapter("b", _lora(["q_proj", "o_proj"], init_lora_weights=False))
        model.eval()
        with torch.no_grad():
            return model(input_ids=IDS, adapter_names=["a", "__base__", "b", "a"]).logits.clone()


def test_rows_of_a_batch_choose_their_adapters(pools: Pools, start: str) -> None:
    expected = _mixed_batch(start, None)
    found = pools(2).run(_mixed_batch, start, {"tp_size": 2})[0]
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)
