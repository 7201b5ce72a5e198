"""What ``_compat/standard_library.py`` relies on of ``argparse`` and ``multiprocessing``."""

import argparse
import multiprocessing

from .relied_on import relying

relies_on = relying("standard_library.py")


@relies_on("argparse.ArgumentParser:_actions")
def test_a_parser_lists_its_arguments() -> None:
    """``_actions`` has the arguments in order, those of groups too."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--one")
    parser.add_argument_group("some").add_argument("--two")
    assert [flag for each in parser._actions for flag in each.option_strings] == [
        "-h", "--help", "--one", "--two",
    ]  # fmt: skip


@relies_on("multiprocessing.process.BaseProcess:_config")
def test_a_process_may_have_children_if_its_config_says_so() -> None:
    """``current_process()._config["daemon"]`` is what ``daemon`` reads, which forbids children."""
    process = multiprocessing.current_process()
    before = process._config.get("daemon")
    try:
        process._config["daemon"] = True
        assert process.daemon
        process._config["daemon"] = False
        assert not process.daemon
    finally:
        process._config.pop("daemon") if before is None else process._config.update(daemon=before)
