"""What stays changed in other libraries is in one list, can be undone, and is left out by a switch."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from hfscale.testing import RankPool

LIBRARIES = ("torch", "transformers", "accelerate", "peft", "trl")
ROOT = Path(__file__).parents[2]
SWITCH = "HFSCALE_GUARDS"


def contents() -> dict[str, int]:
    """The identity of each function and class of these libraries' modules, and of each function of a class."""
    found = {"sys.excepthook": id(sys.excepthook)}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in LIBRARIES or not isinstance(module, ModuleType):
            continue
        for key, value in list(vars(module).items()):
            if callable(value):
                found[f"{name}.{key}"] = id(value)
            if isinstance(value, type) and value.__module__ == name:
                for attribute, method in list(vars(value).items()):
                    if callable(method):
                        found[f"{name}.{value.__qualname__}.{attribute}"] = id(method)
    return found


def run(layout: dict[str, int]) -> None:
    """Build a model over ranks, with adapters, and take a step."""
    import peft

    import hfscale
    from hfscale import ParallelConfig

    from ..tiny_models import tiny

    config = peft.LoraConfig(r=2, target_modules=["q_proj"])
    model = hfscale.from_config(
        tiny("llama"), parallel=ParallelConfig(**layout), peft_config=config
    )
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    ids = torch.arange(8)[None] % 67
    hfscale.train_step(model, {"input_ids": ids, "labels": ids})
    optimizer.step()


def changed_by_a_run(guards: str, layout: dict[str, int]) -> tuple[list[str], list[str], list[str]]:
    """What a run has changed for good, what the list says of it, and what is left of it when that is undone."""
    from hfscale._compat import lasting

    lasting.undo_all()
    os.environ[SWITCH] = "0"
    try:
        run(layout)  # what libraries themselves set as they run
        before = contents()
        os.environ[SWITCH] = guards
        run(layout)
        changed = different(before)
        listed = lasting.changed_places()
        lasting.undo_all()
        return changed, listed, different(before)
    finally:
        del os.environ[SWITCH]


def different(before: dict[str, int]) -> list[str]:
    return sorted(name for name, value in contents().items() if before.get(name, value) != value)


@pytest.mark.parametrize("guards", ["1", "0"])
def test_a_list_has_all_that_a_run_changes_for_good(
    pools: "Callable[[int], RankPool]", guards: str
) -> None:
    for changed, listed, left in pools(2).run(changed_by_a_run, guards, {"tp_size": 2}):
        assert not left
        if guards == "0":
            assert not changed
            assert not listed
            continue
        names = {place.rpartition(".")[2] for place in listed}
        assert {name.rpartition(".")[2] for name in changed} <= names
        assert {
            "accelerate.accelerator.Accelerator.prepare",
            "peft.peft_model.PeftModel.__init__",
            "peft.utils.save_and_load._get_tp_info",
            "torch.amp.grad_scaler.GradScaler.step",
            "torch.nn.utils.clip_grad_norm_",
            "torch.optim.optimizer.Optimizer.step",
        } <= {*listed}


@pytest.fixture
def module() -> Iterator[Any]:
    from hfscale._compat import lasting

    made: Any = ModuleType("torch.nn.utils")
    made.clip_grad_norm_ = lambda tensors, max_norm: (tensors, max_norm)
    kept = dict(lasting._undo)
    lasting._undo.clear()
    yield made
    lasting.undo_all()
    lasting._undo.update(kept)


def test_a_place_is_changed_once_and_put_back(module: Any) -> None:
    from hfscale._compat import lasting

    stock = module.clip_grad_norm_
    calls = []

    def check(tensors: Any, *rest: Any) -> tuple[Any, ...]:
        calls.append(rest)
        return (tensors + 1, *rest)

    for _ in range(2):
        lasting.check_first(module, "clip_grad_norm_", check)
    assert module.clip_grad_norm_(1, max_norm=2) == (2, 2)  # arguments by name reach the check
    assert calls == [(2,)]
    assert lasting.changed_places() == ["torch.nn.utils.clip_grad_norm_"]
    lasting.undo_all()
    assert module.clip_grad_norm_ is stock


def test_no_place_is_changed_that_the_list_lacks(module: Any) -> None:
    from hfscale._compat import lasting

    with pytest.raises(LookupError, match=r"torch\.nn\.utils\.other must be listed in LASTING"):
        lasting.replace_for_good(module, "other", lambda stock: stock)


def test_a_switch_leaves_everything_out(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from hfscale._compat import lasting

    monkeypatch.setenv(SWITCH, "0")
    stock = module.clip_grad_norm_
    lasting.check_first(module, "clip_grad_norm_", lambda *given: given)
    lasting.at_an_uncaught_error(print)
    lasting.check_every_step(print)
    lasting.leave_out_of_log("bitsandbytes.backends.cpu.ops", "words")
    assert module.clip_grad_norm_ is stock
    assert not lasting.changed_places()


def test_errors_are_told_and_printed_as_before() -> None:
    """Several callers hear of an error, the last first, and what is said behind comes after the traceback."""
    script = """
from hfscale._compat import lasting
lasting.at_an_uncaught_error(lambda error: "memory", lambda found: print("behind", found))
lasting.at_an_uncaught_error(lambda error: print("told", error))
raise ValueError("reason")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 1
    assert done.stdout.split("\n")[:2] == ["told reason", "behind memory"]
    assert done.stderr.strip().endswith("ValueError: reason")


def test_the_list_is_documented() -> None:
    from hfscale._compat.lasting import LASTING

    page = (ROOT / "docs" / "what-goes-wrong.md").read_text()
    table = page.partition("## What stays in other libraries")[2]
    said = {
        "bitsandbytes.backends.cpu.ops": "the log of bitsandbytes' CPU kernels",
        "peft.peft_model.PeftModel.__init__": "peft.PeftModel",
        "peft.utils.save_and_load._get_tp_info": "get_peft_model_state_dict",
        "torch.optim.optimizer.Optimizer.step": "every optimizer's step",
        "trl.*Config.__post_init__": "of TRL's configs",
    }
    for place in LASTING:
        assert said.get(place, place.rpartition(".")[2]) in table
