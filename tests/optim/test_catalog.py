"""Names, options, groups and warnings of optimizers (traps T21, T27); blocks of shares."""

import re
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from transformers import Trainer, get_scheduler
from transformers.training_args import OptimizerNames

import hfscale
from hfscale import ConfigError
from hfscale.optim.catalog import CHOICES, REFUSED
from hfscale.plan import Cut, ParameterPlan
from hfscale.plan.quantized import flat_blocks_align, some_share_is_empty
from hfscale.testing import RankPool

from ..tiny_models import tiny
from .cases import CONFIGS, build, decaying_names, run, state_bytes

Pools = Callable[[int], RankPool]


def test_every_name_of_the_trainer_is_had_or_refused() -> None:
    names = {name.value for name in OptimizerNames}
    refused = {
        name
        for name in names | CHOICES.keys()
        if any(re.search(pattern, name) for pattern in REFUSED)
    }
    assert names <= CHOICES.keys() | refused
    assert CHOICES.keys() - names == {"adam_8bit", "muon"}
    assert not CHOICES.keys() & refused


def test_refusals() -> None:
    model = build("fused", torch.float32)

    def refused(match: str, name: str = "adamw_torch", **options: Any) -> None:
        with pytest.raises(ConfigError, match=match):
            hfscale.create_optimizer(model, name, **{"lr": 1e-3, **options})

    refused("'galore_adamw' is not supported: .* Use one of adafactor, .*, sgd", "galore_adamw")
    refused("'adamm' is unknown. Use one of adafactor", "adamm")
    refused("'sgd' has no option momentun: it takes momentum", "sgd", momentun=0.9)
    refused("no option beta3", "adamw_torch", optim_args="beta3=0.9")
    refused("momentum='high' cannot be read", "sgd", optim_args="momentum=high")
    refused("write 'name=value", "sgd", optim_args="momentum")
    refused("needs a learning rate", lr=None)
    refused("pass lr=None", "adafactor", relative_step=True)
    refused("needs relative_step=True", "adafactor", warmup_init=True)
    refused("use None, 'original', 'match_rms_adamw'", "muon", adjust_lr_fn="mine")
    refused("lr=-1.0 is invalid: use a finite number of at least 0", lr=-1.0)
    refused("lr='1e-4' is invalid: use a finite number", lr="1e-4")
    refused("weight_decay=-1 is invalid", weight_decay=-1)
    refused("betas=0.9 is invalid: pass 2 numbers", betas=0.9)
    refused("stochastic_rounding='yes' is not a switch", stochastic_rounding="yes")
    refused("rounding_seed='a' is invalid", rounding_seed="a")
    refused("optim_args=3 cannot be read", optim_args=3)
    refused("must have 'params'", groups=[{"lr": 1.0}])
    refused(
        r"one of shape \(2,\) does not belong to the model",
        groups=[{"params": [torch.nn.Parameter(torch.zeros(2))]}],
    )
    refused(
        "transformer.wpe.weight does not train", groups=[{"params": [model.transformer.wpe.weight]}]
    )
    with pytest.raises(ConfigError, match="is not a model of transformers"):
        hfscale.create_optimizer(torch.nn.Linear(2, 2), lr=1e-3)
    with pytest.raises(ConfigError, match="cannot be added"):
        hfscale.create_optimizer(model, lr=1e-3).add_param_group({"params": []})
    # Adafactor's are two, in optim_args
    assert hfscale.create_optimizer(model, "adafactor", lr=1e-3, eps=(1e-20, 1e-2)).defaults[
        "eps"
    ] == (1e-30, 1e-3)


def test_groups_and_options() -> None:
    model = build("fused", torch.float32)
    norms = [p for name, p in model.named_parameters() if "ln_" in name]
    rest = [p for name, p in model.named_parameters() if "ln_" not in name and p.requires_grad]
    optimizer = hfscale.create_optimizer(
        model,
        OptimizerNames.SGD,
        lr=1e-2,
        weight_decay=0.3,
        optim_args="momentum=0.5, nesterov=True",
        groups=[{"params": iter(norms), "lr": 0.5, "weight_decay": 0.0}, {"params": rest}],
        momentum=0.25,
    )
    first, second = optimizer.param_groups
    assert (first["lr"], first["weight_decay"], first["momentum"], first["nesterov"]) == (
        0.5,
        0.0,
        0.25,
        True,
    )
    assert (second["lr"], second["weight_decay"]) == (1e-2, 0.3)
    assert list(map(id, second["params"])) == list(map(id, rest))
    scheduler = get_scheduler("cosine", optimizer, num_warmup_steps=1, num_training_steps=3)
    before = [p.detach().clone() for p in model.parameters()]
    run(model, "fused", optimizer, range(1))  # at a learning rate of 0
    assert all(torch.equal(p, value) for p, value in zip(model.parameters(), before, strict=True))
    scheduler.step()
    run(model, "fused", optimizer, range(1))
    assert not torch.equal(model.transformer.h[0].ln_1.weight, before[2])
    assert optimizer.step(lambda: 3.0) == 3.0


@pytest.mark.parametrize(
    "options", [{}, {"warmup_init": True}, {"scale_parameter": False, "beta1": 0.9}]
)
def test_adafactor_of_relative_steps(options: dict[str, Any]) -> None:
    from transformers.optimization import Adafactor

    for dtype, tolerance in ((torch.float64, 1e-13), (torch.bfloat16, 1e-2)):
        ours = build("experts", torch.float64).to(dtype)
        theirs = build("experts", torch.float64).to(dtype)
        given = {"relative_step": True, "scale_parameter": True, **options}
        with (
            pytest.warns(UserWarning, match="16-bit")
            if dtype == torch.bfloat16
            else torch.no_grad()
        ):
            optimizer = hfscale.create_optimizer(ours, "adafactor", lr=None, **given)
        run(ours, "experts", optimizer, range(3))
        run(theirs, "experts", Adafactor(theirs.parameters(), **{"lr": None, **given}), range(3))
        for mine, wanted in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert (mine - wanted).abs().max() <= tolerance * wanted.abs().max()


def trainers_rule(kind: str) -> set[str]:
    model = build(kind, torch.float32)
    return (
        set(Trainer.get_decay_parameter_names(None, model)) & dict(model.named_parameters()).keys()
    )  # type: ignore[arg-type]


@pytest.mark.daily(
    "layout0-experts", "layout0-rows", "layout1-biased_experts", "layout1-ragged", "layout0-fused"
)
@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize(
    "layout", [{"tp_size": 2, "dp_shard_size": 2}, {"pp_size": 2, "tp_size": 2}]
)
def test_what_decays_is_the_trainers_choice(
    pools: Pools, kind: str, layout: dict[str, Any]
) -> None:
    found = pools(4).run(decaying_names, layout, kind)
    assert set().union(*found) == trainers_rule(kind)


def test_narrow_weights_that_do_not_move() -> None:
    """What bfloat16 does to small updates: 1 + 1e-4 is 1. A float32 weight moves."""
    for dtype, moves in ((torch.float32, True), (torch.bfloat16, False)):
        model = hfscale.from_config(tiny("llama"), dtype=dtype)
        norm = model.model.norm.weight
        if moves:
            optimizer = hfscale.create_optimizer(model, "adamw_torch", lr=1e-4)
        else:
            with pytest.warns(
                UserWarning, match="keeps no float32 copy.*mixed_precision='bf16'"
            ) as caught:
                optimizer = hfscale.create_optimizer(model, "adamw_torch", lr=1e-4)
            assert len(caught) == 1
        run(model, "", optimizer, range(3))
        assert bool((norm != 1).any()) == moves


CUTS = [
    ((8, 512), (Cut("tp", 1, 2),), True),  # two blocks in a row, one per rank
    ((8, 512), (Cut("tp", 1, 4),), False),
    ((8, 64), (Cut("tp", 0, 2),), True),
    ((129, 64), (Cut("tp", 0, 2),), False),
    ((132, 64), (Cut("tp", 0, 2), Cut("dp_shard", 0, 2)), False),
    ((256, 64), (Cut("tp", 0, 2), Cut("dp_shard", 0, 2)), True),
    ((5, 64), (Cut("dp_shard", 0, 4),), False),
    ((24, 64), (Cut("tp", 0, 2, parts=(8, 8, 8)),), True),
    ((20, 64), (Cut("tp", 0, 2, parts=(8, 6, 6)),), False),
    ((12, 64), (Cut("tp", 0, 2, parts=(8, 4), replicas=(1, 2)),), True),
    ((4, 16, 32), (Cut("ep", 0, 2), Cut("tp", 1, 2)), True),
    ((4, 16, 32), (Cut("ep", 0, 2), Cut("tp", 2, 2)), False),
    ((1, 256), (Cut("tp", 0, 2),), True),  # one rank has nothing
    ((300,), (), True),
]


@pytest.mark.parametrize(("shape", "cuts", "align"), CUTS)
def test_blocks_of_shares(shape: tuple[int, ...], cuts: tuple[Cut, ...], align: bool) -> None:
    """Against what the shares of a tensor of places hold."""
    planned = ParameterPlan("x", shape, torch.float32, cuts=cuts)
    places = torch.arange(torch.Size(shape).numel()).view(shape)
    blocks = {block.tolist()[0]: block for block in places.flatten().split(256)}
    whole = True
    empty = False
    for ranks in product(*(range(cut.size) for cut in cuts)):
        share = planned.take(
            places, {cut.axis: rank for cut, rank in zip(cuts, ranks, strict=True)}
        ).flatten()
        empty |= not len(share)
        for block in share.split(256) if len(share) else ():
            other = blocks.get(int(block[0]))
            whole &= other is not None and torch.equal(other, block)
    assert flat_blocks_align(planned, 256) == whole == align
    assert some_share_is_empty(planned) == empty


def test_bytes_of_state() -> None:
    model = build("rows", torch.float32)
    count = sum(p.numel() for p in model.parameters())
    optimizer = hfscale.create_optimizer(model, "adamw_torch", lr=1e-3)
    assert state_bytes(optimizer) == 0
    run(model, "rows", optimizer, range(1))
    assert 8 * count <= state_bytes(optimizer) <= 8 * count + 4 * len(list(model.parameters()))
    small = hfscale.create_optimizer(model, "adamw_8bit", lr=1e-3, min_8bit_size=0)
    run(model, "rows", small, range(1))
    assert 2 * count < state_bytes(small) < 2.1 * count + 2 * 1024
