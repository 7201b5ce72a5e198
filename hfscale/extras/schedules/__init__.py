"""Show pipeline schedules: draw them in the terminal or as a picture, and record how the steps of a run went."""

from ...extensions import Extension

EXTENSION = Extension(
    name="schedules",
    exports={"record_schedule": "hfscale.extras.schedules.record:record_schedule"},
    commands={"schedule": "hfscale.extras.schedules.command"},
)
