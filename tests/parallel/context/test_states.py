"""Mixers that hand states from segment to segment compute what they compute of the whole: outputs, gradients, work."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

import hfscale
from hfscale import ParallelConfig
from hfscale._compat.transformers.computing import enable_checkpointing
from hfscale._compat.transformers.packed_rows import starts_of
from hfscale._compat.transformers.recurrences import reads_by_functions
from hfscale.distributed.ops.segments import Segments, keep_states_apart
from hfscale.extras.proofs.probe import perturb
from hfscale.models.precision import keep_float64
from hfscale.plan.sequence_split import Split
from hfscale.testing import Case, RankPool, assert_layout_equal, count_traffic
from hfscale.train.runtime import local_tensor

from ...families import config_of
from ...mixtures import EAGER
from ...sweeps import cases

Pools = Callable[[int], RankPool]
FUNCTIONS = ("qwen3_next", "kimi_linear", "bamba", "jamba", "lfm2")
"""A family for each function that mixers call: gated delta rule, KDA, Mamba-2's and Mamba's scan, convolution alone."""
OTHERS = (
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "qwen4_exp_text",
    "olmo_hybrid",
    "bailing_hybrid",
    "falcon_h1",
)
OTHERS += ("granitemoehybrid", "nemotron_h", "mamba2", "mamba", "falcon_mamba", "lfm2_moe", "lfm3")
FAMILIES = cases((*FUNCTIONS, *OTHERS), daily=FUNCTIONS)
TOKENS = 21


def _mixer(family: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(3)
    model = (
        AutoModelForCausalLM.from_config(config_of(family), dtype=torch.float64).double().train()
    )
    perturb(model, 0.1)
    mixer = next(module for module in model.modules() if reads_by_functions(module))
    return mixer, torch.randn(2, TOKENS, model.config.hidden_size, dtype=torch.float64)


def _gradients(
    mixer: nn.Module, x: Tensor, lengths: list[tuple[int, ...]] | None = None
) -> list[Tensor]:
    """The output for ``x``, or for the documents of its rows one by one, and the gradients of all that is in it."""
    x = x.clone().requires_grad_()
    parts = (
        [x]
        if lengths is None
        else [p for row, n in zip(x.split(1), lengths, strict=True) for p in row.split(n, 1)]
    )
    with keep_float64():
        y = torch.cat([mixer(part).flatten() for part in parts])
        weights = torch.linspace(-1, 2, y.numel(), dtype=y.dtype)
        return [y, *torch.autograd.grad((y * weights).sum(), [x, *mixer.parameters()])]


def _assert_close(found: list[Tensor], wanted: list[Tensor]) -> None:
    for here, one in zip(found, wanted, strict=True):
        torch.testing.assert_close(here, one, rtol=1e-10, atol=1e-10)


@dataclass
class Here:
    """A chain whose pieces are all in one process."""

    pieces: tuple[tuple[int, int], ...]

    def tails(self, x: Tensor, width: int) -> list[Tensor]:
        padded = F.pad(x, (width, 0))
        return [padded[..., start : start + width] for start, _ in self.pieces]

    def receive(self, index: int, state: Tensor, anchor: Tensor) -> Tensor:
        return state

    def send(self, index: int, state: Tensor) -> None:
        pass


@pytest.mark.parametrize("family", FAMILIES)
def test_pieces_with_states_are_the_whole(family: str) -> None:
    """Pieces of 2 to 3 tokens: shorter than what a convolution reads."""
    mixer, x = _mixer(family)
    wanted = _gradients(mixer, x)
    pieces = tuple(sorted(piece for rank in range(4) for piece in Split(TOKENS, 4).pieces(rank)))
    segments = Segments(pieces, chain=Here(pieces))
    keep_states_apart(mixer, lambda: segments)
    _assert_close(_gradients(mixer, x), wanted)


@pytest.mark.daily("kimi_linear", "bamba")
@pytest.mark.parametrize("family", FAMILIES)
def test_documents_begin_with_nothing(family: str) -> None:
    """Other documents in each row, some of one token; a deep copy computes with weights of its own."""
    mixer, x = _mixer(family)
    lengths: list[tuple[int, ...]] = [(1, 9, 11), (5, 1, 1, 14)]
    wanted = _gradients(mixer, x, lengths)
    documents = torch.stack(
        [torch.arange(len(n)).repeat_interleave(torch.tensor(n)) for n in lengths]
    )
    segments = Segments(((0, TOKENS),), starts_of(documents))
    keep_states_apart(mixer, lambda: segments)
    other = copy.deepcopy(mixer)
    for parameter in other.parameters():
        parameter.data.zero_()
    _assert_close(_gradients(mixer, x), wanted)
    assert not torch.allclose(_gradients(other, x)[0], wanted[0])


def _work(directory: str, layout: dict[str, int]) -> tuple[int, int, int]:
    """Operations of a step, and bytes that are sent to another rank of it, for 64 tokens and for 128."""
    model = hfscale.from_pretrained(directory, parallel=ParallelConfig(**layout)).train()
    found = []
    for tokens in (64, 128):
        ids = (torch.arange(tokens) % 60)[None]
        with count_traffic() as traffic, FlopCounterMode(display=False) as operations:
            hfscale.train_step(model, {"input_ids": ids, "labels": ids})
        found.append((operations.get_total_flops(), traffic.payload["send"]))
    assert found[0][1] == found[1][1]
    return found[0][0], found[1][0], found[0][1]


@pytest.mark.parametrize("family", ["bamba"])
def test_each_rank_does_its_part_of_the_work(pools: Pools, tmp_path: Path, family: str) -> None:
    """Two states go forward and two gradients back between neighbours, whatever the length: one each on the last."""
    config = config_of(family, mamba_chunk_size=8)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    whole = pools(2).alone(_work, str(tmp_path), {})
    mixers = config.layers_block_type.count("linear_attention")
    assert mixers
    state = 4 * config.mamba_n_heads * config.mamba_d_head * config.mamba_d_state * mixers
    for short, long, sent in pools(2).run(_work, str(tmp_path), {"cp_size": 2}):
        assert short <= 0.55 * whole[0]
        assert long <= 0.55 * whole[1]
        assert sent == 2 * state


@pytest.mark.daily("bamba-{'lengths': (5, 4), 'frozen': ('layers.0', 'embed')}-{'cp_size': 4}")
@pytest.mark.parametrize(
    ("family", "changes", "axes"),
    [
        ("lfm2", {"lengths": (3, 2), "checkpointing": True}, {"cp_size": 2}),
        ("bamba", {"lengths": (5, 4), "frozen": ("layers.0", "embed")}, {"cp_size": 4}),
        pytest.param(
            "qwen3_next",
            {"lengths": (9, 17)},
            {"cp_size": 2, "dp_shard_size": 2},
            marks=pytest.mark.slow,
        ),
        pytest.param("jamba", {"checkpointing": True}, {"cp_size": 4}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_layouts(pools: Pools, family: str, changes: dict[str, Any], axes: dict[str, int]) -> None:
    """Pieces without tokens, and fewer tokens than a convolution reads; frozen and recomputed layers."""
    layout = ParallelConfig(**axes)
    case = Case(config_of(family), hf_kwargs=EAGER, **changes)
    assert_layout_equal(case, layout, pools(layout.total_size))


def _around_an_evaluation(directory: str, axes: dict[str, Any], evaluates: bool) -> Tensor:
    """Gradients of a plain loop whose layers are recomputed, if an evaluation runs before the backward pass."""
    layout = ParallelConfig(**axes)
    model = hfscale.from_pretrained(directory, parallel=layout, **EAGER).train()
    enable_checkpointing(model)
    ids = torch.arange(26).view(2, 13)
    loss = model(input_ids=ids, labels=ids).loss
    if evaluates:
        hfscale.eval_step(model, {"input_ids": ids[:1, :8], "labels": ids[:1, :8]})
    loss.backward()
    return torch.stack([local_tensor(parameter.grad).norm() for parameter in model.parameters()])


def test_an_evaluation_before_a_backward_pass(pools: Pools, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(config_of("lfm2")).save_pretrained(tmp_path)
    found = (
        pools(2).run(_around_an_evaluation, str(tmp_path), {"cp_size": 2}, evaluates)[0]
        for evaluates in (False, True)
    )
    assert torch.equal(*found)
