from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer


@pytest.fixture(scope="session")
def saved_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from hfscale.recipes.dataset import train_tokenizer

    directory = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(["One? Two, of course. system user assistant\n"] * 3, 300).save_pretrained(
        directory
    )
    return directory


@pytest.fixture
def tokenizer(saved_tokenizer: Path) -> Any:
    return AutoTokenizer.from_pretrained(saved_tokenizer)
