"""Write docs/papers.md: the papers that docstrings and comments of hfscale name, and the files that follow them.

python scripts/papers.py [--check]

Reads source files and imports nothing. A paper that is named and has no entry here is an error.
"""

import argparse
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
OUT = ROOT / "docs" / "papers.md"
_NAMED = re.compile(
    r"\b[A-Z][A-Za-z]+(?:-[A-Z][A-Za-z]+)?(?: et al\.| (?:and|&) [A-Z][a-z]+| Team)?,? (?:19|20)\d\d[ab]?\b"
)
_ARXIV = "https://arxiv.org/abs/"
# Topic -> what a docstring says -> authors and year, title, and where it is: an arXiv number or words. The first
# pattern that ends where a citation ends is meant; it may begin up to 40 characters before.
PAPERS: dict[str, dict[str, tuple[str, str, str]]] = {
    "Tensors and sequences": {
        r"Shoeybi et al\. 2019": ("Shoeybi et al. 2019", "Megatron-LM", "1909.08053"),
        r"Korthikanti et al\. 2022": (
            "Korthikanti et al. 2022",
            "Reducing activation recomputation",
            "2205.05198",
        ),
        r"LLaVA, Liu et al\. 2023": (
            "Liu et al. 2023",
            "Visual instruction tuning (LLaVA)",
            "2304.08485",
        ),
        r"Press et al\. 2022": (
            "Press et al. 2022",
            "Train short, test long (ALiBi)",
            "2108.12409",
        ),
        r"Liu et al\. 2023": (
            "Liu et al. 2023",
            "Ring attention with blockwise transformers",
            "2310.01889",
        ),
        r"Brandon et al\. 2023": ("Brandon et al. 2023", "Striped attention", "2311.09431"),
        r"Llama Team 2024": ("Llama Team 2024", "The Llama 3 herd of models", "2407.21783"),
        r"Jacobs et al\. 2023": ("Jacobs et al. 2023", "DeepSpeed Ulysses", "2309.14509"),
        r"Bekman et al\. 2025": (
            "Bekman et al. 2025",
            "Arctic long sequence training (ALST)",
            "2506.13996",
        ),
        r"Fang and Zhao 2024": (
            "Fang and Zhao 2024",
            "USP: a unified sequence parallelism approach",
            "2405.07719",
        ),
        r"Dao et al\. 2022": ("Dao et al. 2022", "FlashAttention", "2205.14135"),
        r"Dao 2023": ("Dao 2023", "FlashAttention-2", "2307.08691"),
        r"Milakov and Gimelshein 2018": (
            "Milakov and Gimelshein 2018",
            "Online normalizer for softmax",
            "1805.02867",
        ),
        r"Xiao et al\. 2024": (
            "Xiao et al. 2024",
            "Streaming language models with attention sinks",
            "2309.17453",
        ),
        r"Gemma Team 2024": ("Gemma Team 2024", "Gemma 2", "2408.00118"),
        r"Peng et al\. 2023": ("Peng et al. 2023", "YaRN", "2309.00071"),
        r"Ding et al\. 2024": ("Ding et al. 2024", "LongRoPE", "2402.13753"),
        r"Shazeer 2019": ("Shazeer 2019", "One write-head is all you need", "1911.02150"),
        r"Ainslie et al\. 2023": (
            "Ainslie et al. 2023",
            "GQA: grouped-query attention",
            "2305.13245",
        ),
        r"Raffel et al\. 2020": ("Raffel et al. 2020", "T5, with relative positions", "1910.10683"),
        r"Meng et al\. 2024, DeepStack": ("Meng et al. 2024", "DeepStack", "2406.04334"),
        r"Fan et al\. 2019": ("Fan et al. 2019", "LayerDrop", "1909.11556"),
    },
    "Pipelines": {
        r"Huang et al\. 2019": ("Huang et al. 2019", "GPipe", "1811.06965"),
        r"Narayanan et al\. 2019": ("Narayanan et al. 2019", "PipeDream", "SOSP 2019"),
        r"Narayanan et al\. 2021a|2BW \(Narayanan et al\. 2021": (
            "Narayanan et al. 2021a",
            "Memory-efficient pipeline-parallel training (PipeDream-2BW)",
            "2006.09503",
        ),
        r"Narayanan et al\. 2021": (
            "Narayanan et al. 2021b",
            "Training on GPU clusters with PTD-P",
            "2104.04473",
        ),
        r"Lamy-Poirier 2023": (
            "Lamy-Poirier 2023",
            "Breadth-first pipeline parallelism",
            "2211.05953",
        ),
        r"Qi et al\. 2023": ("Qi et al. 2023", "Zero bubble pipeline parallelism", "2401.10241"),
        r"DeepSeek 2025": ("DeepSeek 2025", "DualPipe", "github.com/deepseek-ai/DualPipe"),
    },
    "Data": {
        r"Rajbhandari et al\. 2020": ("Rajbhandari et al. 2020", "ZeRO", "1910.02054"),
        r"Zhao et al\. 2023": ("Zhao et al. 2023", "PyTorch FSDP", "2304.11277"),
        r"Ren et al\. 2021": ("Ren et al. 2021", "ZeRO-Offload", "2101.06840"),
        r"Vogels et al\. 2019": ("Vogels et al. 2019", "PowerSGD", "1905.13727"),
        r"Ramesh et al\. 2021": (
            "Ramesh et al. 2021",
            "Zero-shot text-to-image generation (DALL-E)",
            "2102.12092",
        ),
        r"Goyal et al\. 2017": ("Goyal et al. 2017", "Accurate, large minibatch SGD", "1706.02677"),
        r"Granziol et al\. 2022": (
            "Granziol et al. 2022",
            "Learning rates as a function of batch size",
            "2006.09092",
        ),
    },
    "Mixtures of experts": {
        r"Shazeer et al\. 2017": (
            "Shazeer et al. 2017",
            "The sparsely-gated mixture-of-experts layer",
            "1701.06538",
        ),
        r"Lepikhin et al\. 2020": ("Lepikhin et al. 2020", "GShard", "2006.16668"),
        r"Fedus et al\. 2021": ("Fedus et al. 2021", "Switch transformers", "2101.03961"),
        r"Riquelme et al\. 2021": (
            "Riquelme et al. 2021",
            "Scaling vision with sparse mixtures",
            "2106.05974",
        ),
        r"Zoph et al\. 2022": ("Zoph et al. 2022", "ST-MoE", "2202.08906"),
        r"Wang et al\. 2024": (
            "Wang et al. 2024",
            "Auxiliary-loss-free load balancing",
            "2408.15664",
        ),
        r"DeepSeek-AI 2024": ("DeepSeek-AI 2024", "DeepSeek-V3", "2412.19437"),
        r"Ma et al\. 2025": (
            "Ma et al. 2025",
            "Aligning training and inference routers",
            "2510.11370",
        ),
        r"Komatsuzaki et al\. 2023": ("Komatsuzaki et al. 2023", "Sparse upcycling", "2212.05055"),
        r"Nakamura et al\. 2025": ("Nakamura et al. 2025", "Drop-upcycling", "2502.19261"),
    },
    "Adapters and quantization": {
        r"Hu et al\. 2021": ("Hu et al. 2021", "LoRA", "2106.09685"),
        r"Liu et al\. 2024": ("Liu et al. 2024", "DoRA", "2402.09353"),
        r"Kopiczko et al\. 2023": ("Kopiczko et al. 2023", "VeRA", "2310.11454"),
        r"Liu et al\. 2022": (
            "Liu et al. 2022",
            "IA3, in few-shot parameter-efficient fine-tuning",
            "2205.05638",
        ),
        r"Hyeon-Woo et al\. 2021": ("Hyeon-Woo et al. 2021", "FedPara (LoHa)", "2108.06098"),
        r"Lester et al\. 2021": ("Lester et al. 2021", "Prompt tuning", "2104.08691"),
        r"Liu et al\. 2021": ("Liu et al. 2021", "P-tuning", "2103.10385"),
        r"Li and Liang 2021": ("Li and Liang 2021", "Prefix-Tuning", "2101.00190"),
        r"Liao and Monz 2024": ("Liao and Monz 2024", "RoAd", "2409.00119"),
        r"PiSSA, Meng et al\. 2024": ("Meng et al. 2024", "PiSSA", "2404.02948"),
        r"Buyukakyuz 2024": ("Buyukakyuz 2024", "OLoRA", "2406.01775"),
        r"Dettmers et al\. 2023": ("Dettmers et al. 2023", "QLoRA", "2305.14314"),
        r"LLM\.int8\(\), Dettmers et al\. 2022": (
            "Dettmers et al. 2022",
            "LLM.int8()",
            "2208.07339",
        ),
    },
    "Precision, memory and kernels": {
        r"Micikevicius et al\. 2018": (
            "Micikevicius et al. 2018",
            "Mixed precision training",
            "1710.03740",
        ),
        r"Micikevicius et al\. 2022": (
            "Micikevicius et al. 2022",
            "FP8 formats for deep learning",
            "2209.05433",
        ),
        r"Gupta et al\. 2015": (
            "Gupta et al. 2015",
            "Limited numerical precision (stochastic rounding)",
            "1502.02551",
        ),
        r"Steele et al\. 2014": (
            "Steele et al. 2014",
            "Splittable pseudorandom number generators",
            "OOPSLA 2014",
        ),
        r"Chen et al\. 2016": (
            "Chen et al. 2016",
            "Training with sublinear memory cost",
            "1604.06174",
        ),
        r"Jain et al\. 2018": ("Jain et al. 2018", "Gist: efficient data encoding", "ISCA 2018"),
        r"Chakrabarti and Moseley 2019": (
            "Chakrabarti and Moseley 2019",
            "Backprop with approximate activations",
            "1901.07988",
        ),
        r"Hsu et al\. 2024": ("Hsu et al. 2024", "Liger Kernel", "2410.10989"),
        r"Ansel et al\. 2024": ("Ansel et al. 2024", "PyTorch 2", "ASPLOS 2024"),
    },
    "Optimizers": {
        r"Dettmers et al\. 2022": (
            "Dettmers et al. 2022",
            "8-bit optimizers, block-wise quantization",
            "2110.02861",
        ),
        r"Shazeer (?:and|&) Stern 2018": ("Shazeer and Stern 2018", "Adafactor", "1804.04235"),
        r"Jordan et al\. 2024": ("Jordan et al. 2024", "Muon", "kellerjordan.github.io/posts/muon"),
        r"Kimi Team 2025": (
            "Kimi Team 2025",
            "Kimi K2: open agentic intelligence (MuonClip)",
            "2507.20534",
        ),
        r"Pagliardini et al\. 2024": ("Pagliardini et al. 2024", "AdEMAMix", "2409.03137"),
        r"Graham 1969": (
            "Graham 1969",
            "Bounds on multiprocessing timing anomalies",
            "doi.org/10.1137/0117039",
        ),
    },
    "Losses and estimates": {
        r"Szegedy et al\. 2016": (
            "Szegedy et al. 2016",
            "Label smoothing, in Rethinking Inception",
            "1512.00567",
        ),
        r"Agarwal et al\. 2024": (
            "Agarwal et al. 2024",
            "On-policy distillation of language models",
            "2306.13649",
        ),
        r"Bradley and Terry 1952": (
            "Bradley and Terry 1952",
            "Rank analysis of block designs",
            "Biometrika",
        ),
        r"Ouyang et al\. 2022": ("Ouyang et al. 2022", "InstructGPT", "2203.02155"),
        r"Chowdhery et al\. 2022": (
            "Chowdhery et al. 2022",
            "PaLM (model FLOPs utilization)",
            "2204.02311",
        ),
        r"Rajpurkar et al\. 2016": (
            "Rajpurkar et al. 2016",
            "SQuAD (exact match, F1)",
            "1606.05250",
        ),
        r"Tazi et al\. 2025": (
            "Tazi et al. 2025",
            "The ultra-scale playbook",
            "huggingface.co/spaces/nanotron",
        ),
    },
}
HEAD = """# Papers

This list has the papers that docstrings and comments of the package name, each with the files that follow its method.
It is written by `scripts/papers.py`.
"""


def named() -> dict[tuple[str, str], set[str]]:
    """(Topic, pattern) -> the files that name that paper."""
    found: dict[tuple[str, str], set[str]] = defaultdict(set)
    known = [(topic, pattern) for topic, papers in PAPERS.items() for pattern in papers]
    for path in sorted((ROOT / "hfscale").rglob("*.py")):
        text = re.sub(r"\s+(?:# )?", " ", path.read_text())
        for place in _NAMED.finditer(text):
            near = text[max(place.start() - 40, 0) : place.end() + 14]
            meant = [
                each
                for each in known
                if any(_meant(hit, near, place) for hit in re.finditer(each[1], near))
            ]
            if not meant:
                raise SystemExit(
                    f"{path.relative_to(ROOT)}: {place[0]!r} has no entry in {Path(__file__).name}"
                )
            found[meant[0]].add(str(path.relative_to(ROOT / "hfscale")))
    return found


def _meant(hit: re.Match[str], near: str, place: re.Match[str]) -> bool:
    """Whether a pattern's hit covers the citation itself, not one before it."""
    end = min(place.start(), 40) + len(place[0])
    return hit.start() < end <= hit.end() + 1


def page() -> str:
    """The whole page."""
    found = named()
    parts = [HEAD]
    for topic, papers in PAPERS.items():
        parts.append(f"## {topic}\n\n| paper | in |\n|---|---|")
        for pattern, (authors, title, where) in papers.items():
            files = sorted(found.get((topic, pattern), ()))
            if not files:
                raise SystemExit(f"no file names {authors}, {title}")
            is_number = re.fullmatch(r"\d{4}\.\d{5}", where)
            link = f"[{where}]({_ARXIV}{where})" if is_number else where
            parts.append(
                f"| {authors}: {title} ({link}) | {', '.join(f'`{file}`' for file in files)} |"
            )
        parts.append("")
    return "\n".join(parts)


def main() -> int:
    """Write it, or compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 where it is not current"
    )
    if parser.parse_args().check:
        return int(page() != OUT.read_text())
    OUT.write_text(page())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
