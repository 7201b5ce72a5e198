import sys
from pathlib import Path

# The launched scripts import their shared modules from beside themselves.
sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
