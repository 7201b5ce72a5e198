"""List families whose checkpoints several ranks cannot write together, and why; one process can train and save them."""

UNWRITABLE: dict[str, str] = {
    "hrm_text": "checkpoints that hold several projections as one, which this version cannot write"
}
