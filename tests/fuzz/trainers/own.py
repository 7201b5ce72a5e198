"""What scripts bring of their own: losses, optimizers, samplers, several data sets, references, adapters, rollouts."""

from typing import Any

import torch
from torch.utils.data import DataLoader, WeightedRandomSampler
from transformers import TrainerCallback

from .draw import Draw


def wide(logits: torch.Tensor) -> torch.Tensor:
    """In 32 bits, or 64."""
    return logits if logits.dtype == torch.float64 else logits.float()


class OwnLoss:
    """A subclass's loss: every row counts alike, however long it is."""

    loss_is_scaled_for_ga = False

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        """The mean of means of rows."""
        given = {name: value for name, value in inputs.items() if name != "labels"}
        labels = inputs["labels"][:, 1:]
        output = model(**given)
        logits = wide(output.logits)[:, :-1].transpose(1, 2)
        entropy = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
        loss = (entropy.sum(-1) / (labels != -100).sum(-1).clamp(min=1)).mean()
        return (loss, output) if return_outputs else loss


class WatchedLoss:
    """A subclass that looks at the loss of its base."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any
    ) -> Any:
        """Trainer's."""
        loss, output = super().compute_loss(model, inputs, return_outputs=True, **more)  # type: ignore[misc]
        return (loss, output) if return_outputs else loss


class OwnDecay:
    """Only feed-forward weights decay."""

    def get_decay_parameter_names(self, model: Any) -> list[str]:
        """By name."""
        return [name for name, _ in model.named_parameters() if "mlp" in name]


class OwnChoice:
    """An optimizer that the arguments do not name."""

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> Any:
        """Descent with momentum."""
        return torch.optim.SGD, {"lr": args.learning_rate, "momentum": 0.9}


class OwnGroups:
    """Embeddings learn slower."""

    def create_optimizer(self, model: Any = None) -> Any:
        """Two groups."""
        trainer: Any = self
        slow = [
            each
            for name, each in trainer.model.named_parameters()
            if "embed" in name and each.requires_grad
        ]
        fast = [
            each
            for name, each in trainer.model.named_parameters()
            if "embed" not in name and each.requires_grad
        ]
        rate = trainer.args.learning_rate
        groups = [{"params": fast, "lr": rate}, {"params": slow, "lr": rate / 10}]
        trainer.optimizer = torch.optim.AdamW(groups, eps=trainer.args.adam_epsilon)
        return trainer.optimizer


class OwnSampler:
    """Rows by weight, drawn from the process's own random numbers."""

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        count = len(self.train_dataset)  # type: ignore[attr-defined]
        return WeightedRandomSampler([1.0 + place % 3 for place in range(count)], count)


class OwnLoader:
    """A loader made by hand."""

    def get_train_dataloader(self) -> Any:
        """Shuffled."""
        trainer: Any = self
        size = trainer.args.per_device_train_batch_size
        loader = DataLoader(
            trainer.train_dataset, size, shuffle=True, collate_fn=trainer.data_collator
        )
        return trainer.accelerator.prepare(loader)


_BASES: dict[str, type] = {
    "decay": OwnDecay,
    "choice": OwnChoice,
    "groups": OwnGroups,
    "sampler": OwnSampler,
    "loader": OwnLoader,
}
_LOSSES: dict[str, type] = {"own": OwnLoss, "watched": WatchedLoss}
BRINGS = (*_BASES, "optimizers", "class", "sets", "reference", "path", "peft")
"""What :attr:`.draw.Draw.brings` may name."""


def subclass(draw: Draw, kind: type) -> type:
    """The script's own trainer."""
    bases = [each for each in (_LOSSES.get(draw.loss), _BASES.get(draw.brings)) if each is not None]
    return type("Own", (*bases, kind), {}) if bases else kind


def optimizers(draw: Draw, model: Any) -> dict[str, Any]:
    """Arguments for the trainer."""
    rate = float(draw.arguments.get("learning_rate", 2e-3))
    if draw.brings == "class":
        return {"optimizer_cls_and_kwargs": (torch.optim.NAdam, {"lr": rate, "eps": 1e-5})}
    if draw.brings != "optimizers":
        return {}
    made = torch.optim.AdamW(
        [each for each in model.parameters() if each.requires_grad], lr=rate, eps=1e-5
    )
    return {"optimizers": (made, torch.optim.lr_scheduler.LambdaLR(made, lambda step: 0.8**step))}


class Begin(TrainerCallback):
    """Training begins with a saved adapter, none of whose factors is zero."""

    def __init__(self, adapter: str, stock: bool) -> None:
        self._adapter = adapter
        self._stock = stock

    def on_train_begin(self, *_: Any, model: Any = None, **__: Any) -> None:
        """Put it in."""
        if self._stock:
            import peft
            from safetensors.torch import load_file

            peft.set_peft_model_state_dict(
                model, load_file(f"{self._adapter}/adapter_model.safetensors")
            )
        else:
            from hfscale.checkpoint.load import load_weights

            load_weights(model, self._adapter)


def length_reward(completions: list[str], **_: Any) -> list[float]:
    """Long ones, and some digits."""
    return [len(each.split()) / 4 + 0.1 * each.count("3") for each in completions]


def digit_reward(completions: list[str], **_: Any) -> list[float]:
    """Other digits."""
    return [0.2 * each.count("1") - 0.3 * each.count("2") for each in completions]


def rollouts(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """The same completions for a prompt, whichever rank has it; those of its group differ."""
    first = trainer.accelerator.process_index * len(prompts)
    many = trainer.num_generations if trainer.model.training else trainer.num_generations_eval
    prompt_ids = []
    completions = []
    for place, prompt in enumerate(prompts, first):
        ids = trainer.processing_class(prompt)["input_ids"]
        number = place % many
        prompt_ids.append(ids)
        completions.append(
            [(sum(ids) + 7 * number + k * k) % 60 + 5 for k in range(2 + number)] + [1]
        )
    return {"prompt_ids": prompt_ids, "completion_ids": completions, "logprobs": None}
