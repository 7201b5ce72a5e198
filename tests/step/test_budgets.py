"""What a step may cost beside its arithmetic: looks of the host at tensors, and launches.

Counted on the CPU, where a look costs nothing: on a GPU each waits for all that was launched before it.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

import hfscale
from hfscale import ParallelConfig
from hfscale.testing import RankPool
from hfscale.train.guards.structure import Structure

from ..tiny_models import tiny

Pools = Callable[[int], RankPool]
LOOKS = {
    "item",
    "tolist",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "nonzero",
    "cpu",
    "numpy",
    "equal",
}
EXTRA = 60  # launches of a step and of clipping, more than stock's forward and backward pass
IDS = torch.arange(4 * 24).view(4, 24) % 61 + 3
BATCH = {"input_ids": IDS, "labels": IDS}


class Looks(TorchFunctionMode):
    """Counts what makes the host wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "?")
        kwargs = kwargs or {}
        copies = name in ("tensor", "as_tensor") and kwargs.get("device") is not None
        if name in LOOKS or copies:
            self.seen[name] += 1
        return func(*args, **kwargs)


class Launches(TorchDispatchMode):
    """Counts operators, without views, which launch nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aliases = [value.alias_info for value in func._schema.returns]
        if not any(alias is not None and not alias.is_write for alias in aliases):
            self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


def launches(call: Callable[[], Any]) -> int:
    call()
    with Launches() as counted, torch.autograd.set_multithreading_enabled(False):
        call()
    return counted.seen.total()


@pytest.mark.parametrize("layers", [1, 4])
def test_launches_beside_stock(layers: int) -> None:
    config = tiny("llama", num_hidden_layers=layers)
    stock, ours = (
        AutoModelForCausalLM.from_config(config).train(),
        hfscale.from_config(config).train(),
    )
    theirs = launches(lambda: stock(**BATCH).loss.backward())

    def step() -> None:
        hfscale.train_step(ours, BATCH)
        hfscale.clip_grad_norm_(ours, 1.0)

    assert launches(step) - theirs <= EXTRA


def test_launches_of_clipping_do_not_grow() -> None:
    counts = []
    for layers in (1, 4):
        model = hfscale.from_config(tiny("llama", num_hidden_layers=layers)).train()
        hfscale.train_step(model, BATCH)
        counts.append(launches(lambda model=model: hfscale.clip_grad_norm_(model, 1.0)))  # type: ignore[misc]
    assert counts[0] == counts[1] < 20


def looks(layout: dict[str, int], microbatches: int) -> Counter[str]:
    config = tiny("llama", num_hidden_layers=4, tie_word_embeddings=True)
    model = hfscale.from_config(config, parallel=ParallelConfig(**layout)).train()
    # The first step also agrees on the random stream, and what travels between stages.
    for _ in range(2):
        with Looks() as counted:
            hfscale.train_step(model, [BATCH] * microbatches)
            hfscale.clip_grad_norm_(model, 1.0)
    return counted.seen


@pytest.mark.parametrize("microbatches", [1, 4])
def test_one_look_at_a_step_of_one_process(microbatches: int) -> None:
    assert looks({}, microbatches) == {"tolist": 1}


@pytest.mark.parametrize("layout", [{"tp_size": 2}, {"pp_size": 2}])
def test_one_look_at_a_step(pools: Pools, layout: dict[str, int]) -> None:
    for seen in pools(2).run(looks, layout, 4):
        assert seen == {"tolist": 1}


def checks_of_a_step(auto_class: str, microbatches: int, train: bool) -> int:
    model = hfscale.from_config(
        tiny("llama", pad_token_id=0),
        parallel=ParallelConfig(tp_size=2),
        auto_class=auto_class,
        dtype=torch.float64,
    ).train()
    batch = {**BATCH, "labels": IDS if "Causal" in auto_class else torch.tensor([0, 1, 1, 0])}
    with mock.patch.object(
        Structure, "check", autospec=True, side_effect=Structure.check
    ) as checked:
        step = hfscale.train_step if train else hfscale.eval_step
        step(model, [batch] * microbatches)
    return checked.call_count


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize(
    "auto_class", ["AutoModelForCausalLM", "AutoModelForSequenceClassification"]
)
def test_a_step_compares_the_model_once(pools: Pools, auto_class: str, train: bool) -> None:
    """Whether the loss is hfscale's or the model's own: in both, the passes of a step are no plain calls."""
    assert pools(2).run(checks_of_a_step, auto_class, 3, train) == [1, 1]
