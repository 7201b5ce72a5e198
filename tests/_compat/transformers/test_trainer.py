"""What ``_compat/transformers/trainer.py`` relies on of ``transformers.Trainer``: the methods it calls in a run."""

import inspect
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from ..relied_on import found, relying

TRAINER = "transformers.Trainer"
relies_on = relying("transformers/trainer.py")
NOTED = (
    "_save_checkpoint",
    "_get_output_dir",
    "_save_optimizer_and_scheduler",
    "_save_rng_state",
    "_load_rng_state",
    "_load_optimizer_and_scheduler",
    "_load_from_checkpoint",
    "_load_best_model",
    "_maybe_log_save_evaluate",
    "_prepare_inputs",
    "_has_mixed_mesh_grads",
    "_move_model_to_device",
    "get_batch_samples",
)


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """The arguments of a Trainer's own methods as it trains, saves, resumes and loads its best model."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    noted: dict[str, list[Any]] = defaultdict(list)

    class Noted(Trainer):
        pass

    def note(name: str) -> Any:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            stock = getattr(Trainer, name)
            bound = inspect.signature(stock).bind(self, *args, **kwargs)
            returned = stock(self, *args, **kwargs)
            noted[name].append((list(bound.arguments.values())[1:], returned))
            return returned

        return method

    for name in NOTED:
        if hasattr(Trainer, name):
            setattr(Noted, name, note(name))
    config = LlamaConfig(
        vocab_size=17,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        bos_token_id=1,
        eos_token_id=2,
    )
    rows = [{"input_ids": [3, 4, 5], "labels": [3, 4, 5]}] * 3
    out = tmp_path_factory.mktemp("run")
    arguments = TrainingArguments(
        output_dir=str(out),
        max_steps=2,
        per_device_train_batch_size=1,
        save_strategy="steps",
        save_steps=1,
        eval_strategy="steps",
        eval_steps=1,
        load_best_model_at_end=True,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    torch.manual_seed(0)
    for resumed in (None, str(out / "checkpoint-1")):
        trainer = Noted(
            LlamaForCausalLM(config), arguments, train_dataset=rows, eval_dataset=rows[:1]
        )
        with suppress(Exception):  # a test says what is missing
            trainer.train(resume_from_checkpoint=resumed)
    return noted


@relies_on(f"{TRAINER}._save_checkpoint", f"{TRAINER}._get_output_dir")
def test_a_checkpoint_is_saved_below_the_output_directory(calls: Any) -> None:
    """``_save_checkpoint(model, trial)`` writes a checkpoint into a directory named by ``PREFIX_CHECKPOINT_DIR`` and
    the step below ``_get_output_dir(trial)``.
    """
    assert len(calls["_save_checkpoint"]) == 3
    (model, trial), returned = calls["_save_checkpoint"][0]
    assert isinstance(model, torch.nn.Module)
    assert trial is None
    assert returned is None
    (trial,), directory = calls["_get_output_dir"][0]
    assert trial is None
    prefix = found("transformers.trainer.PREFIX_CHECKPOINT_DIR")
    assert (Path(directory) / f"{prefix}-2" / "model.safetensors").exists()


@relies_on(f"{TRAINER}._save_optimizer_and_scheduler", f"{TRAINER}._save_rng_state")
def test_states_are_saved_into_the_checkpoint(calls: Any) -> None:
    """As a checkpoint is saved, ``_save_optimizer_and_scheduler`` and ``_save_rng_state`` get its directory."""
    for name in ("_save_optimizer_and_scheduler", "_save_rng_state"):
        assert [Path(directory).name for (directory,), _ in calls[name]] == [
            "checkpoint-1", "checkpoint-2", "checkpoint-2",
        ]  # fmt: skip


@relies_on(
    f"{TRAINER}._load_optimizer_and_scheduler",
    f"{TRAINER}._load_rng_state",
    f"{TRAINER}._load_from_checkpoint",
)
def test_a_resumed_run_reads_its_checkpoint(calls: Any) -> None:
    """As a run is resumed, ``_load_from_checkpoint``, ``_load_optimizer_and_scheduler`` and ``_load_rng_state`` get the
    directory, and the latter two may get ``None`` where nothing is resumed.
    """
    for name in ("_load_from_checkpoint", "_load_optimizer_and_scheduler", "_load_rng_state"):
        given = [args[0] for args, _ in calls[name]]
        assert {Path(each).name for each in given if each is not None} == {"checkpoint-1"}
    path = Path(next(args[0] for args, _ in calls["_load_from_checkpoint"]))
    states = torch.load(path / "rng_state.pth", weights_only=False)
    assert {"python", "numpy", "cpu"} <= states.keys()


@relies_on(f"{TRAINER}._load_best_model")
def test_the_best_model_is_loaded_at_the_end(calls: Any) -> None:
    """``_load_best_model()`` is called once a run with ``load_best_model_at_end`` has ended."""
    assert [args for args, _ in calls["_load_best_model"]] == [[], []]


@relies_on(f"{TRAINER}._maybe_log_save_evaluate")
def test_each_step_ends_in_one_call(calls: Any) -> None:
    """``_maybe_log_save_evaluate(tr_loss, grad_norm, model, trial, ...)`` is called after each step, and saves."""
    assert len(calls["_maybe_log_save_evaluate"]) >= 3
    names = list(inspect.signature(found(f"{TRAINER}._maybe_log_save_evaluate")).parameters)
    assert names[1:5] == ["tr_loss", "grad_norm", "model", "trial"]


@relies_on(f"{TRAINER}._prepare_inputs", f"{TRAINER}.get_batch_samples")
def test_a_batch_is_prepared_and_its_labels_are_counted(calls: Any) -> None:
    """``_prepare_inputs(inputs)`` returns the batch that is computed; ``get_batch_samples(iterator, number, device)``
    batches and the number of labels by which their loss is divided: of a causal model, all but the first of each row.
    """
    (inputs,), prepared = calls["_prepare_inputs"][0]
    assert prepared.keys() == inputs.keys()
    (_, number, device), (batches, count) = calls["get_batch_samples"][0]
    assert torch.device(device).type == "cpu"
    assert number == 1
    assert len(batches) == 1
    assert int(count) == 2


@relies_on(f"{TRAINER}._has_mixed_mesh_grads")
def test_gradients_are_clipped_after_a_look_at_their_meshes(calls: Any) -> None:
    """``_has_mixed_mesh_grads(model)`` is asked before gradients are clipped, and is false for plain tensors."""
    assert {returned for _, returned in calls["_has_mixed_mesh_grads"]} == {False}


@relies_on(f"{TRAINER}._move_model_to_device")
def test_the_model_is_moved_by_one_method(calls: Any) -> None:
    """``_move_model_to_device(model, device)`` is what puts the model onto the device."""
    assert len(calls["_move_model_to_device"]) >= 2


@relies_on(f"{TRAINER}._push_from_checkpoint")
def test_a_checkpoint_is_pushed_by_one_method() -> None:
    """``_push_from_checkpoint(checkpoint_folder)`` is called by ``_save_checkpoint`` if ``push_to_hub`` is set."""
    names = list(inspect.signature(found(f"{TRAINER}._push_from_checkpoint")).parameters)
    assert names == ["self", "checkpoint_folder"]
    assert "self._push_from_checkpoint(output_dir)" in inspect.getsource(
        found(f"{TRAINER}._save_checkpoint")
    )


@relies_on("transformers.TrainingArguments._setup_devices", "transformers.TrainingArguments:_n_gpu")
def test_the_device_is_found_once_and_may_be_found_again(tmp_path: Path) -> None:
    """``_setup_devices`` is a cached property that ``device`` reads, and whose value can be dropped from the instance;
    ``_n_gpu`` is what ``n_gpu`` returns.
    """
    from functools import cached_property

    from transformers import TrainingArguments

    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    kind = inspect.getattr_static(TrainingArguments, "_setup_devices")
    assert isinstance(kind, cached_property)
    assert arguments.device.type == "cpu"
    assert vars(arguments).pop("_setup_devices") == arguments.device
    arguments._n_gpu = 3
    assert arguments.n_gpu == 3


@relies_on(
    "transformers.trainer.Accelerator",
    "transformers.trainer.apply_liger_kernel",
    "transformers.trainer.skip_first_batches",
    "transformers.trainer.seed_worker",
    "transformers.trainer.safe_globals",
)
def test_a_trainer_looks_functions_up_as_it_calls_them() -> None:
    """Trainer makes its accelerator by ``Accelerator`` of its module, applies Liger's kernels, skips batches and seeds
    workers, by rank, by functions of it; ``safe_globals()`` is a context for loading random states.
    """
    module = found("transformers.trainer")
    source = inspect.getsource(module.Trainer)
    assert "self.accelerator = Accelerator(**args)" in source
    assert "skip_first_batches(train_dataloader, " in source
    assert "apply_liger_kernel(" in source
    assert "seed_worker, num_workers=self.args.dataloader_num_workers, rank=" in source
    with module.safe_globals():
        pass
