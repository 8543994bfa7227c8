"""Self-contained HTML pages, filled from the templates beside this module. They need no network and no script."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from typing import Any

from ccq.report.figures import Figure, swatch


def render_page(template: str, figures: Sequence[Figure], **values: Any) -> str:
    """The page as text; equal values give equal text.

    Args:
        template: a file of this package. It is given the style sheet as `style` too; in it the filter `unbroken` keeps
            "95 %" on one line, `moment` makes an ISO 8601 time in UTC readable, and `swatch` draws the `ArmStyle` of an
            arm.
        figures: drawn by our own code, in which matplotlib has escaped every string; they go into the page as they are.
        values: everything else that the template names. Text is escaped.
    """
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["unbroken"] = lambda text: text.replace(" %", "\N{NO-BREAK SPACE}%")
    environment.filters["moment"] = lambda time: time.replace("T", " ").replace("+00:00", " UTC")
    environment.filters["swatch"] = lambda style: Markup(swatch(style))
    folder = resources.files("ccq.report")
    return environment.from_string(folder.joinpath(template).read_text(encoding="utf-8")).render(
        figures=[{**figure._asdict(), "panels": [Markup(panel) for panel in figure.panels]} for figure in figures],
        style=Markup(folder.joinpath("style.css").read_text(encoding="utf-8")),
        **values,
    )
