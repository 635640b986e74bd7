"""FlashInfer's published wheel, unpacked and not imported: its signatures, and its own references beside the double's.

``python scripts/vendor_wheels.py`` fetches it into ``.cache/wheels``; `make test-all` does that first.
"""

from __future__ import annotations

import ast
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from m3hal_conformance.doubles import standing_in, verdicts

from m3hal.dispatch import Symbol, symbols
from m3hal.dispatch.versions import satisfies

from .conftest import DOUBLE

WHEELS = sorted((Path(__file__).parents[3] / ".cache" / "wheels").glob("flashinfer_python-*.whl"))
pytestmark = pytest.mark.skipif(not WHEELS, reason="no FlashInfer wheel; run python scripts/vendor_wheels.py")


@pytest.fixture(scope="module", params=WHEELS, ids=lambda path: path.name.split("-")[1])
def wheel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The wheel's Python sources of what the adapters call, importable by name."""
    folder = tmp_path_factory.mktemp("flashinfer")
    wanted = (
        *("flashinfer/norm/", "flashinfer/msa_ops/", "flashinfer/trace/", "flashinfer/__init__.py"),
        *("flashinfer/experimental/cake_msa_icp_indexer/", "flashinfer/data/csrc/cake_hopper_msa/"),
    )
    with zipfile.ZipFile(request.param) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if name.startswith(wanted)])
    with standing_in(folder, "flashinfer", "m3hal_nvidia"):
        yield folder


def reference(wheel: Path, table: str, name: str) -> Any:
    """One of FlashInfer's references: self-contained functions of torch in the tables that it documents itself with."""
    tree = ast.parse((wheel / "flashinfer" / "trace" / "templates" / f"{table}.py").read_text())
    function = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)
    function.decorator_list = []
    namespace: dict[str, Any] = {"torch": torch}
    exec(compile(ast.unparse(function), table, "exec"), namespace)
    return namespace[name]


def test_signatures_are_as_recorded(wheel: Path) -> None:
    """Every function that an adapter calls takes what was recorded, in the layout that was recorded."""
    from m3hal_nvidia import recorded
    from m3hal_nvidia.manifest import MANIFEST

    found = [value for value in vars(recorded).values() if isinstance(value, Symbol)]
    called = {symbol.path for impls in MANIFEST.operators.values() for impl in impls for symbol in impl.calls}
    assert {symbol.path for symbol in found} == called
    assert {symbol.path: symbols.difference(symbol) for symbol in found} == dict.fromkeys(called)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("msa_ops/cute_dsl/proxy_score_decode_bf16_sm90.py", "best0 = cute.arch.fmax("),
        ("msa_ops/cute_dsl/proxy_score_decode_sm90.py", "v = cutlass.max(v, a"),
        ("msa_ops/cute_dsl/proxy_score_prefill_sm90.py", ".reduce(cute.ReductionOp.MAX"),
        ("data/csrc/cake_hopper_msa/cake_hopper_msa_e9f9ae0d08ebbf603198_kernel.cu", "= fmaxf(cm[0], fmaxf("),
        ("experimental/cake_msa_icp_indexer/cake_backend.py", "(no scale, NaN ignored,"),
        ("msa_ops/proxy_score.py", '"msa_proxy_score requires SM90, SM120 or SM121'),
        ("msa_ops/_sm90_dispatch.py", '"SM90 proxy-score prefill requires an fp8 e4m3 index cache'),
        ("msa_ops/_sm90_dispatch.py", "and batch_size * max_seqlen_q == total_q"),
        ("msa_ops/cake_icp_indexer.py", "float8_e4m3fn ``[T, 4, 128]``"),
        ("msa_ops/cake_icp_indexer.py", "This rank and the group size (2 or 4)"),
    ],
)
def test_what_is_withheld_is_withheld_for_reasons_that_hold(wheel: Path, file: str, text: str) -> None:
    """The scorers drop NaN, and have the devices, formats and ranks that the manifest's reason says."""
    assert text in (wheel / "flashinfer" / file).read_text(), "read it again; block_scores may have become possible"


def test_version_is_in_the_declared_range(wheel: Path, request: pytest.FixtureRequest) -> None:
    """What scripts/vendor_wheels.py fetches is what the manifest asks for."""
    from m3hal_nvidia.manifest import MANIFEST

    version = request.node.callspec.params["wheel"].name.split("-")[1]
    assert satisfies(version, MANIFEST.libraries["flashinfer-python"])


@pytest.mark.parametrize("operator", ["rms_norm", "add_rms_norm", "topk_blocks"])
def test_plans_accept_the_real_library(wheel: Path, operator: str) -> None:
    """With the wheel's sources in the environment, planning for a B200 accepts the adapters."""
    kind = "sparse_attention"
    assert any(verdict.accepted for verdict in verdicts("nvidia", "cuda:sm_100", operator, kind))


@pytest.mark.parametrize(
    ("name", "table"),
    [("rmsnorm", "_rmsnorm_reference"), ("gemma_rmsnorm", "_gemma_rmsnorm_reference"),
     ("gemma_fused_add_rmsnorm", "_gemma_fused_add_rmsnorm_reference")],
)  # fmt: skip
def test_the_doubles_norms_are_flashinfers(wheel: Path, name: str, table: str) -> None:
    """The double's norms give what FlashInfer's own references give, bit for bit, the sum not rounded in between."""
    generator = torch.Generator().manual_seed(0)
    x, residual = (torch.randn(9, 4608, generator=generator).bfloat16() for _ in range(2))
    weight = (0.3 * torch.randn(4608, generator=generator)).bfloat16()
    inputs = (x, residual, weight) if "add" in name else (x, weight)
    expected = reference(wheel, "norm", table)(*inputs)
    with standing_in(DOUBLE, "flashinfer", "m3hal_nvidia"):
        import flashinfer.norm

        returned = getattr(flashinfer.norm, name)(*inputs)
        assert torch.equal(x if returned is None else returned, expected)


def test_the_doubles_selection_is_flashinfers(wheel: Path) -> None:
    """The double selects what FlashInfer's own reference selects, on scores that differ."""
    generator = torch.Generator().manual_seed(1)
    for tiles, valid, begin, end in ((40, None, 0, 0), (40, 33, 1, 2), (9, None, 0, 1), (200, 17, 2, 0)):
        scores = torch.randn(4, tiles, 7, generator=generator)
        expected = reference(wheel, "msa", "_msa_topk_select_reference")(scores, 16, valid, begin, end)
        with standing_in(DOUBLE, "flashinfer", "m3hal_nvidia"):
            from flashinfer.msa_ops import msa_topk_select

            found = msa_topk_select(scores, 16, valid, force_begin_blocks=begin, force_end_blocks=end)
        assert torch.equal(found, expected)
