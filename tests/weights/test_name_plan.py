"""Name plans: what they say, and that the shipped ones agree with what is published of the real checkpoints.

Seen red: a range without its last number; E2B and E4B without the keys and values that nobody reads.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from outrider.errors import WeightsError
from outrider.weights.layouts import Header
from outrider.weights.name_plan import expand_name, read_name_plan
from tests.plans import PLANS, plan_path

PLAN: dict[str, Any] = {
    "schema": 1,
    "checkpoint": "owner/name",
    "evidence": "derived",
    "sources": ["a test"],
    "num_parameters": None,
    "tensors": {"layers.{0-1}.norm.weight": ["BF16", [4]]},
}


def write_plan(folder: Path, **change: Any) -> Path:
    (folder / "tensors.json").write_text(json.dumps({**PLAN, **change}))
    return folder


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("norm.weight", ["norm.weight"]),
        ("l.{0-2}.w", ["l.0.w", "l.1.w", "l.2.w"]),
        ("l.{7}.w", ["l.7.w"]),
        ("l.{0,3-4}.e.{8-9}", ["l.0.e.8", "l.0.e.9", "l.3.e.8", "l.3.e.9", "l.4.e.8", "l.4.e.9"]),
    ],
)
def test_names_written_together(pattern: str, names: list[str]) -> None:
    assert list(expand_name(pattern, source=Path("p"))) == names


@pytest.mark.parametrize("pattern", ["l.{}.w", "l.{a}.w", "l.{0-}.w", "l.{0", "l.0}", "l.{{0}}", "l.{0,}", "l.{00000}"])
def test_braces_that_hold_no_numbers_are_named(pattern: str) -> None:
    with pytest.raises(WeightsError, match=r"braces hold numbers or ranges"):
        list(expand_name(pattern, source=Path("p")))


def test_a_plan_is_headers(tmp_path: Path) -> None:
    plan = read_name_plan(write_plan(tmp_path, num_parameters=8))
    header = Header(tmp_path / "tensors.json", "BF16", (4,))
    assert plan.headers == {"layers.0.norm.weight": header, "layers.1.norm.weight": header}
    assert (plan.checkpoint, plan.evidence, plan.sources) == ("owner/name", "derived", ("a test",))
    assert plan.num_parameters == 8
    assert header.num_bytes == 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 2}, r"schema=2"),
        ({"evidence": "guessed"}, r"evidence='guessed'; expected one of read, derived"),
        ({"checkpoint": 3}, r"checkpoint=3"),
        ({"sources": "me"}, r"sources='me'"),
        ({"num_parameters": 0}, r"num_parameters=0"),
        ({"tensors": {}}, r"has no tensors"),
        ({"tensors": ["a"]}, r"has no tensors"),
        ({"tensors": {"a.{0-2}": ["F8", [4]]}}, r"'a\.\{0-2\}': \['F8', \[4\]\]; expected dtype and shape"),
        ({"tensors": {"a": [["BF16"], [4]]}}, r"expected dtype and shape"),
        ({"tensors": {"a": ["BF16", [-1]]}}, r"expected dtype and shape"),
        ({"tensors": {"a": ["BF16", 4]}}, r"expected dtype and shape"),
        ({"tensors": {"a": ["BF16"]}}, r"expected dtype and shape"),
        ({"tensors": {"a.{0-2}": ["BF16", [4]], "a.{2-3}": ["BF16", [4]]}}, r"lists tensor a\.2 twice"),
        ({"tensors": {"a.{0,0}": ["BF16", [4]]}}, r"lists tensor a\.0 twice"),
        ({"tensors": {"a.{3-2}": ["BF16", [4]]}}, r"has an empty range in 'a\.\{3-2\}'"),
        ({"tensors": {"a.{0-9999}.{0-9999}.{0-9999}": ["BF16", [4]]}}, r"lists more than 200000 tensors"),
        ({"tensors": {"a": ["BF16", [10**30]]}}, r"'a' of shape \[10+\]; no tensor has so many numbers"),
        ({"tensors": {"a": ["BF16", [2**62, 2**62]]}}, r"no tensor has so many numbers"),
        ({"tensors": {"a": ["BF16", [2**63, 0]]}}, r"no tensor has so many numbers"),
    ],
)
def test_a_malformed_plan_is_refused_by_name(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=rf"tensors\.json.*{message}"):
        read_name_plan(write_plan(tmp_path, **change))


PUBLISHED_PARAMETERS = {
    "gemma-4-31B-it": 31_273_088_876,
    "gemma-4-26B-A4B-it": 25_805_936_206,
    "gemma-4-12B-it": 11_959_730_224,
    "gemma-4-E4B-it": 7_996_156_490,
    "gemma-4-E2B-it": 5_123_178_051,
}


@pytest.mark.parametrize("name", PUBLISHED_PARAMETERS)
def test_parameters_are_the_published_number(name: str) -> None:
    """formats.md §1.2. The hub counts nothing for a tensor of shape [], as the 928 bounds of clipped linears are."""
    plan = read_name_plan(plan_path(name))
    assert plan.num_parameters == PUBLISHED_PARAMETERS[name]
    assert sum(math.prod(header.shape) for header in plan.headers.values() if header.shape) == plan.num_parameters


def test_the_small_drafter_has_the_size_of_the_published_file() -> None:
    """formats.md §2.2, to the byte: the header as the safetensors library writes it, padded to eight bytes."""
    headers = read_name_plan(plan_path("gemma-4-26B-A4B-it-DFlash")).headers
    written: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, header in sorted(headers.items()):
        start, end = end, end + header.num_bytes
        written[name] = {"dtype": header.dtype, "shape": list(header.shape), "data_offsets": [start, end]}
    header_bytes = -(-len(json.dumps(written, separators=(",", ":"))) // 8) * 8
    assert 8 + header_bytes + end == 859_384_328


def test_numbers_of_tensors_and_bytes_are_the_published_ones() -> None:
    """E4B's file holds 2130 tensors; the NVFP4 31B's text decoder 1372 of 31,481,767,960 bytes; z-lab's drafters 58."""
    assert len(read_name_plan(plan_path("gemma-4-E4B-it")).headers) == 2130
    nvfp4 = read_name_plan(plan_path("Gemma-4-31B-IT-NVFP4")).headers
    text = [header for name, header in nvfp4.items() if "vision" not in name]
    assert (len(text), sum(header.num_bytes for header in text)) == (1372, 31_481_767_960)
    assert len(read_name_plan(plan_path("gemma-4-31B-it-DFlash")).headers) == 58
    assert len(read_name_plan(plan_path("dspark_gemma4_12b_block7")).headers) == 74


def test_only_what_was_read_says_so() -> None:
    read = {name for name in PLANS if read_name_plan(plan_path(name)).evidence == "read"}
    assert read == {"gemma-4-31B-it-DFlash", "gemma-4-26B-A4B-it-DFlash", "dspark_gemma4_12b_block7"}
    assert all(read_name_plan(plan_path(name)).sources for name in PLANS)
