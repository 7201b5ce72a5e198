"""Families whose stream cannot be cut along the sequence, and why; they run tensor-parallel without."""

SEQUENCE_UNFIT: dict[str, str] = {
    "ctrl": "its attention counts tokens before its projections have gathered them",
    "hy_v4": "its layers mix several streams outside of their blocks",
    "openai-gpt": "it gives what its layers return the shape of the whole sequence",
}
