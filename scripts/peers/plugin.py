"""A pytest plugin that runs a peer's tests with stock classes or with hfscale's, each test in processes of its own.

python -m pytest -p peers.plugin --peer trl --with ours --layout tp2 FOLDER/tests/FILE.py -k dft
"""

import gc
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from _pytest.runner import runtestprotocol

from .forked import Reports, run_ranks
from .older_tests import put_gone_names
from .replaced import LAYOUTS, Replacement
from .rows import stand_in
from .script_tests import ALONE, ScriptFile
from .shared_folders import share


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("peers")
    group.addoption(
        "--peer", required=True, choices=("trl", "peft", "accelerate", "scripts", "transformers")
    )
    group.addoption("--with", dest="classes", default="ours", choices=("stock", "ours"))
    group.addoption("--layout", default="one")
    group.addoption("--seconds", type=float, default=60, help="a test may take")
    group.addoption("--only", type=Path, help="a file with the ids of the tests to run, one a line")
    group.addoption("--every", type=int, default=1, help="run one test of so many in each file")
    group.addoption(
        "--results",
        type=lambda path: Path(path).absolute(),
        help="append a line of JSON for each test to this file",
    )


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)
    stand_in()
    layout = LAYOUTS[config.option.layout]
    replacement = Replacement(layout if config.option.classes == "ours" else None)
    getattr(replacement, config.option.peer)()
    config.addinivalue_line("markers", "regression: one of PEFT's own marks")
    gc.freeze()  # what is imported by now stays: no collection looks through it again, here and in forks
    config.pluginmanager.register(_Runs(config, replacement, layout.total_size), "peers-runs")


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makemodule(
    module_path: Path, parent: pytest.Collector
) -> pytest.Collector | None:
    peer = parent.config.option.peer
    if peer == "scripts":
        return ScriptFile.from_parent(parent, path=module_path)
    for path in (module_path, *module_path.parent.glob("*util*.py")):
        put_gone_names(path, peer)
    return None


class _Everything(defaultdict[str, int]):
    """PEFT's note of the ids that were asked for online: all, so that none is."""

    def __contains__(self, name: object) -> bool:
        return True


def pytest_collection_finish() -> None:
    for module in list(sys.modules.values()):
        if hasattr(module, "_HUB_MODEL_ACCESSES"):
            module._HUB_MODEL_ACCESSES = _Everything(int)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.only is not None:
        wanted = set(config.option.only.read_text().splitlines())
        items[:] = [item for item in items if item.nodeid in wanted]
    of_files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        of_files.setdefault(item.path, []).append(item)
    items[:] = [item for found in of_files.values() for item in found[:: config.option.every]]


class _Runs:
    """Runs each test, and says of it how it ended."""

    def __init__(self, config: pytest.Config, replacement: Any, ranks: int) -> None:
        self._config = config
        self._replacement = replacement
        alone = config.option.classes == "stock" and config.option.peer != "scripts"
        self._ranks = 1 if alone else ranks

    def pytest_runtest_protocol(self, item: pytest.Item) -> bool:
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        with tempfile.TemporaryDirectory() as directory:
            found, why = run_ranks(
                lambda: self._run(item, Path(directory)),
                self._ranks,
                self._config.option.seconds,
                Path(directory),
            )
        reports = _worst(found)
        if reports is None:
            reports = [_lost(item, why)]
        for report in reports:
            item.ihook.pytest_runtest_logreport(report=report)
        self._note(item, reports)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Iterator[None]:
        """Part the ranks as a test has ended: what peers tidy up behind it is made for one process."""
        try:
            return (yield)
        finally:
            if self._ranks > 1 and dist.is_initialized():
                dist.destroy_process_group()

    def _run(self, item: pytest.Item, directory: Path) -> Reports:
        """Run the test in this process, a forked one."""
        if self._ranks > 1:
            share(self._config, self._config.rootpath, directory / "tests")
        # In one process the class alone is another: its models are what the tests prepare.
        self._replacement.beside = self._ranks > 1 and item.name not in ALONE
        reports = runtestprotocol(item, nextitem=None, log=False)
        for report in reports:
            report.user_properties.append(("reached", sorted(self._replacement.reached)))
        return [
            self._config.hook.pytest_report_to_serializable(config=self._config, report=each)
            for each in reports
        ]

    def _note(self, item: pytest.Item, reports: list[pytest.TestReport]) -> None:
        if self._config.option.results is None:
            return
        failed = next((each for each in reports if each.failed), None)
        skipped = any(each.skipped for each in reports)
        noted = (
            names for each in reports for key, names in each.user_properties if key == "reached"
        )
        line = {
            "id": item.nodeid,
            "outcome": "failed" if failed else "skipped" if skipped else "passed",
            "reached": sorted({name for names in noted for name in names}),
            "seconds": round(sum(each.duration for each in reports), 1),
            "words": _words(failed) if failed else "",
        }
        with self._config.option.results.open("a") as file:
            file.write(json.dumps(line) + "\n")


def _worst(found: list[Reports | None]) -> list[pytest.TestReport] | None:
    """Return the reports of the first rank on which the test failed, else of the first; None if one has none."""
    made = [None if each is None else [_report(data) for data in each] for each in found]
    failed = next(
        (each for each in made if each is not None and any(report.failed for report in each)), None
    )
    if failed is not None:
        return failed
    return None if None in made else made[0]


def _report(data: dict[str, Any]) -> pytest.TestReport:
    return pytest.TestReport._from_json(
        {key: value for key, value in data.items() if key != "$report_type"}
    )


def _lost(item: pytest.Item, why: str) -> pytest.TestReport:
    return pytest.TestReport(item.nodeid, item.location, {}, "failed", f"lost: {why}", "call")


def _words(report: pytest.TestReport) -> str:
    """Return the type and the message of a test's error."""
    crash = getattr(report.longrepr, "reprcrash", None)
    return crash.message if crash is not None else str(report.longrepr)[-2000:]
