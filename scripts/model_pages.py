"""Fill in what is printed on the pages of well-known models, docs/model-*.md.

    python scripts/model_pages.py [--check] [--only WORD]

The page's Python is followed by two blocks: what it prints on two processes, and in one, without a layout. In other
blocks a line ``$ hfscale plan|estimate|search ID ...`` is followed by what that command prints: two lines where a block
has several, else all but the parameters of a plan and the end of long tables. IDs of the Hub are read from ``CONFIGS``,
the published sizes, so that nothing is downloaded. The prose between the blocks is written by hand.
"""

import argparse
import contextlib
import io
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import transformers

from hfscale.cli import main as run_hfscale

ROOT = Path(__file__).parents[1]
PAGES = sorted(ROOT.glob("docs/model-*.md"))
COMMANDS = re.compile(r"(?ms)^```\n(\$ hfscale .*?)^```$")
SCRIPT = re.compile(
    r"(?ms)^```python\n(.*?)^```\n(?P<between>.*?)^```\n(.*?)^```\n(?P<then>.*?)^```\n(.*?)^```$"
)
ROWS = 6  # of a table of layouts
LLAMA3 = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "rope_type": "llama3",
}


def llama(hidden: int, between: int, layers: int, heads: int) -> Any:
    """Llama 3.1: all sizes have 8 key and value heads."""
    sizes = {"hidden_size": hidden, "intermediate_size": between, "num_hidden_layers": layers}
    shared = {"vocab_size": 128256, "max_position_embeddings": 131072, "rope_parameters": LLAMA3}
    return transformers.LlamaConfig(
        **sizes,
        **shared,
        num_attention_heads=heads,
        num_key_value_heads=8,
        architectures=["LlamaForCausalLM"],
    )


def qwen_vl() -> Any:
    """Qwen2.5-VL 7B."""
    text = {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "vocab_size": 152064,
    }
    heads = {"num_attention_heads": 28, "num_key_value_heads": 4}
    rope = {"rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 1000000.0}
    vision = {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "out_hidden_size": 3584,
        "num_heads": 16,
    }
    return transformers.Qwen2_5_VLConfig(
        text_config={**text, **heads, "rope_parameters": rope},
        vision_config=vision,
        architectures=["Qwen2_5_VLForConditionalGeneration"],
    )


def gpt_oss(**sizes: Any) -> Any:
    """The defaults of transformers' class are gpt-oss-120b's; its experts are stored in MXFP4."""
    whole = [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ]
    stored = {"quant_method": "mxfp4", "modules_to_not_convert": whole}
    return transformers.GptOssConfig(**sizes, quantization_config=stored)


def deepseek() -> Any:
    """The defaults of transformers' class are DeepSeek-V3's; its linear layers are stored in blocks of FP8."""
    stored = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
    return transformers.DeepseekV3Config(quantization_config=stored)


CONFIGS = {
    "meta-llama/Llama-3.1-8B": lambda: llama(4096, 14336, 32, 32),
    "meta-llama/Llama-3.3-70B-Instruct": lambda: llama(8192, 28672, 80, 64),
    "openai/gpt-oss-20b": lambda: gpt_oss(num_hidden_layers=24, num_local_experts=32),
    "openai/gpt-oss-120b": gpt_oss,
    "Qwen/Qwen3.5-35B-A3B": lambda: transformers.Qwen3_5MoeConfig(
        vision_config={"out_hidden_size": 2048}
    ),
    "Qwen/Qwen2.5-VL-7B-Instruct": qwen_vl,
    "deepseek-ai/DeepSeek-V3": deepseek,
}


def printed_by_script(code: str) -> tuple[str, str]:
    """What a page's script prints on two processes in its layout, and in one."""
    given = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",
    }
    plain = re.sub(r"ParallelConfig\([^)]*\)", "ParallelConfig()", code)
    printed = []
    with tempfile.TemporaryDirectory() as directory:
        for number, text in ((2, code), (1, plain)):
            place = Path(directory) / str(number)
            place.mkdir()
            (place / "train.py").write_text(text)
            line = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc_per_node",
                str(number),
            ]
            run = subprocess.run(
                [*line, "train.py"], cwd=place, env=given, capture_output=True, text=True
            )
            if run.returncode:
                raise SystemExit(run.stderr)
            printed.append(
                "".join(f"{line}\n" for line in run.stdout.splitlines() if line.startswith("step "))
            )
    return printed[0], printed[1]


def printed_by_command(words: list[str], directory: Path, brief: bool) -> str:
    """What ``hfscale`` prints."""
    config = CONFIGS[words[1]]()
    config.dtype = "bfloat16"
    config.save_pretrained(directory / "config")
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        if run_hfscale([words[0], str(directory / "config"), *words[2:]]):
            raise SystemExit(f"hfscale {' '.join(words)}: failed")
    lines = [line.rstrip() for line in text.getvalue().strip().splitlines()]
    if brief:
        return "\n".join(lines[:2])
    return "\n".join(_shortened(lines))


def _shortened(lines: list[str]) -> list[str]:
    """Leave out a plan's parameters, and all but the first rows of tables of layouts."""
    kept: list[str] = []
    rows = 0
    in_plan = False
    for line in lines:
        if line.startswith("parameter "):
            in_plan = True
        elif in_plan and line.startswith(("per rank:", "largest rank:")):
            in_plan = False
            kept += ["..."]
        rows = rows + 1 if " GiB  " in line and line.startswith("  ") else 0
        if not in_plan and rows <= ROWS:
            kept.append(line)
        elif rows == ROWS + 1:
            kept.append("  ...")
    return kept


def filled(page: str, directory: Path) -> str:
    """The page, with everything printed anew."""

    def script(found: re.Match[str]) -> str:
        two, one = printed_by_script(found[1])
        between = found["between"]
        then = found["then"]
        return f"```python\n{found[1]}```\n{between}```\n{two}```\n{then}```\n{one}```"

    def commands(found: re.Match[str]) -> str:
        asked = re.findall(r"(?m)^\$ hfscale ((?:[^\n]*\\\n)*[^\n]*)$", found[1])
        parts = []
        for line in asked:
            words = line.replace("\\\n", " ").split()
            parts.append(
                f"$ hfscale {line}\n{printed_by_command(words, directory, len(asked) > 1)}\n"
            )
        return "```\n" + "".join(parts) + "```"

    return SCRIPT.sub(script, COMMANDS.sub(commands, page), count=1)


def main() -> int:
    """Write the pages, or compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing; exit with 1 where a page is not current",
    )
    parser.add_argument("--only", default="", metavar="WORD", help="pages whose name has this word")
    given = parser.parse_args()
    stale = []
    for page in PAGES:
        if given.only not in page.name:
            continue
        with tempfile.TemporaryDirectory() as directory:
            text = filled(page.read_text(), Path(directory))
        if text != page.read_text():
            stale.append(page.name)
            if not given.check:
                page.write_text(text)
    print(f"{'stale' if given.check else 'written'}: {', '.join(stale) or 'nothing'}")
    return int(given.check and bool(stale))


if __name__ == "__main__":
    raise SystemExit(main())
