"""T-036: the playground's event reader gives the same events however their bytes are cut."""

from __future__ import annotations

import json
from pathlib import Path

from tests.browser import browse, needs_browser

READER = Path(__file__).resolve().parents[2] / "src" / "outrider" / "server" / "static" / "events.js"
PAYLOADS = ['{"a":1}', '{"text":"🙂 삼"}', '{"b":"x\\ny"}', "{}", '{"c":3}', '{"d":4}']
ALL_CUTS = """(text => {
  const bytes = new TextEncoder().encode(text), results = new Set();
  const note = events => results.add(JSON.stringify(events));
  for (let cut = 0; cut <= bytes.length; cut++) {
    const reader = new EventReader();
    note([...reader.push(bytes.slice(0, cut)), ...reader.push(bytes.slice(cut)), ...reader.finish()]);
  }
  const single = new EventReader();
  note([...[...bytes].flatMap(byte => single.push(Uint8Array.of(byte))), ...single.finish()]);
  return [...results].map(each => JSON.parse(each));
})"""


@needs_browser
def test_no_cut_loses_or_changes_an_event(tmp_path: Path) -> None:
    blocks = [f"data: {payload}\n\n" for payload in PAYLOADS]
    stream = blocks[0] + ": ping\n\n" + blocks[1].replace("\n", "\r\n") + "".join(blocks[2:]) + "data: [DONE]"
    with browse("about:blank", tmp_path) as page:
        page.evaluate(READER.read_text(encoding="utf-8") + "\nglobalThis.EventReader = EventReader; 0")
        assert page.evaluate(f"{ALL_CUTS}({json.dumps(stream)})") == [[*PAYLOADS, "[DONE]"]]
