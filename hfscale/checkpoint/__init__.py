"""Load, save and resume: each rank reads its shards from a Hugging Face checkpoint, and rank 0 writes a plain one."""

from .checksums import verify_experts
from .foreign_optimizer import load_optimizer
from .load import load_pretrained
from .save import save_pretrained
from .state import SaveCheck, check_save, load_state, save_state, wait_for_saves
from .stream import stream_weights
