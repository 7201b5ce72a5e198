"""A name that a library renames is found by its test, which says what was relied on and which file to mend."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
FSDP = "torch.distributed.fsdp._fully_shard"
RENAMED = {
    "torch.nn.Module._call_impl": ("torch.py", "test_torch_modules.py"),
    "torch._C._autograd._top_saved_tensors_default_hooks": ("torch.py", "test_torch_autograd.py"),
    f"{FSDP}._fsdp_param.FSDPParam:_module_info": ("torch_fsdp.py", "test_torch_fsdp.py"),
    "torch.distributed.distributed_c10d._get_default_store": (
        "torch_gloo.py",
        "test_torch_distributed.py",
    ),
    "transformers.masking_utils._preprocess_mask_arguments": (
        "transformers/computing.py",
        "transformers/test_computing.py",
    ),
    "transformers.Trainer._save_rng_state": (
        "transformers/trainer.py",
        "transformers/test_trainer.py",
    ),
    "trl.trainer.dpo_trainer.DPOTrainer._precompute_ref_logps": ("trl.py", "test_trl.py"),
    "peft.utils.save_and_load._get_tp_info": ("peft.py", "test_peft.py"),
    "accelerate.Accelerator:_custom_objects": ("accelerate.py", "test_accelerate.py"),
    "bitsandbytes.nn.modules.Params4bit:bnb_quantized": (
        "bitsandbytes.py",
        "test_bitsandbytes.py",
    ),
}


@pytest.mark.parametrize("name", RENAMED)
def test_a_renamed_name_is_named(name: str) -> None:
    file, tests = RENAMED[name]
    environment = {**os.environ, "HFSCALE_RENAMED": name}
    path = ROOT / "tests" / "_compat" / tests
    options = ["-p", "tests._compat.renaming", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, str(path)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=280
    )
    said = [
        line
        for line in done.stdout.splitlines()
        if re.search(r"^E +AssertionError: .*mend", line, re.I)
    ]
    assert said, done.stdout
    last = re.split(r"[.:]", name)[-1]
    assert all(last in line and f"hfscale/_compat/{file}" in line for line in said), said
