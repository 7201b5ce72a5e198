"""Collect the functions of accelerate's test scripts as tests, which its own ``main`` calls one after another."""

import inspect
from collections.abc import Iterator
from importlib import import_module
from itertools import product
from typing import Any

import pytest

# What a script's main gives to its functions; functions that want anything else are no tests.
CHOICES: dict[str, tuple[Any, ...]] = dict.fromkeys(
    ("split_batches", "dispatch_batches", "sync_each_batch", "use_seedable_sampler"), (False, True)
)
GIVEN = ("accelerator", "state", "datasets_Dataset")
# These want the classes of an accelerator that has no model: one to be pickled, and a loader that dispatches.
ALONE = ("test_pickle_accelerator", "test_gather_for_metrics_with_iterable_dataset")
_WORDS = ("test_", "check_", "_check")
_HELPERS = ("check_model_parameters", "test_data_loader")


class ScriptFile(pytest.File):
    """A script whose functions are tests."""

    def collect(self) -> Iterator[pytest.Item]:
        """Yield every function that a script's main can call, with each choice of its switches."""
        parts = self.path.with_suffix("").parts
        module = import_module(".".join(parts[parts.index("accelerate") :]))
        for name, function in vars(module).items():
            if not inspect.isfunction(function) or function.__module__ != module.__name__:
                continue
            parameters = inspect.signature(function).parameters
            told = all(each in CHOICES or each in GIVEN for each in parameters)
            if (
                name in _HELPERS
                or not told
                or not (name.startswith(_WORDS[:2]) or name.endswith(_WORDS[2]))
            ):
                continue
            switches = [each for each in parameters if each in CHOICES]
            for values in product(*(CHOICES[each] for each in switches)):
                chosen = dict(zip(switches, values, strict=True))
                told_as = "-".join(str(value) for value in values)
                title = f"{name}[{told_as}]" if chosen else name
                yield ScriptTest.from_parent(self, name=title, call=function, chosen=chosen)


class ScriptTest(pytest.Item):
    """One function of a script."""

    def __init__(self, *, call: Any, chosen: dict[str, bool], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._call = call
        self._chosen = chosen

    def runtest(self) -> None:
        """Call the function in a process that has made its accelerator, as a script's main does first."""
        import datasets
        from accelerate import Accelerator

        accelerator = Accelerator()
        made = {
            "accelerator": accelerator,
            "state": accelerator.state,
            "datasets_Dataset": datasets.Dataset,
        }
        wanted = inspect.signature(self._call).parameters
        self._call(
            **{name: value for name, value in made.items() if name in wanted}, **self._chosen
        )
