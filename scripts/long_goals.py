"""Count the memory of published long runs of Llama 8B on ranks that nobody started, all layers.

    python scripts/long_goals.py [--goals 1 8 32] [--layers 32] [--tile 32768]
    python scripts/long_goals.py --ladder            # a small model's real steps on a CPU, by length

One rank of each run takes a whole step on the meta device in the code that trains, as one of all ranks of torch's fake
process group: layers computed again in tiles, their inputs on the host, weights in bfloat16. Counted is the most that
is allocated on the device at once, each storage once: weights and their gathered copies, gradients, activations,
buffers of exchanges, chunks of the loss; then the state of AdamW is added, which is on the host with one GPU. Beside it
stands the estimate. Lengths are those that ALST reports (Bekman et al. 2025), of one, 8 and 32 H100s.

The ladder trains real steps of a Llama whose MLP and vocabulary are as wide beside its stream as those of 8B (3.5 and
31 times), on one sequence, and counts likewise: without recomputation, with it, and in tiles with inputs on the host.
"""

import argparse
import time
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig

import hfscale
from hfscale._compat.replaced import attribute_replaced
from hfscale._compat.torch import storage_key, tree_leaves
from hfscale._compat.torch_fake import META
from hfscale.cost.model.memory_model import OVERHEAD
from hfscale.cost.tools.estimate import costs
from hfscale.cost.tools.simulated_rank import meta_model, run_spec, take_step
from hfscale.features.memory.stored import OnHost
from hfscale.plan.table import human
from hfscale.train.runtime import local_tensor

GOALS = {1: 500_000, 8: 3_700_000, 32: 15_000_000}
LEVERS: dict[str, Any] = {"recompute": "full", "offload_activations": True}
LIMIT = 80e9


class LiveBytes(TorchDispatchMode):
    """Count the bytes of all storages on a device that are alive, and the most there were at once."""

    def __init__(self, device: torch.device = META) -> None:
        super().__init__()
        self.device = device
        self.now = 0
        self.most = 0
        self.host = 0
        self.most_host = 0
        self._sizes = dict[int, int]()
        self._away = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(found):
            if isinstance(leaf, Tensor) and leaf.device == self.device:
                self.see(leaf)
        return found

    def see(self, tensor: Tensor) -> None:
        """Count a tensor's storage, if it is not yet known."""
        storage = local_tensor(tensor.detach()).untyped_storage()
        key = storage_key(storage)
        if key in self._sizes:
            return
        self._sizes[key] = 0
        size = storage.nbytes()
        if self._away:
            self.host += size
            self.most_host = max(self.most_host, self.host)
            weakref.finalize(storage, self._left, key, size)
        else:
            self._resized(key, size)
            weakref.finalize(storage, self._freed, key)

    def _resized(self, key: int, size: int) -> None:
        self.now += size - self._sizes[key]
        self._sizes[key] = size
        self.most = max(self.most, self.now)

    def _freed(self, key: int) -> None:
        self._resized(key, 0)
        del self._sizes[key]

    def _left(self, key: int, size: int) -> None:
        self.host -= size
        del self._sizes[key]

    @contextmanager
    def following(self) -> Iterator[None]:
        """Count what is copied to the host apart, and storages that change their size, as gathered weights do."""
        resize = torch.UntypedStorage.resize_
        begin = OnHost.__init__

        def resized(storage: Any, size: int) -> Any:
            found = resize(storage, size)
            if (key := storage_key(storage)) in self._sizes:
                self._resized(key, storage.nbytes())
            return found

        def begun(self_: Any, tensor: Tensor) -> None:
            self._away = True
            begin(self_, tensor)
            self._away = False

        with (
            attribute_replaced(torch.UntypedStorage, "resize_", resized),
            attribute_replaced(OnHost, "__init__", begun),
            self,
        ):
            yield


@dataclass(frozen=True)
class Counted:
    """A run's bytes on one rank."""

    gpus: int
    tokens: int
    device: int  # at once, without the optimizer's state
    optimizer: int  # its state on the device
    host: int  # on the host, activations and the optimizer's state
    estimated: float  # on the device, likewise at once
    seconds: float  # that counting took

    @property
    def total(self) -> float:
        """Bytes on the device, with the libraries' own."""
        return self.device + self.optimizer + OVERHEAD

    def row(self) -> str:
        """One line of the table."""
        fits = "fits" if self.total < LIMIT else "does not fit"
        sizes = (self.device, self.optimizer, round(self.total), round(self.estimated), self.host)
        return f"| {self.gpus} | {self.tokens:,} | {' | '.join(map(human, sizes))} | {fits} |"


def of_8_billion(layers: int) -> LlamaConfig:
    """Return the config of Llama 8B with so many layers."""
    return LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=128256, max_position_embeddings=2**24,
    )  # fmt: skip


def count(config: LlamaConfig, tokens: int, gpus: int = 1, **levers: Any) -> Counted:
    """Let one rank of ``gpus`` take a step on one sequence of ``tokens``; ``levers`` are those of the memory."""
    memory = hfscale.MemoryConfig(**levers)
    layout = hfscale.ParallelConfig(cp_size=gpus)
    given = {"dtype": torch.bfloat16, "memory": memory}
    plan = hfscale.plan(config, layout, **given)
    spec = run_spec(config, **given)
    shape, job, held = costs(plan, spec, tokens, 1, 1, "no")
    live = LiveBytes()
    start = time.perf_counter()
    with meta_model(spec, plan.layout) as (model, _), ExitStack() as stack:
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.device == META:
                live.see(tensor)
        take_step(model, job, shape, stack.enter_context(_entered(live)), "no")
        del model
    found = held[0]
    seconds = time.perf_counter() - start
    # AdamW's two moments, in the weights' type.
    on_host = 2 * found.weights if memory.offload_optimizer else 0
    return Counted(
        gpus, tokens, live.most, found.optimizer, live.most_host + on_host, found.needed, seconds
    )


WAYS: dict[str, dict[str, Any]] = {
    "none": {},
    "full": {"recompute": "full"},
    "full, tiles of 256": {"recompute": "full", "tile_tokens": 256, "offload_activations": "1KiB"},
}


def rung(way: str, tokens: int) -> float:
    """Return the bytes per token that a step of a small model has at once, beside its weights and their gradients."""
    config = LlamaConfig(
        hidden_size=64, intermediate_size=224, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=1,
        vocab_size=2048, max_position_embeddings=tokens,
    )  # fmt: skip
    model = hfscale.from_config(
        config, dtype=torch.float32, memory=hfscale.MemoryConfig(**WAYS[way])
    ).train()
    ids = torch.randint(0, 2048, (1, tokens), generator=torch.Generator().manual_seed(2))
    live = LiveBytes(torch.device("cpu"))
    with live.following():
        hfscale.train_step(model, {"input_ids": ids, "labels": ids})
    gradients = sum(each.numel() * each.element_size() for each in model.parameters())
    return (live.most - gradients) / tokens


def climb(lengths: list[int]) -> None:
    """Print bytes per token at each length."""
    print("| tokens | " + " | ".join(WAYS) + " |\n|---|" + "---|" * len(WAYS))
    for tokens in lengths:
        print(
            f"| {tokens:,} | " + " | ".join(f"{rung(way, tokens):,.0f}" for way in WAYS) + " |",
            flush=True,
        )


@contextmanager
def _entered(live: LiveBytes) -> Iterator[Any]:
    yield live.following()


def main() -> None:
    """Count every goal, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--goals", type=int, nargs="+", default=list(GOALS), help="GPUs of the runs"
    )
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--tile", type=int, default=32768, help="tokens of a tile")
    parser.add_argument("--tokens", type=int, help="of the sequence, other than published")
    parser.add_argument("--ladder", action="store_true", help="real steps of a small model instead")
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192], help="of the ladder"
    )
    arguments = parser.parse_args()
    if arguments.ladder:
        climb(arguments.lengths)
        return
    print(
        "| GPUs | tokens | counted at once | AdamW's state | with libraries | estimated | on the host | 80 GB |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for gpus in arguments.goals:
        config = of_8_billion(arguments.layers)
        tokens = arguments.tokens or GOALS[gpus]
        levers = {**LEVERS, "tile_tokens": arguments.tile, "offload_optimizer": gpus == 1}
        print(count(config, tokens, gpus, **levers).row(), flush=True)


if __name__ == "__main__":
    main()
