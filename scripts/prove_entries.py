"""Prove the entries of hfscale's own table with the installed transformers, and note it in hfscale/models/sources.json.

    python scripts/prove_entries.py [--only codegen gptj] [--accept clip vit]

Two tensor ranks of a tiny clone must compute the same as one process, in float64. With a source that is not written
there, a plan does the same proof. An entry that no clone can tell of is written where it is named behind ``--accept``,
once ``scripts/family_sweep.py`` or ``scripts/class_sweep.py`` has found it equal with this transformers. The exit
status is 1 where an entry does not hold.
"""

import argparse
import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from family_clones import OTHERS
from tqdm import tqdm
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hfscale.extras.proofs.infer.search_blueprint import prove_holds
from hfscale.models import FAMILIES
from hfscale.models.class_source import SOURCES, short_hash

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.families import config_of

# Classes of no auto class
_OWN = {"mllama_text_model": "MllamaForCausalLM", "siglip_text_model": "SiglipTextModel"}


def models_of(family: str) -> Iterator[Any]:
    """Models of a family without memory, as far as this transformers has them."""
    others = [kind for name, kind, *_ in OTHERS if name == family]
    builders = [getattr(kind, "from_config", kind) for kind in others]
    if family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        builders.insert(0, AutoModelForCausalLM.from_config)
    if family in _OWN:
        builders.append(getattr(transformers, _OWN[family]))
    for build in (*builders, AutoModel.from_config):
        for make_config in (AutoConfig.for_model, config_of):
            try:
                with torch.device("meta"):
                    yield build(make_config(family))
            except (
                Exception
            ):  # whatever stock code says of a class or a config that it does not have
                continue


def proved(family: str) -> tuple[str | None, str]:
    """Why an entry does not hold (``None``: nothing tells), and its source, empty where there is no model."""
    source = ""
    for model in models_of(family):
        source = short_hash(type(model))
        objection, _ = prove_holds(model, FAMILIES[family])
        if objection is not None:
            return objection, source
    return None, source


def main() -> int:
    """Add to the table; the exit status is 1 where an entry does not hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--accept", nargs="*", default=[])
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    table = json.loads(SOURCES.read_text()) if SOURCES.exists() else {}
    wrong = []
    untold = []
    for family in tqdm(arguments.only or sorted(FAMILIES), desc="entries"):
        objection, source = proved(family)
        if objection:
            wrong.append(f"{family}: {objection}")
        elif source and objection is None and family not in arguments.accept:
            untold.append(family)
        elif source:
            table[family] = sorted({*table.get(family, ()), source})
    lines = [f" {json.dumps(family)}: {json.dumps(table[family])}" for family in sorted(table)]
    SOURCES.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print("\n".join(wrong) or f"transformers {transformers.__version__}: no entry is wrong")
    print(f"no clone tells: {' '.join(untold)}")
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
