"""What a run would stumble over, found before it starts: of this machine, and of a recipe."""
