"""What is on an HTML page, for tests of what a report says and refers to."""

from __future__ import annotations

from html.parser import HTMLParser


class Page(HTMLParser):
    """Text, table rows, and every tag, attribute and style of a page whose elements are all closed."""

    VOID = frozenset({"meta", "br", "link", "img", "hr", "input"})

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.text = ""
        self.styles = ""
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.rows: list[list[str]] = []
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert self._open == [], "every element is closed"

    @property
    def targets(self) -> list[tuple[str, str]]:
        """(tag, value) of everything that the page would load or lead to."""
        names = ("src", "href", "xlink:href", "srcset", "data", "action", "poster")
        return [(tag, value) for tag, name, value in self.attributes if name in names]

    @property
    def loaders(self) -> set[str]:
        """The tags it has that load something or run it."""
        return {"script", "link", "img", "iframe", "object", "embed", "base", "image"} & set(self.tags)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in self.VOID:
            self._open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" in self._open:
            self.styles += data
            return
        self.text += data.replace("\N{NO-BREAK SPACE}", " ")
        if {"td", "th"} & set(self._open):
            self.rows[-1][-1] += (" " if {"small", "sup"} & set(self._open) else "") + data.strip()
