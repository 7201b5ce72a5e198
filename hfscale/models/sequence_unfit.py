"""List families whose hidden states cannot be cut along the sequence, and why; they run tensor-parallel without."""

SEQUENCE_UNFIT: dict[str, str] = {
    "albert": "its attention counts tokens before its projections have gathered them",
    "axk1": "its mixture gives its output the shape of the whole sequence",
    "ctrl": "its attention counts tokens before its projections have gathered them",
    "deberta-v2": "its relative positions are learned outside of its layers",
    "gemma3n": "its layers add inputs of their own for every token",
    "gemma3n_text": "its layers add inputs of their own for every token",
    "gemma4": "its layers add inputs of their own for every token",
    "gemma4_text": "its layers add inputs of their own for every token",
    "openai-gpt": "it gives what its layers return the shape of the whole sequence",
}
