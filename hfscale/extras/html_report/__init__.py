"""Write an estimate, or a search of layouts, as an HTML page with pictures."""

from ...extensions import Extension

EXTENSION = Extension(
    name="html report", reports={"html": "hfscale.extras.html_report.page:page_of"}
)
