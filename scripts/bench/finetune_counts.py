"""Count what a layer of a LoRA or QLoRA step launches, moves and keeps, stock HF and PEFT beside hfscale, on a CPU.

    python scripts/bench/finetune_counts.py [--recipe lora] [--family llama] [--out counts.json]

Per layer: the difference of models of four and of two layers, halved. Widths are those of an 8B Llama over 8, in
bfloat16 with factors in float32, as PEFT makes them. Operators that are no views stand for kernels, and their inputs
and outputs for the bytes that kernels move; hfscale's own operators (``hfscale::``) count as one each. Kept are
storages that autograd saves, without parameters, and the inputs of layers that are recomputed. Nothing is timed.
``pieces`` are the products of GPUs, emulated, with what is one kernel there counted as one. Of compiled layers the
nodes of their graphs are counted, and fused groups of them as one launch each (:mod:`_graph_counts`).
"""

import argparse
import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from _gpu_model import modelled
from _graph_counts import FUSED, GraphCounts
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

import hfscale
from hfscale._compat.torch import TorchDispatchMode, operator_name, schema_of, tree_leaves
from hfscale._compat.transformers.computing import enable_checkpointing
from hfscale.api.assemble import compile_layers
from hfscale.distributed.ops import thin_products
from hfscale.train.runtime import runtime_of

TOKENS = 256
RANK = 2
DEPTHS = (2, 4)
VOCABULARY = 512
_LLAMA: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1792,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 128,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "qwen3": _LLAMA,
    "gemma3_text": _LLAMA,
    "gpt2": {"n_embd": 512, "n_head": 4, "attn_pdrop": 0, "resid_pdrop": 0, "embd_pdrop": 0},
    "falcon": {"hidden_size": 512, "num_attention_heads": 4},
    "mixtral": {**_LLAMA, "num_local_experts": 2, "num_experts_per_tok": 1},
}
TARGETS = {"mixtral": ["q_proj", "k_proj", "v_proj", "o_proj"]}
SIDES: dict[str, frozenset[str]] = {  # how each differs from its library's plain loop
    "stock": frozenset(),
    "stock, no adapters": frozenset({"bare"}),
    "stock, autocast": frozenset({"autocast"}),
    "stock, checkpointed": frozenset({"checkpointed"}),
    "stock, TRL": frozenset({"autocast", "checkpointed"}),
    "stock, compiled": frozenset({"compiled"}),
    "hfscale": frozenset(),
    "hfscale, pieces": frozenset({"pieces"}),
    "hfscale, autocast": frozenset({"autocast"}),
    "hfscale, elementwise": frozenset({"elementwise"}),
    "hfscale, checkpointed": frozenset({"checkpointed"}),
    "hfscale, compiled": frozenset({"compiled"}),
    "hfscale, compiled, pieces": frozenset({"compiled", "pieces"}),
}
KERNELS = ("in_three", "_paired", "_scaled_sum", "wide_product", "_add_wide")
PRODUCTS = ("mm", "addmm", "bmm", "gemm_4bit")
FREE = (
    "_unsafe_view",
    "detach",
    "empty",
    "new_empty",
    "empty_like",
    "empty_strided",
    "lift",
    "set_",
)
UNFUSED = ("sort", "topk", "index_put", "_index_put", "scatter", "scatter_add", "nonzero", "histc")
KINDS = (
    "base products",
    "thin products",
    "attention",
    "casts",
    "copies",
    "dequantized",
    "others",
    FUSED,
)


class Counting(TorchDispatchMode):
    """Count operators that are no views, and the bytes of their inputs and outputs, by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.forget()

    def forget(self) -> None:
        """Begin again."""
        self.launches = Counter[str]()
        self.bytes = Counter[str]()
        self.dequantized = 0  # weights in 4 bits, within products too
        self.wide_copies = 0  # casts of activations to float32
        self._whole = False  # while an operation runs that has been counted as one

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator, and count it."""
        out = func(*args, **(kwargs or {}))
        name = operator_name(func)
        if self._whole or _is_free(func, name):
            return out
        tensors = [each for each in tree_leaves((args, kwargs, out)) if isinstance(each, Tensor)]
        kind = _kind(str(func), name, tensors)
        self.launches[kind] += 1
        self.bytes[kind] += sum(each.numel() * each.element_size() for each in tensors)
        self.dequantized += name in ("dequantize_4bit", "gemm_4bit")
        if name == "_to_copy" and out.dtype == torch.float32 and TOKENS in out.shape:
            self.wide_copies += 1
        return out

    def as_one(self, function: Any, *args: Any) -> Tensor:
        """Run what a GPU does by one kernel, and count that."""
        self._whole = True
        out: Tensor = function(*args)
        self._whole = False
        tensors = [each for each in (*args, out) if isinstance(each, Tensor)]
        self.launches[KINDS[1]] += 1
        self.bytes[KINDS[1]] += sum(each.numel() * each.element_size() for each in tensors)
        return out


def _is_free(func: Any, name: str) -> bool:
    views = any(
        each.alias_info is not None and not each.alias_info.is_write
        for each in schema_of(func).returns
    )
    return views or name in FREE


def _kind(full: str, name: str, tensors: list[Tensor]) -> str:
    if full.startswith("hfscale."):
        return KINDS[1]
    if any(each in name for each in PRODUCTS):
        # Packed weights in 4 bits are as thin as factors.
        thin = "gemm_4bit" not in name and any(
            min(each.shape) <= 6 * RANK for each in tensors if each.ndim == 2
        )
        return KINDS[1] if thin else KINDS[0]
    if "attention" in name:
        return KINDS[2]
    if "dequantize" in name:
        return KINDS[5]
    return {"_to_copy": KINDS[3], "clone": KINDS[4], "copy_": KINDS[4]}.get(name, KINDS[6])


def _kind_in_graph(func: Any, tensors: list[Tensor]) -> str | None:
    """Return the kind of what a compiler calls as it is, ``""`` for views, ``None`` for what it fuses."""
    if not isinstance(func, torch._ops.OpOverload):
        return ""
    name = operator_name(func)
    if _is_free(func, name):
        return ""
    kind = _kind(str(func), name, tensors)
    is_called = kind in (KINDS[0], KINDS[1], KINDS[2], KINDS[5])
    return kind if is_called or name in UNFUSED else None


@contextmanager
def keeping(model: Any, inputs: bool = False) -> Iterator[dict[int, int]]:
    """Yield the bytes of storages that autograd saves inside the with block, by storage, without parameters; with the
    ``inputs`` of layers, which checkpoints keep.
    """
    own = {id(each.untyped_storage()): each for each in model.parameters()}
    addresses = {each.untyped_storage().data_ptr() for each in own.values()}
    found: dict[int, int] = {}
    alive: list[Tensor] = []  # so that no address is used twice

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in addresses:
            found[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor.detach())
        return tensor

    def note(_: Any, given: tuple[Tensor, ...]) -> None:
        pack(given[0])

    with ExitStack() as stack:
        for layer in layers_of(model) if inputs else ():
            hook = layer.register_forward_pre_hook(note)
            stack.callback(hook.remove)
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor))
        yield found


def built(side: str, recipe: str, family: str, directory: str) -> Any:
    """Return the model of one side, with adapters, in training mode."""
    targets = TARGETS.get(family, "all-linear")
    adapter = LoraConfig(r=RANK, target_modules=targets, task_type="CAUSAL_LM")
    four = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
    )
    given: dict[str, Any] = {"quantization_config": four} if recipe == "qlora" else {}
    given |= {"dtype": torch.bfloat16, "attn_implementation": "sdpa"}
    how = SIDES[side]
    if side.startswith("stock"):
        base = AutoModelForCausalLM.from_pretrained(directory, **given)
        if "checkpointed" in how:
            enable_checkpointing(base)
            base.enable_input_require_grads()
        if "bare" in how:
            base.requires_grad_(False).enable_input_require_grads()
            return base.train()
        return get_peft_model(base, adapter).train()
    again = {"elementwise": "elementwise", "checkpointed": "full"}
    memory = hfscale.MemoryConfig(recompute=next((again[each] for each in how & {*again}), "none"))
    model = hfscale.from_pretrained(
        directory,
        parallel=hfscale.ParallelConfig(),
        peft_config=adapter,
        memory=memory,
        **given,
    )
    return model.train()


def layers_of(model: Any) -> list[Any]:
    """Return the layers of a model."""
    lists = [each for each in model.modules() if type(each).__name__ == "ModuleList"]
    return list(max(lists, key=len))


def compile_with(model: Any, side: str, backend: Any) -> None:
    """Compile each layer by itself."""
    if side.startswith("hfscale"):
        compile_layers(runtime_of(model), backend)
        return
    for layer in layers_of(model):
        layer.compile(backend=backend)


def on_gpu(counts: Any) -> ExitStack:
    """Compute as a GPU does, until the stack is closed: with pieces of factors in float32, by whole kernels."""
    stack = ExitStack()
    if not isinstance(counts, Counting):
        # A graph has the products of GPUs, which are interpreted.
        stack.enter_context(patch.object(thin_products, "widens_products", lambda _: True))
        return stack
    stack.enter_context(patch.object(thin_products, "splits", _of_two_types))
    for name in KERNELS:
        whole = partial(counts.as_one, getattr(thin_products, name))
        stack.enter_context(patch.object(thin_products, name, whole))
    return stack


def counted(side: str, recipe: str, family: str, layers: int) -> dict[str, float]:
    """Return the counts of one training step."""
    torch.manual_seed(0)
    how = SIDES[side]
    depth = {"n_layer" if family == "gpt2" else "num_hidden_layers": layers}
    changes = {**FAMILIES[family], **depth, "vocab_size": VOCABULARY, "pad_token_id": None}
    config = AutoConfig.for_model(family, **changes)
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(directory)
        model = built(side, recipe, family, directory)
        counts: Any = GraphCounts(_kind_in_graph) if "compiled" in how else Counting()
        if "pieces" in how:
            stack.enter_context(on_gpu(counts))
        if "compiled" in how:
            compile_with(model, side, counts.backend())
        autocast = torch.autocast("cpu", torch.bfloat16, enabled="autocast" in how)
        ids = torch.randint(3, VOCABULARY, (1, TOKENS))
        for _ in range(2):  # compiled code, and tables of buffers, are made in the first
            model.zero_grad()
            counts.forget()
            with counts, keeping(model, "checkpointed" in how) as kept, autocast:
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            with counts:
                loss.backward()
    torch.compiler.reset()
    found = {f"{kind} launched": float(counts.launches[kind]) for kind in KINDS}
    found |= {f"{kind} bytes a token": counts.bytes[kind] / TOKENS for kind in KINDS}
    found["launches"] = float(sum(counts.launches.values()))
    found["dequantizations"] = float(counts.dequantized)
    found["float32 copies"] = float(counts.wide_copies)
    # Both are weights' in part, which many tokens share.
    found["bytes a token beside base products"] = (
        sum(counts.bytes.values()) - counts.bytes[KINDS[0]] - counts.bytes[KINDS[5]]
    ) / TOKENS
    found["kept bytes a token"] = sum(kept.values()) / TOKENS
    return found


def _of_two_types(wide: Tensor, factor: Tensor) -> bool:
    return wide.dtype == torch.bfloat16 and factor.dtype == torch.float32


def per_layer(side: str, recipe: str, family: str) -> dict[str, float]:
    """Return the counts of one layer."""
    few, many = (counted(side, recipe, family, layers) for layers in DEPTHS)
    return {name: (many[name] - few[name]) / (DEPTHS[1] - DEPTHS[0]) for name in many}


SHOWN = (
    "launches",
    "bytes a token beside base products",
    "kept bytes a token",
    "float32 copies",
    "dequantizations",
)


def main() -> None:
    """Count every side, print ratios to stock, and write all counts, beside those of sides that were not asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--recipe", choices=("lora", "qlora"), action="append")
    parser.add_argument("--family", choices=tuple(FAMILIES), action="append")
    parser.add_argument("--side", choices=tuple(SIDES), action="append")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    results: dict[str, Any] = {}
    if arguments.out and arguments.out.exists():
        results = json.loads(arguments.out.read_text())
    for recipe in arguments.recipe or ("lora", "qlora"):
        for family in arguments.family or FAMILIES:
            sides = results.setdefault(f"{recipe} {family}", {})
            for side in arguments.side or SIDES:
                sides[side] = per_layer(side, recipe, family)
                if "stock" in sides:
                    print(f"{recipe}, {family}, {side}: {ratios(sides[side], sides['stock'])}")
                if family == "llama":
                    sides["model"] = modelled(recipe, sides)
                if arguments.out:
                    arguments.out.write_text(json.dumps(results, indent=1) + "\n")


def ratios(found: dict[str, float], stock: dict[str, float]) -> str:
    """Return counts and their ratios to stock's, in words."""
    return ", ".join(
        f"{name} {found[name] / stock[name]:.2f} ({found[name]:,.0f})"
        for name in SHOWN
        if stock[name]
    )


if __name__ == "__main__":
    main()
