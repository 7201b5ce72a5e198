"""Models whose classes come with their checkpoint: own decoders, own names."""

import shutil
from pathlib import Path
from typing import Any

from transformers import AutoConfig

HERE = Path(__file__).parent


def write_checkpoint(directory: Path, module: str, **changes: Any) -> Any:
    """A directory with a config and the code of ``module``; returns the config, loaded from there."""
    directory.mkdir(parents=True, exist_ok=True)
    shutil.copy(HERE / f"{module}.py", directory / f"{module}.py")
    classes = {
        "AutoConfig": f"{module}.Config",
        "AutoModelForCausalLM": f"{module}.DecoderForCausalLM",
    }
    written: dict[str, Any] = {"model_type": module, "auto_map": classes, **changes}
    import json

    (directory / "config.json").write_text(json.dumps(written))
    return AutoConfig.from_pretrained(directory, trust_remote_code=True)
