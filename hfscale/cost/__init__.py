"""What a run costs, in bytes and seconds: one model of memory, one of time, and what is asked of them."""
