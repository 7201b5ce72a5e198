"""What hfscale overrides in transformers' Trainer is there, and is called as hfscale expects."""

import inspect
from functools import cached_property

import pytest
import transformers
from transformers import trainer as module

import hfscale
from hfscale._compat.transformers import trainer as host
from hfscale.integrations.trainer.files import Checkpoints

OWN = {
    "read_best_weights",
    "read_state",
    "read_weights",
    "write_state",
    "write_random_states",
    "put_back_random_states",
    "check_loss",
    "around_inputs",
    "around_reports",
    "waiting_loss",
    "run_microbatches",
    "arguments_of_data",
    "written_aside",
    "forget_engine",
    "kept_in_memory",
    "_cut",
    "_write_aside",
    "_divisor",
    "check_cached",
    "scored",
}
OVERRIDDEN = sorted(
    name
    for kind in (hfscale.TrainerMixin, Checkpoints, host.TrainerHooks)
    for name, value in vars(kind).items()
    if inspect.isfunction(value) and name not in OWN and not name.startswith("__")
)


@pytest.mark.parametrize(
    "name", [name for name in OVERRIDDEN if name not in ("_adopt", "_parallelized")]
)
def test_what_is_overridden_takes_what_it_is_given(name: str) -> None:
    stock = inspect.signature(getattr(transformers.Trainer, name)).parameters
    ours = inspect.signature(getattr(hfscale.Trainer, name)).parameters
    anything = any(each.kind is each.VAR_KEYWORD for each in ours.values())
    assert anything or list(ours) == list(stock)


def test_names_that_are_swapped_or_looked_up() -> None:
    source = inspect.getsource(module.Trainer)
    assert "self.accelerator = Accelerator(**args)" in source
    assert (
        "seed_worker, num_workers=self.args.dataloader_num_workers, rank=self.args.process_index"
        in source
    )
    assert isinstance(
        inspect.getattr_static(transformers.TrainingArguments, "_setup_devices"), cached_property
    )
    assert "_hf_peft_config_loaded" in inspect.getsource(module.validate_quantization_for_training)
