"""Mixed precision without data axes: torch's autocast around blocks whose projections are taken apart."""

from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import hfscale
from hfscale import ParallelConfig
from hfscale.testing import RankPool, count_traffic
from hfscale.train.runtime import local_tensor, runtime_of
from tests.tiny_models import tiny

Pools = Callable[[int], RankPool]
B = 4
S = 12
H = 32
LAYERS = 2
IDS = torch.randint(3, 67, (B, S), generator=torch.Generator().manual_seed(1))
BATCH = {"input_ids": IDS, "labels": IDS, "use_cache": False}
SEQUENCE = {"sequence_parallel": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp": {}, "apart": {"overlap": False}, "sequence": SEQUENCE, "regather": {**SEQUENCE, "sequence_regather": True}
}  # fmt: skip


def _rank(path: str, options: dict[str, Any]) -> Any:
    layout = ParallelConfig(tp_size=2, **options)
    model = hfscale.from_pretrained(
        path, parallel=layout, dtype=torch.float32, mixed_precision="bf16"
    ).train()
    loss = float(hfscale.train_step(model, BATCH))
    model.zero_grad()
    with count_traffic() as traffic:
        hfscale.train_step(model, BATCH)
    runtime = runtime_of(model)
    grads = {
        p.name: (local_tensor(x.grad), p.cuts, runtime.mesh.ranks) for p, x in runtime.parameters()
    }
    return loss, grads, traffic


def _stock(path: str, dtype: torch.dtype, mixed: bool) -> tuple[float, dict[str, torch.Tensor]]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).train()
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        loss = model(**BATCH).loss
    loss.backward()
    return float(loss.detach()), {
        n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None
    }


@pytest.mark.daily("gpt2-sequence", "gpt2-apart", "llama-regather", "llama-tp")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_autocast_is_as_near_as_stock(
    pools: Pools, tmp_path: Path, family: str, layout: str
) -> None:
    path = str(tmp_path)
    AutoModelForCausalLM.from_config(tiny(family), dtype=torch.float32).save_pretrained(path)
    exact_loss, exact = _stock(path, torch.float64, False)
    near_loss, near = _stock(path, torch.float32, True)
    errors = {
        name: float((near[name] - whole).norm() / whole.norm()) for name, whole in exact.items()
    }
    usual = median(errors.values())
    for loss, grads, traffic in pools(2).run(_rank, path, LAYOUTS[layout]):
        assert abs(loss - exact_loss) <= 4 * abs(near_loss - exact_loss) + 2**-6 * exact_loss
        for name, (share, cuts, ranks) in grads.items():
            assert share.dtype == torch.float32
            wanted = exact[name]
            for cut in cuts:
                wanted = cut.take(wanted, ranks[cut.axis])
            error = float((share.double() - wanted).norm() / exact[name].norm())
            assert error <= 4 * max(errors[name], usual) + 2**-6, name
        if (family, layout) == ("llama", "tp"):
            # Blocks are entered and left in bfloat16, both ways; the embedding's sum and the head's gradient are wide.
            assert traffic.payload["allreduce"] == B * S * H * (4 * LAYERS * 2 + 2 * 4)


@pytest.mark.daily("gpt2")
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_what_is_gathered_again_is_of_the_products_type(
    pools: Pools, tmp_path: Path, family: str
) -> None:
    path = str(tmp_path)
    AutoModelForCausalLM.from_config(tiny(family), dtype=torch.float32).save_pretrained(path)
    kept, again = (
        pools(2).run(_rank, path, LAYOUTS[layout]) for layout in ("sequence", "regather")
    )
    for (loss, grads, before), (same_loss, same, traffic) in zip(kept, again, strict=True):
        assert loss == same_loss
        for name, (share, *_) in grads.items():
            assert torch.equal(share, same[name][0]), name
        more = sum(traffic.payload.values()) - sum(before.payload.values())
        # This rank's share in 16 bits, of two blocks in each layer.
        assert more == B * S // 2 * H * 2 * 2 * LAYERS
