"""A case is itself held to what its site says."""

from dataclasses import replace

from m3hal_conformance.case import Case
from m3hal_conformance.suite import all_cases
from m3hal_conformance.trial import _beyond


def _case(name: str) -> Case:
    return next(case for case in all_cases() if case.id.startswith(f"sparse_attention/{name}/"))


def test_a_case_with_more_requests_than_its_site_has_is_wrong() -> None:
    """Kernels size their plans by ``max_seqs``, and what overruns them says nothing."""
    case = _case("decode")
    assert _beyond(case.site, case.inputs(0)) == ""
    assert "requests and max_seqs is 1" in _beyond(replace(case.site, max_seqs=1), case.inputs(0))
