"""Tables, figures and the HTML report made from `results.json`.

`comparison_table` for the terminal, `write_report` for one self-contained HTML page, `figure_png` for the README
figure. All three read only the results dict; matplotlib, jinja2 and rich are imported when a function needs them.
"""

from ccq.report.figures import figure_png
from ccq.report.html import write_report
from ccq.report.tables import ComparisonRow, comparison_rows, comparison_table

__all__ = ["ComparisonRow", "comparison_rows", "comparison_table", "figure_png", "write_report"]
