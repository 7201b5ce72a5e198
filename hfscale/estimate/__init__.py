"""What a plan costs: bytes by kind, and seconds of a step by what they go to. Nothing runs."""
