"""Models, gradients and references for the tests of optimizers; ranks import this, so it names no fixtures."""

import re
import warnings
import zlib
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

import hfscale
from hfscale import ParallelConfig
from hfscale.optim.factory import decays, owners_of
from hfscale.optim.muon import is_hidden_matrix
from hfscale.train.runtime import like_sharded, runtime_of
from hfscale.train.runtime.shards import local_tensor

from ..mixtures import EAGER, gpt_oss, qwen3_moe
from ..tiny_models import tiny

STEPS = 3
LR = 1e-2
DECAY = 0.1
CONFIGS: dict[str, Any] = {
    # Ragged vocabulary and MLP (its last shard of four is empty), one key/value head for all tensor ranks.
    "ragged": lambda: tiny(
        "qwen2", hidden_size=64, intermediate_size=5, num_key_value_heads=1, vocab_size=129
    ),
    # Rows of 512: cut in two along columns, blocks of 256 stay whole.
    "rows": lambda: tiny("llama", intermediate_size=512, vocab_size=128, tie_word_embeddings=True),
    "fused": lambda: tiny(
        "gpt2", vocab_size=129
    ),  # fused projections in parts, biases, layer norms; tied
    "experts": lambda: qwen3_moe(),
    "biased_experts": lambda: gpt_oss(num_local_experts=6),
}
FROZEN = {"ragged": (r"layers\.0\.mlp\.up_proj",), "fused": (r"wpe",)}
WITHOUT_GRADIENT = {"ragged": (r"layers\.1\.mlp\.gate_proj",), "fused": (r"h\.1\.mlp\.c_fc",)}
OWN: dict[str, dict[str, Any]] = {
    "sgd": {"optim_args": "momentum=0.9,nesterov=true"},
    "rmsprop": {"optim_args": "momentum=0.5,centered=true"},
    "adam_8bit": {"min_8bit_size": 256},
    "adamw_8bit": {"min_8bit_size": 256},
    "ademamix_8bit": {
        "optim_args": {"beta3": 0.999, "alpha": 4.0, "t_alpha": 5, "min_8bit_size": 256}
    },
    "lion_8bit": {"min_8bit_size": 256},
    "rmsprop_bnb_8bit": {"min_8bit_size": 256},
    "muon": {"adamw_lr": 3e-3},
}
SPLIT: dict[str, dict[str, Any]] = {
    "ragged": {"q_proj": 4, "k_proj": [3, 13], "gate_proj": 5},  # by head, unevenly, by row
    "rows": {"gate_proj": [200, 312], "o_proj": 2},
    "fused": {"c_attn": 3, "c_fc": [100, 28]},
    "experts": {"gate_up_proj": 2, "q_proj": 4},
    "biased_experts": {"gate_up_proj": [20, 12], "down_proj": 2},
}
ALONG_COLUMNS = ("c_attn", "c_fc")  # and gpt_oss's experts


class PerMatrix:
    """torch's Muon over the matrices that are stacked or fused in parameters, each a parameter of its own."""

    def __init__(self, kind: str, groups: list[dict[str, Any]], names: dict[int, str]) -> None:
        self.whole = [parameter for group in groups for parameter in group["params"]]
        self.kind = kind
        self.names = names
        self.apart = {
            id(p): [nn.Parameter(each.clone()) for each in self.matrices(p.detach(), p)]
            for p in self.whole
        }
        for group in groups:
            group["params"] = [
                each for parameter in group["params"] for each in self.apart[id(parameter)]
            ]
        self.muon = torch.optim.Muon(groups, lr=LR)

    def matrices(self, tensor: Tensor, parameter: Tensor) -> list[Tensor]:
        name = self.names[id(parameter)].removesuffix(".weight").rpartition(".")[2]
        split = SPLIT[self.kind].get(name, 1)
        dim = int(name in ALONG_COLUMNS or (self.kind == "biased_experts" and tensor.ndim == 3))
        pieces = [tensor] if tensor.ndim == 2 else list(tensor.unbind())
        sizes = (
            [tensor.shape[tensor.ndim - 2 + dim] // split] * split
            if isinstance(split, int)
            else split
        )
        return [part for piece in pieces for part in piece.split(sizes, dim)]

    def step(self) -> None:
        for parameter in self.whole:
            grad = parameter.grad
            grads = (
                [None] * len(self.apart[id(parameter)])
                if grad is None
                else self.matrices(grad, parameter)
            )
            for apart, part in zip(self.apart[id(parameter)], grads, strict=True):
                apart.grad = None if part is None else part.clone()
        self.muon.step()
        with torch.no_grad():
            for parameter in self.whole:
                places = self.matrices(parameter.detach(), parameter)
                for place, apart in zip(places, self.apart[id(parameter)], strict=True):
                    place.copy_(apart)

    def zero_grad(self) -> None:
        for parameter in self.whole:
            parameter.grad = None


def build(kind: str, dtype: torch.dtype, layout: ParallelConfig | None = None) -> Any:
    extra = EAGER if "experts" in kind else {}
    model = hfscale.from_config(CONFIGS[kind](), parallel=layout, seed=3, dtype=dtype, **extra)
    for planned, parameter in runtime_of(model).parameters():
        if matches(FROZEN, kind, planned.name):
            parameter.requires_grad_(False)
    return model


def matches(table: dict[str, tuple[str, ...]], kind: str, name: str) -> bool:
    return any(re.search(pattern, name) for pattern in table.get(kind, ()))


def gradient(name: str, shape: tuple[int, ...], step: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {step}".encode()))
    return torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype)


def set_gradients(model: Any, kind: str, step: int) -> None:
    """The same whole gradients in every layout, cut as the parameters are."""
    runtime = runtime_of(model)
    for planned, parameter in runtime.parameters():
        if not parameter.requires_grad or matches(WITHOUT_GRADIENT, kind, planned.name):
            continue
        whole = gradient(planned.name, planned.shape, step, parameter.dtype)
        share = planned.take(whole, runtime.mesh.ranks).contiguous()
        # Some empty shares are left without a gradient.
        if share.numel() or "layers.0" not in planned.name:
            parameter.grad = like_sharded(share, parameter)


def run(model: Any, kind: str, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        set_gradients(model, kind, step)
        optimizer.step()
        optimizer.zero_grad()


def make(model: Any, name: str, **changes: Any) -> Any:
    if name.startswith("muon_whole"):  # of a kind
        changes = {
            "experts": True,
            "split": SPLIT[name.partition(" ")[2]],
            **OWN["muon"],
            **changes,
        }
        name = "muon"
    return hfscale.create_optimizer(
        model, name, lr=LR, weight_decay=DECAY, **{**OWN.get(name, {}), **changes}
    )


def reference(name: str, model: Any) -> list[Any]:
    """Stock optimizers over a whole model, as HF Trainer makes them of a name."""
    from transformers import Trainer  # slow to import, and ranks do without

    decaying = Trainer.get_decay_parameter_names(None, model)  # type: ignore[arg-type]
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    own = dict(OWN.get(name, {}))
    if name.startswith("muon"):
        owners = owners_of(model)
        layers = runtime_of(model).plan.layers
        plans = runtime_of(model).plan.by_name
        kind = name.partition(" ")[2]
        stacks = [mixture.name for mixture in runtime_of(model).plan.mixtures] if kind else []
        hidden = {
            n for n, p in named.items() if is_hidden_matrix(plans[n], owners[id(p)], layers, stacks)
        }
        rest = named.keys() - hidden
        groups = split({n: named[n] for n in named if n in hidden}, decaying)
        return [
            PerMatrix(kind, groups, {id(p): n for n, p in named.items()})
            if kind
            else torch.optim.Muon(groups, lr=LR),
            torch.optim.AdamW(
                split({n: named[n] for n in named if n in rest}, decaying),
                lr=OWN["muon"]["adamw_lr"],
            ),
        ]
    optim_args = own.pop("optim_args", None)
    if isinstance(optim_args, dict):
        own.update({k: v for k, v in optim_args.items() if k == "min_8bit_size"})
        optim_args = ",".join(f"{k}={v}" for k, v in optim_args.items() if k != "min_8bit_size")
    args = SimpleNamespace(
        optim={"adam_8bit": "adamw_8bit"}.get(name, name),
        learning_rate=LR,
        adam_beta1=0.9,
        adam_beta2=0.999,
        adam_epsilon=1e-8,
        optim_args=optim_args,
    )
    stock, options = Trainer.get_optimizer_cls_and_kwargs(args)  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # paging on a CPU
        return [stock(split(named, decaying), **{**options, **own})]


def split(named: dict[str, nn.Parameter], decaying: list[str]) -> list[dict[str, Any]]:
    return [
        {"params": [p for n, p in named.items() if n in decaying], "weight_decay": DECAY},
        {"params": [p for n, p in named.items() if n not in decaying], "weight_decay": 0.0},
    ]


def expected(kind: str, cases: list[tuple[str, torch.dtype]]) -> dict[Any, dict[str, Tensor]]:
    """Weights after a few steps in one process, by stock classes, per case."""
    found = {}
    for dtype in dict.fromkeys(dtype for _, dtype in cases):
        model = build(kind, dtype)
        begin = [p.detach().clone() for p in model.parameters()]
        for name in [name for name, other in cases if other == dtype]:
            restore(model.parameters(), begin)
            optimizers = reference(name, model)
            for step in range(STEPS):
                set_gradients(model, kind, step)
                for optimizer in optimizers:
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")
                        optimizer.step()
                    optimizer.zero_grad()
            found[name, dtype] = {n: p.detach().clone() for n, p in model.named_parameters()}
    return found


def restore(parameters: Iterable[Tensor], begin: list[Tensor]) -> None:
    with torch.no_grad():
        for parameter, value in zip(parameters, begin, strict=True):
            parameter.copy_(value)


def differences(
    layout: dict[str, Any], kind: str, cases: list[tuple[str, torch.dtype]], path: str
) -> dict[Any, float]:
    """On a rank: the largest difference from the stored weights, relative to their largest entry, per case."""
    stored = torch.load(path)
    found = {}
    for dtype in dict.fromkeys(dtype for _, dtype in cases):
        model = build(kind, dtype, ParallelConfig(**layout))
        runtime = runtime_of(model)
        begin = [p.detach().clone() for p in model.parameters()]
        for name in [name for name, other in cases if other == dtype]:
            restore(model.parameters(), begin)
            run(model, kind, make(model, name), range(STEPS))
            worst = 0.0
            for planned, parameter in runtime.parameters():
                whole = stored[name, dtype][planned.name]
                mine = local_tensor(parameter.detach())
                wanted = planned.take(whole, runtime.mesh.ranks)
                assert mine.shape == wanted.shape
                if mine.numel():
                    worst = max(worst, float((mine - wanted).abs().max() / whole.abs().max()))
            found[name, dtype] = worst
    return found


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """The bytes of the state on this rank; most optimizers have none before the first step."""
    held = (
        value
        for values in optimizer.state.values()
        for value in values.values()
        if isinstance(value, Tensor)
    )
    # Parameters may share a tensor: the table of 8-bit values.
    return sum(
        {
            value.data_ptr(): value.numel() * value.element_size()
            for value in held
            if value.numel()
        }.values()
    )


def decaying_names(layout: dict[str, Any], kind: str) -> set[str]:
    model = build(kind, torch.float32, ParallelConfig(**layout))
    owners = owners_of(model)
    return {
        p.name for p, live in runtime_of(model).parameters() if decays(p.name, owners[id(live)])
    }
