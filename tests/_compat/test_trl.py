"""What ``_compat/trl.py`` relies on of TRL's trainers, their functions and their engine."""

from collections import defaultdict
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from .relied_on import found, relying

TRAINER = "trl.trainer"
GRPO = f"{TRAINER}.grpo_trainer.GRPOTrainer"
DISTILLATION = f"{TRAINER}.distillation_trainer.DistillationTrainer"
ENGINE = "trl.generation.vllm_generation.VLLMGeneration"
relies_on = relying("trl.py")


def names_in(function: str) -> set[str]:
    """The names that a function reads, calls or sets."""
    return set(found(function).__code__.co_names)


def unmade(kind: str, **attributes: Any) -> Any:
    """An instance of a class whose constructor was not run."""
    made = object.__new__(found(kind))
    vars(made).update(attributes)
    return made


@pytest.mark.parametrize("name", ["sft", "dpo", "kto", "reward"])
@relies_on(
    f"{TRAINER}.sft_trainer.SFTTrainer._prepare_dataset",
    f"{TRAINER}.dpo_trainer.DPOTrainer._prepare_dataset",
)
def test_a_data_set_is_prepared_by_one_method(name: str) -> None:
    """A trainer's constructor calls ``_prepare_dataset(dataset, processing_class, args, ...)``."""
    import inspect

    kind = f"{TRAINER}.{name}_trainer.{'Reward' if name == 'reward' else name.upper()}Trainer"
    assert "_prepare_dataset" in names_in(f"{kind}.__init__")
    given = list(inspect.signature(found(f"{kind}._prepare_dataset")).parameters)
    assert given[:4] == ["self", "dataset", "processing_class", "args"]


@pytest.mark.parametrize("name", ["DPO", "KTO"])
@relies_on(f"{TRAINER}.dpo_trainer.DPOTrainer._precompute_ref_logps")
def test_scores_of_a_reference_are_cached_by_one_method(name: str) -> None:
    """The constructor calls ``_precompute_ref_logps(dataset, ...)`` where a reference's scores are to be cached."""
    import inspect

    kind = f"{TRAINER}.{name.lower()}_trainer.{name}Trainer"
    assert "_precompute_ref_logps" in names_in(f"{kind}.__init__")
    given = list(inspect.signature(found(f"{kind}._precompute_ref_logps")).parameters)
    assert given[:2] == ["self", "dataset"]


@relies_on(
    f"{GRPO}._get_per_token_logps_and_entropies", f"{TRAINER}.utils.FusedCausalLMOutput.log_probs"
)
def test_completions_are_scored_by_one_method() -> None:
    """``_get_per_token_logps_and_entropies(model, ids, mask, tokens)`` calls the model with ``labels`` and
    ``fused_lm_head=True``, which returns a ``FusedCausalLMOutput``, and returns the log probabilities first.
    """
    output = found(f"{TRAINER}.utils.FusedCausalLMOutput")
    calls = []

    def model(**given: Any) -> Any:
        calls.append(given)
        return output(log_probs=torch.arange(3.0)[None])

    trainer = unmade(
        GRPO,
        accelerator=SimpleNamespace(autocast=nullcontext, is_main_process=False),
        args=SimpleNamespace(report_to=[]),
        state=SimpleNamespace(global_step=0),
    )
    ids = torch.ones(1, 3, dtype=torch.long)
    scored = trainer._get_per_token_logps_and_entropies(model, ids, ids, 2)
    assert torch.equal(scored[0], torch.tensor([[1.0, 2.0]]))
    assert calls[0]["fused_lm_head"]
    assert calls[0]["labels"].tolist() == [[-100, 1, 1]]


@pytest.mark.parametrize("mode", ["train", "eval"])
@relies_on(f"{TRAINER}.sft_trainer.SFTTrainer:_metrics")
def test_metrics_are_means_of_what_was_recorded(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """``_metrics["train"]`` and ``_metrics["eval"]`` list numbers by name, of which ``log`` adds the means."""
    import transformers

    logged: list[dict[str, float]] = []
    monkeypatch.setattr(transformers.Trainer, "log", lambda self, logs, *_: logged.append(logs))
    metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
    model = nn.Linear(1, 1).train(mode == "train")
    trainer = unmade(f"{TRAINER}.sft_trainer.SFTTrainer", model=model, _metrics=metrics)
    trainer._metrics[mode]["x"] += [1.0, 3.0]
    trainer.log({})
    assert list(logged[0].values()) == [2.0]
    assert not trainer._metrics[mode]


@relies_on(f"{GRPO}:_step")
def test_a_trainer_that_generates_counts_its_microbatches(monkeypatch: pytest.MonkeyPatch) -> None:
    """``training_step`` counts in ``_step``, which chooses the microbatch of a generation."""
    import transformers

    monkeypatch.setattr(transformers.Trainer, "training_step", lambda *_: torch.zeros(()))
    trainer = unmade(
        GRPO,
        _step=3,
        _current_train_step_time=0.0,
        current_gradient_accumulation_steps=2,
        _metrics={"train": defaultdict(list)},
    )
    trainer.training_step(None, {}, None)
    assert trainer._step == 4
    assert "_step" in names_in(f"{GRPO}.__init__")


@relies_on(f"{GRPO}:_total_train_tokens", f"{GRPO}:_logs")
def test_a_trainer_records_tokens_and_texts() -> None:
    """A trainer's constructor makes the records ``_total_train_tokens`` and ``_logs``."""
    assert {"_total_train_tokens", "_logs", "_metrics"} <= names_in(f"{GRPO}.__init__")
    assert "_total_train_tokens" in names_in(f"{TRAINER}.sft_trainer.SFTTrainer.__init__")


@pytest.mark.parametrize("name", ["SFT", "DPO", "GRPO", "Reward", "Distillation"])
@relies_on(f"{TRAINER}.utils.get_config_model_id")
def test_a_trainer_has_a_name_for_its_directory(name: str) -> None:
    """Where ``NAMETrainer`` gets no config, its own is ``NAMEConfig(f"{model}-NAME")``, the model by
    ``get_config_model_id``.
    """
    import inspect

    from transformers import LlamaConfig

    kind = found(f"{TRAINER}.{name.lower()}_trainer.{name}Trainer")
    assert f'{name}Config(f"{{model_name}}-{name}")' in inspect.getsource(kind.__init__)
    assert hasattr(found(f"{TRAINER}.{name.lower()}_trainer"), f"{name}Config")
    config = LlamaConfig(name_or_path="some/model")
    assert found(f"{TRAINER}.utils.get_config_model_id")(config) == "some/model"


@relies_on(f"{DISTILLATION}._compute_loss", f"{DISTILLATION}:_forward_redirection")
def test_a_distillations_loss_is_redirected() -> None:
    """``compute_loss`` calls ``_forward_redirection(wrapper, model, self._compute_loss, model, inputs, count)``, which
    returns loss, sum of entropies and number of tokens.
    """
    calls = []

    def redirected(*given: Any) -> Any:
        calls.append(given)
        return torch.ones(()), torch.ones(()), torch.ones(())

    model = nn.Linear(1, 1)
    accelerator = SimpleNamespace(
        unwrap_model=lambda each: each,
        gather_for_metrics=lambda each: each,
        num_processes=1,
        is_main_process=False,
    )
    trainer = unmade(
        DISTILLATION,
        model=model,
        accelerator=accelerator,
        _metrics={"train": defaultdict(list), "eval": defaultdict(list)},
        _total_train_tokens=0,
        args=SimpleNamespace(report_to=[]),
        state=SimpleNamespace(global_step=0),
    )
    trainer._forward_redirection = redirected
    inputs = {"completion_mask": torch.ones(1, 2), "prompt_mask": torch.ones(1, 2)}
    loss = trainer.compute_loss(model, inputs)
    assert float(loss) == 1
    ((wrapper, student, method, again, given, _),) = calls
    assert wrapper is student is again is model
    assert method == trainer._compute_loss
    assert given is inputs


@relies_on(DISTILLATION)
def test_a_trainer_that_distils_is_named_so() -> None:
    """Trainers whose loss is a divergence from a teacher have ``Distillation`` in their names, and no others have."""
    names = [name for name in dir(found("trl")) if name.endswith("Trainer")]
    assert [name for name in names if "Distillation" in name] == ["DistillationTrainer"]
    assert {"SFTTrainer", "DPOTrainer", "GRPOTrainer"} <= set(names)


@relies_on(f"{ENGINE}._init_vllm", f"{ENGINE}:_llm_weights_sleeping")
def test_an_engine_starts_in_one_method(monkeypatch: pytest.MonkeyPatch) -> None:
    """``VLLMGeneration`` calls ``_init_vllm()`` as it is made, which reads ``self.accelerator`` and makes ``LLM`` of
    its file; ``generate`` wakes the engine up if ``_llm_weights_sleeping``.
    """
    from accelerate import Accelerator

    kind = found(ENGINE)
    seen = []
    monkeypatch.setattr(kind, "_init_vllm", lambda self: seen.append(self.mode))
    accelerator = Accelerator(cpu=True)
    kind(model=nn.Linear(1, 1), accelerator=accelerator, processing_class=None, mode="colocate")
    assert seen == ["colocate"]
    monkeypatch.undo()
    assert {"LLM", "accelerator", "num_processes"} <= names_in(f"{ENGINE}._init_vllm")
    assert "_llm_weights_sleeping" in names_in(f"{ENGINE}.generate")


@relies_on(f"{ENGINE}._iter_named_params")
def test_an_engine_gets_what_one_method_yields() -> None:
    """``sync_weights`` of a server sends what ``_iter_named_params()`` yields: names and full tensors."""
    sent: list[Any] = []
    client = SimpleNamespace(
        update_named_params=lambda metadata, weights: sent.extend(weights),
        reset_prefix_cache=lambda: sent.append("reset"),
    )
    engine = unmade(
        ENGINE,
        mode="server",
        enable_sleep_mode=False,
        accelerator=SimpleNamespace(is_main_process=True),
        vllm_client=client,
        _weight_metadata=None,
        _iter_named_params=lambda: iter([("a", torch.ones(2))]),
    )
    engine.sync_weights()
    assert [each[0] for each in sent[:-1]] == ["a"]
    assert sent[-1] == "reset"


MADE = {
    "add_fused_lm_head": "grpo",
    "create_model_from_path": "grpo",
    "get_peft_model": "grpo",
    "hash_module": "dpo",
    "SyncRefModelCallback": "grpo",
    "VLLMGeneration": "grpo",
}
GATHERED = ("gather", "gather_object", "shuffle_sequence_dict")


def calls(trainer: str, name: str) -> bool:
    """Whether methods of a trainer call a function by the name that its file has for it."""
    kind = found(f"{TRAINER}.{trainer}_trainer.{trainer.upper()}Trainer")
    methods = [getattr(each, "__wrapped__", each) for each in vars(kind).values()]
    return any(name in each.__code__.co_names for each in methods if hasattr(each, "__code__"))


@pytest.mark.parametrize("name", MADE)
@relying("hfscale/integrations/trainer/seams.py")(
    *(f"{TRAINER}.{file}_trainer.{name}" for name, file in MADE.items())
)
def test_a_trainer_is_made_by_functions_of_its_file(name: str) -> None:
    """As it is made, a trainer calls these functions by the names that its file has for them."""
    assert calls(MADE[name], name)


@pytest.mark.parametrize("name", GATHERED)
@relying("hfscale/integrations/trainer/generations.py")(
    *(f"{TRAINER}.grpo_trainer.{name}" for name in GATHERED)
)
def test_a_trainer_gathers_by_functions_of_its_file(name: str) -> None:
    """A trainer that generates gathers and shuffles by the functions that its file has by these names."""
    assert calls("grpo", name)
