"""What a self-contained page must be: closed elements, each address a place on the page."""

from __future__ import annotations

from html.parser import HTMLParser

VOID = {"meta", "br", "link"}
ADDRESSES = {"href", "src", "srcset", "action", "data", "poster", "xlink:href"}


class Checked(HTMLParser):
    """Collects text, identifiers and faults of a page."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.faults: list[str] = []
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.words: list[str] = []
        self.num_of: dict[str, int] = {}
        self.feed(text)
        self.close()
        self.faults += [f"{tag} stays open" for tag in self.open]
        self.faults += [f"{place} leads nowhere" for place in self.addresses if place.removeprefix("#") not in self.ids]
        self.faults += [f"id {name} twice" for name in set(self.ids) if self.ids.count(name) > 1]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._note(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._note(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.faults.append(f"</{tag}> at {self.getpos()} closes nothing")

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def _note(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.num_of[tag] = self.num_of.get(tag, 0) + 1
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ADDRESSES:
                self.addresses.append(value or "")

    @property
    def text(self) -> str:
        """All text of the page, its style included."""
        return "\n".join(self.words)
