"""Multi-token prediction in one process: transformers' own layers in a plain loop, and its checkpoints."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_layers import MtpLayer, MtpModel

import hfscale
from hfscale.models.precision import keep_float64, make_float64
from hfscale.testing.parity import Case, _prepare, _with_random_adapters, plain_name

from ...families import config_of

WEIGHT = 0.3
trains = pytest.mark.skipif(
    not hasattr(MtpModel, "get_weight_conversions"),
    reason="this transformers names no stored tensors of such layers, which are refused by name",
)


MELLUM = {
    "layer_types": ["full_attention", "sliding_attention"],
    "mlp_layer_types": ["dense", "sparse"],
    "mtp_layer_types": ["sliding_attention"],
    "mtp_mlp_layer_types": ["sparse"],
    "sliding_window": 4,
}


def config_with(
    family: str = "deepseek_v3", depths: int = 1, layers: int = 2, **changes: Any
) -> Any:
    given = MELLUM if family == "mellum" else {"first_k_dense_replace": 1}
    # Some drafts are accepted.
    config = config_of(family, layers=layers, **{"vocab_size": 11, **given, **changes})
    config.num_mtp_layers = depths
    return config


def deeper(config: Any) -> Any:
    """The config of a model whose last layers are those inside of the predictors."""
    fields = config.to_dict()
    depths = config.num_mtp_layers
    for name in ("layer_types", "mlp_layer_types"):
        if fields.get(name):
            fields[name] = [*fields[name], *fields[f"mtp_{name}"]]
    return type(config)(**{**fields, "num_hidden_layers": config.num_hidden_layers + depths})


@dataclass
class PredictionCase(Case):
    """Depths are those of the config; ``packed`` rows hold three documents each."""

    packed: bool = False
    measured: list[Any] = field(default_factory=list)  # of each step, as hfscale.metrics has it

    def batches(self, batch_world: int) -> list[list[list[dict[str, Tensor]]]]:
        found = super().batches(batch_world)
        for batch in (
            (each for step in found for rank in step for each in rank) if self.packed else ()
        ):
            length = batch["input_ids"].shape[1]
            del batch["attention_mask"]
            ends = [length // 3, 2 * length // 3 + 1, length]
            positions = torch.cat(
                [torch.arange(b - a) for a, b in zip([0, *ends], ends, strict=False)]
            )
            batch["position_ids"] = positions.expand(batch["input_ids"].shape).contiguous()
            batch["labels"] = batch["labels"].masked_fill(batch["position_ids"] == 0, -100)
        return found

    def reference_step(self, model: Any, step: list[list[dict[str, Tensor]]]) -> list[Tensor]:
        microbatches = [microbatch for rank in step for microbatch in rank]
        count = sum(self.count(microbatch["labels"]) for microbatch in microbatches)
        losses = [loss_of(model, batch) for batch in microbatches]
        loss = sum(main + WEIGHT * torch.stack(ahead).mean() for main, ahead, *_ in losses) / count
        loss.backward()
        depths = range(len(losses[0][1]))
        found = {
            "mtp_loss": float(
                sum(torch.stack(ahead).mean().detach() for _, ahead, *_ in losses) / count
            )
        }
        for depth in depths:
            hits, labels = (sum(int(each[kind][depth]) for each in losses) for kind in (2, 3))
            found[f"mtp_acceptance_{depth + 1}" if depth else "mtp_acceptance"] = hits / max(
                1, labels
            )
        self.measured.append(found)
        return [loss.detach()] * len(step)

    def layout_step(self, model: Any, microbatches: list[dict[str, Tensor]]) -> Tensor:
        loss = super().layout_step(model, microbatches)
        assert hfscale.metrics(model) == pytest.approx(self.measured.pop(0), rel=1e-10)
        return loss


def loss_of(
    model: Any, batch: dict[str, Tensor]
) -> tuple[Tensor, list[Tensor], list[Tensor], list[Tensor]]:
    """Sums over the labels of the model's loss and of every depth's; hits and labels of every depth."""
    ids = batch["input_ids"]
    labels = batch["labels"]
    rows, length = ids.shape
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    positions = batch.get("position_ids", torch.arange(length).expand(rows, -1))
    documents = (positions.diff(dim=-1, prepend=positions[:, :1]) != 1).cumsum(-1)
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    if "position_ids" in batch:
        inputs["attention_mask"] = documents_mask(documents)
    hidden = model.model(**inputs, use_cache=False).last_hidden_state
    embedded = model.get_input_embeddings()(ids)
    mask = inputs.get("attention_mask")
    if mask is None or mask.ndim == 2:
        config = model.mtp.layers[0].config
        sliding = "sliding_attention" in (getattr(config, "layer_types", None) or ())
        make = create_sliding_window_causal_mask if sliding else create_causal_mask
        mask = make(config, embedded, mask, None, position_ids=positions)
    main, _ = summed(model.lm_head(hidden[:, :-1]), labels[:, 1:])
    ahead = []
    hits = []
    counts = []
    for depth, layer in enumerate(model.mtp.layers):
        shift = depth + 1
        later = model.get_input_embeddings()(
            torch.cat((ids[:, shift:], ids.new_zeros(rows, min(shift, length))), 1)
        )
        places = positions + shift
        kinds = getattr(layer.config, "layer_types", None)
        kind = {"layer_type": kinds[depth]} if kinds else {}
        angles = model.model.rotary_emb(later, position_ids=places, **kind)
        hidden = MtpLayer.forward(layer, later, hidden, angles, mask, places, None)
        targets = labels[:, shift + 1 :].masked_fill(
            documents[:, shift + 1 :] != documents[:, : -shift - 1], -100
        )
        loss, hit = summed(model.lm_head(hidden[:, : -shift - 1]), targets)
        ahead.append(loss)
        hits.append(hit)
        counts.append((targets != -100).sum())
    return main, ahead, hits, counts


def summed(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return loss, ((logits.argmax(-1) == targets) & (targets != -100)).sum()


def documents_mask(documents: Tensor) -> Tensor:
    length = documents.shape[1]
    seen = (documents[:, :, None] == documents[:, None, :]) & torch.ones(
        length, length, dtype=torch.bool
    ).tril()
    return torch.zeros(seen.shape, dtype=torch.float64).masked_fill(
        ~seen, torch.finfo(torch.float64).min
    )[:, None]


def reference(case: PredictionCase, batch_world: int, directory: Path) -> None:
    """Train the stock model and its layers; save start, end and every step's results, as the layouts' parity does."""
    torch.manual_seed(5)
    config = case.config
    depths = case.config.num_mtp_layers
    whole = AutoModelForCausalLM.from_config(
        deeper(config), dtype=torch.float64, attn_implementation="eager"
    )
    kind = type(whole.model.layers[-1])
    norm = type(whole.model.norm)
    ahead = config.get_mtp_config()
    ahead._attn_implementation = "eager"
    layers = [MtpLayer(ahead, kind, norm, depth) for depth in range(depths)]
    for parameter in (*whole.parameters(), *(p for layer in layers for p in layer.parameters())):
        parameter.data = (
            parameter.data.double() + torch.randn(parameter.shape, dtype=torch.float64) * 0.05
        )
    stack = whole.model.layers
    for layer, block in zip(layers, stack[-depths:], strict=True):
        layer.mtp_block.load_state_dict(block.state_dict())
    write(whole, layers, config, directory / "start")
    with make_float64():
        model = AutoModelForCausalLM.from_pretrained(
            directory / "start", dtype=torch.float64, **case.hf_kwargs
        )
    model.mtp = nn.Module()
    model.mtp.layers = nn.ModuleList(layers).double()
    for layer in layers:
        layer.config._experts_implementation = model.config._experts_implementation
    if case.peft is not None:
        model = _with_random_adapters(model, case, directory)
    _prepare(model, case)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=case.learning_rate)
    results = []
    with keep_float64():
        for step in case.batches(batch_world):
            losses = case.reference_step(model, step)
            gradients = {
                plain_name(name): p.grad.clone()
                for name, p in model.named_parameters()
                if p.grad is not None
            }
            norms = torch.nn.utils.clip_grad_norm_(trained, case.max_norm)
            optimizer.step()
            optimizer.zero_grad()
            weights = {
                plain_name(name): value.clone() for name, value in model.state_dict().items()
            }
            results.append(
                {"losses": losses, "gradients": gradients, "norm": norms, "weights": weights}
            )
    torch.save(results, directory / "reference.pt")
    if case.peft is not None:
        model.save_pretrained(directory / "end")
    else:
        whole.lm_head.load_state_dict(model.lm_head.state_dict())
        whole.model.embed_tokens.load_state_dict(model.model.embed_tokens.state_dict())
        whole.model.norm.load_state_dict(model.model.norm.state_dict())
        for old, new in zip(
            stack, [*model.model.layers, *(each.mtp_block for each in layers)], strict=True
        ):
            old.load_state_dict(new.state_dict())
        write(whole, layers, config, directory / "end")


def write(whole: Any, layers: list[Any], config: Any, directory: Path) -> None:
    """A checkpoint in the family's form: the last layers of a deeper model, and what is beside their blocks."""
    whole.save_pretrained(directory)
    stored = load_file(directory / "model.safetensors")
    first = config.num_hidden_layers
    for depth, layer in enumerate(layers):
        prefix = f"model.layers.{first + depth}."
        apart = config.model_type == "mellum"
        names = dict(
            zip(APART if apart else BESIDE, ("enorm", "hnorm", "eh_proj", "post_norm"), strict=True)
        )
        if apart:
            stored = {
                key.replace(prefix, "mtp.layers.0."): tensor for key, tensor in stored.items()
            }
        for name, part in names.items():
            key = f"mtp.{name}.weight" if apart else f"{prefix}{name}.weight"
            stored[key] = getattr(layer, part).weight.detach().clone()
        if not apart and depth == 0:  # copies, as DeepSeek's own checkpoint has them
            stored[f"{prefix}embed_tokens.weight"] = (
                whole.model.embed_tokens.weight.detach().clone()
            )
            stored[f"{prefix}shared_head.head.weight"] = whole.lm_head.weight.detach().clone()
    save_file(stored, directory / "model.safetensors", {"format": "pt"})
    fields = json.loads((directory / "config.json").read_text())
    kinds = {
        name: getattr(config, name) for name in ("layer_types", "mlp_layer_types") if name in fields
    }
    fields |= {
        "num_hidden_layers": first,
        "num_nextn_predict_layers": len(layers),
        "dtype": "float64",
        **kinds,
    }
    (directory / "config.json").write_text(json.dumps(fields))


BESIDE = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
APART = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
