"""Describe a saved checkpoint and a saved adapter of it to the tools that rewrite their files."""

from pathlib import Path
from typing import Any

from .._compat.transformers.classes import empty_model
from .._compat.transformers.prediction import refuse_adapters_of_prediction
from ..checkpoint.stored_forms.scheme import split_stored_form
from ..config.parallel import ParallelConfig
from ..distributed.files.reader import TensorOnDisk, open_tensors
from ..errors import CheckpointError
from ..features.adapters.adapter_structure import adapter_parameters, quietly
from ..features.adapters.peft_config import read_config
from ..features.adapters.plan import plan_adapters
from ..features.adapters.storage import WEIGHTS, stored_names
from .build_plan import build_plan


class AdaptedBase:
    """A checkpoint and an adapter of it, on the meta device.

    Args:
        base: the directory of the checkpoint.
        adapter: that of the adapter.
        trusted: whether to run code that comes with the checkpoint.

    Attributes:
        model: the stock model.
        form: of quantized weights in the checkpoint; ``None``: there are none.
        whole: PEFT's model around another of the same class.
        stock_plan, plan: of the model without and with the adapter.
        adapters: the adapter's parameters.
        keys: their keys in the adapter's file, and those of other trained parameters, by name.
        trained: the adapter's stored tensors.

    Raises:
        CheckpointError: a file is damaged, or there is no model of the checkpoint's class.
        ConfigError: the adapter does not fit the model.
    """

    name = "default"

    def __init__(self, base: Path, adapter: Path, trusted: bool) -> None:
        config, _ = read_config(str(adapter))
        self.trained: dict[str, TensorOnDisk] = open_tensors([adapter / WEIGHTS])
        refuse_adapters_of_prediction(self.trained, str(adapter))
        try:
            self.model, wrapped = empty_model(base, trusted), empty_model(base, trusted)
        except (LookupError, OSError) as error:
            raise CheckpointError(f"no model can be built from the checkpoint {base}: {error}") from error
        self.model.config, self.form = split_stored_form(self.model.config)
        self.stock_plan = build_plan(self.model, ParallelConfig())
        self.whole: Any = quietly(wrapped, config, self.name)
        self.adapters = adapter_parameters(self.whole, self.stock_plan)
        self.plan = plan_adapters(self.stock_plan, self.adapters)
        self.keys = stored_names(self.whole, self.name, self.plan, True)
