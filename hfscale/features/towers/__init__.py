"""Plan what a model has beside its text: towers of pictures and sounds."""
