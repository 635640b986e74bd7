"""Calls recorded in production become cases; a shadowed operator is compared as it runs."""

import pytest
from m3hal_broken_zoo import MUTANTS
from m3hal_broken_zoo.matrix import installed
from m3hal_conformance.capture import load, record, shadow
from m3hal_conformance.runner import Runner
from m3hal_conformance.suite import select

from m3hal.cli import main
from m3hal.dispatch.errors import M3halError


def bound_of(case, backend="reference"):
    return Runner(backend, "cpu").offer(case.operator, case.site, case.layout).bound


@pytest.mark.parametrize(
    "name", ["sparse_attention/ragged", "qk_norm_rope_insert/page_boundaries", "moe_experts/few_resident"]
)
def test_a_recorded_call_is_a_case(name, tmp_path, capsys):
    """A call leaves a file, the file is the same call again, and the reference passes it; later calls leave none."""
    case = select(ids=[name])[0]
    with pytest.warns(UserWarning, match="user data"):
        bound = record(bound_of(case), tmp_path, calls=1)
    for seed in (0, 1):
        bound.run(*case.inputs(seed).values())
    (file,) = tmp_path.iterdir()
    assert load(file).site == case.site
    assert main(["replay", str(file)]) == 0
    assert capsys.readouterr().out.startswith("pass")


def test_a_replayed_call_finds_the_mutant(tmp_path, capsys):
    """A wrong backend fails the recorded call, with exit code 1."""
    case = select(ids=["sparse_attention/ragged"])[0]
    with pytest.warns(UserWarning, match="user data"):
        record(bound_of(case), tmp_path).run(*case.inputs().values())
    mutant = next(m for m in MUTANTS if m.name == "lse_base_two")
    with installed(mutant):
        assert main(["replay", str(next(tmp_path.iterdir())), "--backend", mutant.backend]) == 1
    assert "lse" in capsys.readouterr().out


def test_what_is_no_capture_is_refused(tmp_path, capsys):
    """A file that is no capture is a sentence."""
    path = tmp_path / "x.pt"
    path.write_bytes(b"no")
    assert main(["replay", str(path)]) == 1
    assert "can't be read as a capture" in capsys.readouterr().err


def test_packed_weights_are_not_recorded(tmp_path):
    """An implementation that packs its weights is refused, with the remedy."""
    case = select(ids=["moe_experts/hot_expert"])[0]
    mutant = next(m for m in MUTANTS if m.name == "packs_twice")
    with installed(mutant) as runner, pytest.raises(M3halError, match="record the reference"):
        record(runner.offer(case.operator, case.site, case.layout).bound, tmp_path)


def test_shadow_reports_a_wrong_call():
    """A sampled call of a wrong backend is reported; the reference's never is; results are unchanged."""
    case = select(ids=["rms_norm/every_chunk"])[0]
    heard = []
    right = shadow(bound_of(case), heard.append, every=2)
    for seed in range(3):
        right.run(*case.inputs(seed).values())
    assert heard == []
    mutant = next(m for m in MUTANTS if m.backend == "zoo-rms-norm-short-reduction")
    with installed(mutant) as runner:
        wrong = shadow(runner.offer(case.operator, case.site, case.layout).bound, heard.append, every=2)
        for seed in range(4):
            wrong.run(*case.inputs(seed).values())
    assert len(heard) == 2
    assert "rms_norm of zoo-rms-norm-short-reduction" in heard[0]
