"""What the command line shows of the vendor packages, without their devices and libraries."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from m3hal.cli import main
from m3hal.dispatch.names import LEVEL_WORDS

NORMS = {"rms_norm", "add_rms_norm"}
MATRIX = {
    "cuda:sm_90": ("nvidia", NORMS),
    "cuda:sm_100": ("nvidia", NORMS | {"topk_blocks"}),
    "cuda:sm_103": ("nvidia", NORMS | {"topk_blocks"}),
    "cuda:sm_107": ("nvidia", NORMS | {"topk_blocks"}),
    "hip:gfx942": ("amd", {"route_topk"}),
    "hip:gfx950": ("amd", NORMS | {"route_topk"}),
    "hpu:gaudi2": ("gaudi", NORMS | {"rope_partial"}),
}
#: where another backend has claims, so that auto takes that one unless they are stale
PROVED = ("cuda:sm_90",)


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = main(list(arguments))
    return code, capsys.readouterr().out


@pytest.mark.parametrize("device", MATRIX)
def test_what_each_device_would_run(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Which operators, by which function of the library, proved how far; why not more; auto takes none of it."""
    backend, operators = MATRIX[device]
    code, text = shown(capsys, "explain", "--device", device)
    own = json.loads(shown(capsys, "explain", "--device", device, "--json")[1])["in_tree"]
    assert code == (3 if own else 0)
    assert own or device in PROVED, "nothing that has not run on hardware is taken unasked"
    rows = [line.split() for line in text.splitlines() if LEVEL_WORDS["contract"] in line]
    assert {row[1] for row in rows if row[0] == backend} == operators
    assert f"{backend} does not run sparse_attention at sparse_attention: " in text
    assert f"{backend} has nothing for " in text
    _, data = shown(capsys, "explain", "--device", device, "--json")
    offers: list[dict[str, Any]] = json.loads(data)["offers"]
    served = {offer["operator"]: offer["level"] for offer in offers if offer["impl"] and offer["backend"] == backend}
    assert served == dict.fromkeys(operators, "contract")
    refused = [o for o in offers if o["backend"] == backend and not o["impl"] and o["reason"]]
    assert len(refused) >= 3


def test_why_not_here(capsys: pytest.CaptureFixture[str]) -> None:
    """A function that its library has for other devices, and one that is withheld, say so."""
    _, text = shown(capsys, "explain", "--device", "cuda:sm_90")
    assert "it runs on cuda:sm_100, cuda:sm_103, cuda:sm_107; not on cuda:sm_90" in text
    assert "leaves NaN keys out of its maximum" in text
    code, text = shown(capsys, "explain", "block_scores", "--device", "cuda:sm_90", "--backend", "nvidia,reference")
    assert code == 0
    assert "block_scores at sparse_attention: reference" in text
    assert "nvidia withholds block_scores: every scorer of FlashInfer 0.7.4 leaves NaN keys out" in text


def test_asking_by_name_tells_what_is_withheld(capsys: pytest.CaptureFixture[str]) -> None:
    """A backend asked for alone is refused with its reasons for not offering what its library has."""
    assert main(["explain", "--device", "hpu:gaudi2", "--backend", "gaudi"]) != 0
    assert "it withholds moe_experts: torch.ops.hpu.mixture_of_experts has no adapter yet" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["backends", "--device", "hip:gfx950"], ["doctor"]])
def test_library_versions_and_ranges(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Installed versions stand beside the ranges that a manifest declares."""
    _, text = shown(capsys, *command)
    assert re.search(r"amd-aiter \S+ \(>=0\.1\.18,<0\.2\)", text)
    assert re.search(r"torch \d\S+ \(>=2\.9\), flashinfer-python \S+ \(>=0\.7\.4,<0\.8\)", text)
    _, data = shown(capsys, *command, "--json")
    amd = next(row for row in json.loads(data)["backends"] if row["name"] == "amd")
    assert [(row["name"], row["wanted"]) for row in amd["libraries"]] == [
        ("torch", ">=2.9"),
        ("amd-aiter", ">=0.1.18,<0.2"),
    ]
