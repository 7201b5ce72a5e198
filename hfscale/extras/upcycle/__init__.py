"""Turn a dense checkpoint into a mixture of experts that computes the same (sparse upcycling, drop-upcycling)."""

from ...extensions import Extension

EXTENSION = Extension(
    name="upcycle",
    exports={"upcycle": "hfscale.extras.upcycle.upcycle:upcycle"},
    commands={"upcycle": "hfscale.extras.upcycle.command"},
)
