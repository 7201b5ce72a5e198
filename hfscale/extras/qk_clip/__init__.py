"""QK-clip (Kimi Team 2025): an option of Muon that scales down queries and keys if attention scores grow too large."""

from ...extensions import Extension

EXTENSION = Extension(
    name="qk-clip",
    optimizer_options={"qk_clip": "hfscale.extras.qk_clip.clip:OPTION"},
    proofs={"score scaling": "hfscale.extras.qk_clip.score_scaling:prove_score_scaling"},
)
