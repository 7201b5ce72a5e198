"""What a rank of a small run holds, counted in a step, beside its estimate: for the tables of docs/memory.md.

Storages of weights, gradients and the optimizer's state, saved tensors, and what levers say that they put elsewhere are
counted. What a layer or block keeps while it is computed again is counted in a run that keeps it. Mixtures are sent as
many tokens to every expert, which an estimate supposes.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from peft import LoraConfig
from transformers import (
    BitsAndBytesConfig,
    GPT2Config,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3MoeConfig,
)

import hfscale
from hfscale import MemoryConfig, ParallelConfig, RoutingConfig
from hfscale.cost.model.layer_bytes import is_known
from hfscale.cost.model.memory_model import MemoryEstimate, estimate_memory
from hfscale.cost.model.model_shape import shape_of_plan
from hfscale.cost.tools.measure_layers import measured_layers
from hfscale.cost.tools.memory_report import held_bytes
from hfscale.cost.tools.simulated_rank import run_spec
from hfscale.distributed.ops.head_cross_entropy import rows_per_chunk
from hfscale.features.memory import kept_activations
from hfscale.features.memory.kept_activations import KeptActivations
from hfscale.features.memory.recomputation import Recomputation
from hfscale.features.memory.saved import SavedBytes, count_saved
from hfscale.features.memory.stored import OnHost, Stored
from hfscale.parallel.pipeline.microbatches import in_flight_together
from hfscale.train.runtime import Runtime, runtime_of

VOCABULARY = 640
HELD = ("weights", "adapters", "gradients", "optimizer")
_PLANNED = ("dtype", "attn_implementation", "peft_config", "quantization_config")
_EVERY_STEP = ("pipedream", "pipedream_2bw")


def llama(hidden: int, layers: int = 4, inner: int = 0) -> PreTrainedConfig:
    """Heads of 64, a key head for every two of them, an MLP of 2.75 times the width, if nothing else is said."""
    sizes = {**_sizes(hidden, layers), "vocab_size": 512}
    return LlamaConfig(**sizes, intermediate_size=inner or hidden * 11 // 4 // 16 * 16)


def mixture(hidden: int, layers: int = 4) -> PreTrainedConfig:
    """Four experts, two of them for a token."""
    chosen = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": hidden}
    return Qwen3MoeConfig(**_sizes(hidden, layers), **chosen)


def gpt2(hidden: int, layers: int = 4) -> PreTrainedConfig:
    """One projection for queries, keys and values, an MLP without a gate, a head that is the embedding; no dropout."""
    sizes = {
        "n_embd": hidden,
        "n_layer": layers,
        "n_head": hidden // 64,
        "n_positions": 256,
        "vocab_size": VOCABULARY,
    }
    return GPT2Config(**sizes, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)


def _sizes(hidden: int, layers: int) -> dict[str, Any]:
    heads = {
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": max(2, hidden // 128),
        "head_dim": 64,
    }
    return {"hidden_size": hidden, "num_hidden_layers": layers, "vocab_size": VOCABULARY, **heads}


@dataclass(frozen=True)
class Case:
    """A step.

    Attributes:
        config: of the model; ``path``: where its weights are, if not drawn.
        lever: ``memory``, ``mixed_precision``, ``optimizer`` and what else it changes.
        axes: the layout.
        rows: of one microbatch of a batch rank; ``length``: tokens of each.
        microbatches: of a step.
    """

    config: PreTrainedConfig
    lever: dict[str, Any]
    axes: dict[str, Any]
    rows: int
    length: int
    microbatches: int = 1
    path: str | None = None

    @property
    def layout(self) -> ParallelConfig:
        """Its axes, with what the lever asks of them."""
        more = {name: self.lever[name] for name in ("gradient_compression",) if name in self.lever}
        if self.microbatches > 1:
            more["num_microbatches"] = self.microbatches
        return ParallelConfig(**self.axes, **more)

    @property
    def recompute(self) -> Any:
        """What is computed again."""
        return self.lever.get("memory", {}).get("recompute", "none")

    @property
    def optimizer(self) -> str:
        """Its name."""
        return str(self.lever.get("optimizer", "adamw_torch"))

    @property
    def optimizer_options(self) -> dict[str, Any]:
        """Of these, what changes its state."""
        return {name: self.lever[name] for name in ("stochastic_rounding",) if name in self.lever}

    def asked(self) -> dict[str, Any]:
        """What a model of it is built with."""
        found: dict[str, Any] = {
            "memory": MemoryConfig(**self.lever.get("memory", {})),
            "mixed_precision": self.lever.get("mixed_precision", "no"),
            "dtype": self.lever.get("dtype", torch.float32),
            "attn_implementation": self.lever.get("attention", "sdpa"),
            "peft_config": LoraConfig(**self.lever["lora"]) if "lora" in self.lever else None,
        }
        if "quantized" in self.lever:
            found["quantization_config"] = BitsAndBytesConfig(
                load_in_4bit=True, bnb_4bit_quant_type="nf4"
            )
        return found

    def built(self) -> tuple[Any, Any]:
        """The model in training, and its optimizer."""
        torch.manual_seed(0)
        asked = {**self.asked(), "parallel": self.layout}
        if hasattr(self.config, "num_experts"):
            asked["routing"] = RoutingConfig(force_balanced=True)
        make = hfscale.from_config if self.path is None else hfscale.from_pretrained
        model = make(self.config if self.path is None else self.path, **asked).train()  # type: ignore[operator]
        return model, hfscale.create_optimizer(
            model, self.optimizer, lr=1e-4, **self.optimizer_options
        )

    def batch(self) -> dict[str, Any]:
        """Of one batch rank."""
        shape = self.rows * self.microbatches, self.length
        ids = torch.randint(3, 500, shape, generator=torch.Generator().manual_seed(0))
        return {"input_ids": ids, "labels": ids}


@dataclass(frozen=True)
class Seen:
    """What a rank was seen to hold.

    Attributes:
        bytes: by kind, wherever it is; ``activations`` are those kept for the backward pass.
        layer: the most that a pass through one layer left.
        stage: its pipeline rank.
        chosen: the layers of this rank that were computed again.
        head: entries of its share of the head.
    """

    bytes: dict[str, int]
    layer: int
    stage: int
    head: int
    chosen: frozenset[str] | None

    @property
    def total(self) -> int:
        """Of all kinds."""
        return sum(self.bytes.values())


def seen(case: Case) -> Seen:
    """Of a step on this rank, with what layers keep while they are computed again."""
    model, optimizer = case.built()
    found = stepped(case, model, optimizer)
    plan = runtime_of(model).plan
    by_formula = all(is_known(plan, layer) for layer in plan.layers)  # without scores of attention
    if case.recompute in ("none", "elementwise") or (case.recompute == "selective" and by_formula):
        return found
    del model, optimizer
    kept = {name: value for name, value in case.lever["memory"].items() if name != "recompute"}
    plain = replace(case, lever={**case.lever, "memory": kept})
    whole = stepped(plain, *plain.built())
    in_parts = isinstance(case.recompute, list) or case.recompute == "selective"
    again = whole.layer - found.layer * in_parts
    if not in_parts and not found.chosen:  # this stage keeps all of its layers
        again = 0
    return replace(found, bytes={**found.bytes, "activations": found.bytes["activations"] + again})


def stepped(case: Case, model: Any, optimizer: Any) -> Seen:
    """The same, but for what is kept while layers are computed again."""
    runtime = runtime_of(model)
    memory = case.lever.get("memory", {})
    elsewhere = "offload_activations" in memory or "compress_activations" in memory
    flush = case.axes.get("pipeline_schedule") not in _EVERY_STEP
    with (
        count_saved(
            runtime.model, () if elsewhere else runtime.plan.layers, runtime.plan.head
        ) as saved,
        counted_elsewhere(runtime, saved, elsewhere) as back,
        one_layer(runtime, saved) as left,
    ):
        for _ in range(1 if flush else 3):
            optimizer.zero_grad()
            hfscale.train_step(model, case.batch())
            optimizer.step()
        held = held_bytes(model, optimizer)
        for _ in hfscale.drain(model):
            optimizer.step()
    optimizer.zero_grad()
    part = runtime.part(Recomputation)
    return Seen(
        bytes={**held, "activations": saved.around + saved.layers + back.layers},
        layer=max(left),
        stage=runtime.mesh.ranks.get("pp", 0),
        head=_of_head(runtime),
        chosen=None
        if part is None or part.chosen is None
        else frozenset(filter(runtime.is_local, part.chosen)),
    )


def _of_head(runtime: Runtime) -> int:
    head = runtime.plan.head
    if head is None or not runtime.is_local(head):
        return 0
    return int(runtime.model.get_submodule(head).weight.numel())  # type: ignore[operator, union-attr]


def estimated(case: Case, stage: int = 0, chosen: frozenset[str] | None = None) -> MemoryEstimate:
    """Of a rank of a stage, from config and layout."""
    asked = case.asked()
    planned = {name: asked[name] for name in (*_PLANNED, "memory") if asked.get(name) is not None}
    plan = hfscale.plan(
        case.config, case.layout, mixed_precision=asked["mixed_precision"], **planned
    )
    tokens = case.rows * case.length
    precision = asked["mixed_precision"]
    like = replace(run_spec(case.config, mixed_precision=precision, **planned), device="cpu")
    by_class = measured_layers(plan, like, case.length, case.rows)
    found = estimate_memory(
        plan,
        pp_rank=stage,
        optimizer=case.optimizer,
        options=case.optimizer_options,
        tokens=tokens,
        sequence_length=case.length,
        in_flight=in_flight_together(plan, case.microbatches),
        chosen=chosen,
        mixed_precision=precision,
        routes=shape_of_plan(plan, case.config).routed or None,
        chunk_rows=rows_per_chunk(tokens, case.config.vocab_size, torch.device("cpu")),
        measured=by_class,
    )
    # Computed again out of the hooks' sight.
    again = found.again if case.recompute == "elementwise" else 0
    return replace(found, activations=found.activations - again)


def comparable(case: Case, found: MemoryEstimate, head: int) -> tuple[int, int]:
    """Bytes of an estimate that a step shows, wherever they are: all of them, and of activations.

    Autocast's copies of weights are among what is saved, without that of the head: the loss makes and drops it.

    Args:
        head: entries of the rank's head.
    """
    autocasts = (
        case.lever.get("mixed_precision", "no") != "no" and case.asked()["dtype"] == torch.float32
    )
    copies = found.gathered - 2 * head if autocasts and case.layout.data_world == 1 else 0
    away = found.on_host if "offload_activations" in case.lever.get("memory", {}) else 0
    held = sum(found.kinds[kind] for kind in HELD) + found.on_host - away
    return held + found.activations + copies + away, found.activations + copies + away


def _at_ends_of_stages(runtime: Runtime, hold: Callable[[torch.Tensor], None]) -> list[Any]:
    """Hooks: what a stage was sent and sends it holds as it is, whatever becomes of what layers keep."""
    if runtime.plan.stages is None:
        return []
    handles = []
    for stage in runtime.plan.stages.of_rank(runtime.mesh.ranks["pp"]):
        first, last = (
            runtime.model.get_submodule(name) for name in (stage.layers[0], stage.layers[-1])
        )
        if stage.index:
            handles.append(first.register_forward_pre_hook(lambda _, given: hold(given[0])))
        if stage.index < len(runtime.plan.stages.stages) - 1:
            handles.append(last.register_forward_hook(lambda _, given, output: hold(output)))
    return handles


class _Fetched(OnHost):
    """Counts what was copied back as long as it is there, or anything that looks at its memory."""

    back = SavedBytes()

    def fetch(self) -> None:
        before = self._here
        super().fetch()
        if before is None and self._here is not None:
            self.back.add("layers", self.size)
            weakref.finalize(self._here.untyped_storage(), self.back.add, "layers", -self.size)


@contextmanager
def counted_elsewhere(runtime: Runtime, saved: SavedBytes, elsewhere: bool) -> Iterator[SavedBytes]:
    """Within: what is kept in another form or place is counted as long as it is; what was copied back, by itself."""
    part = runtime.part(KeptActivations) or KeptActivations()  # none is asked for
    store, known = part.store, Counter[int]()

    def hold(tensor: torch.Tensor) -> None:
        key = tensor.untyped_storage().data_ptr()
        add(key, tensor.nbytes, 1)
        weakref.finalize(tensor, add, key, tensor.nbytes, -1)

    def add(key: int, size: int, sign: int) -> None:
        known[key] += sign
        if known[key] == (sign > 0):  # the first that keeps this piece of memory, or the last
            saved.add("layers", sign * size)

    def counted(values: int, tensor: torch.Tensor, stays_exact: bool) -> Stored:
        found = store(values, tensor, stays_exact)
        key = id(found) if found is not None else tensor.untyped_storage().data_ptr()
        found = found or Stored(tensor)
        add(key, found.size, 1)
        weakref.finalize(found, add, key, found.size, -1)
        return found

    part.store, _Fetched.back = counted, SavedBytes()
    handles = _at_ends_of_stages(runtime, hold) if elsewhere else []
    try:
        with patch.object(kept_activations, "OnHost", _Fetched):
            yield _Fetched.back
    finally:
        part.store = store
        for handle in handles:
            handle.remove()


@contextmanager
def one_layer(runtime: Runtime, saved: SavedBytes) -> Iterator[list[int]]:
    """Within: what every pass through a layer of this rank leaves, beside its input."""
    left = [0]
    handles = []
    for name in filter(runtime.is_local, runtime.plan.layers):
        layer = runtime.model.get_submodule(name)
        handles.append(layer.register_forward_pre_hook(lambda *_: left.append(-saved.now)))
        handles.append(layer.register_forward_hook(lambda *_: left.append(left.pop() + saved.now)))
    try:
        yield left
    finally:
        for handle in handles:
            handle.remove()
