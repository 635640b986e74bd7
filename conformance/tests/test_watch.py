"""Modes record and shadow: what is bound, what is left behind, and that nothing reaches the model."""

import json
import logging
from dataclasses import replace

import pytest
import torch
from m3hal_broken_zoo import MUTANTS
from m3hal_broken_zoo.matrix import installed
from m3hal_conformance import shadow, watch
from m3hal_conformance.bounds import bits
from m3hal_conformance.capture import load
from m3hal_conformance.case import shape_of
from m3hal_conformance.runner import Runner
from m3hal_conformance.suite import select
from m3hal_conformance.trees import tensors

from m3hal.cli import main
from m3hal.dispatch import Policy, plan
from m3hal.dispatch.watch import Watch


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(shadow, "Finalize", lambda *_, **__: None)  # else every test would report when pytest ends
    watch.ledger.cache_clear()
    watch.shelf.cache_clear()
    watch._tell.cache_clear()
    watch._unwatchable.cache_clear()
    return tmp_path / "captures"


def bound_of(case, mode, folder, backend="reference", **keys):
    """The case's operator as a model would get it, at layer 3."""
    policy = Policy.resolve({"backend": backend, "mode": mode, "capture_dir": str(folder), **keys}, environ={})
    made = plan(
        shape_of(case.site), "cpu", policy, cache_layouts=(case.layout,), operators=(case.operator,), partial=True
    )
    return made.bind(case.operator, case.site.kind, "model.layers.3")


def case_named(name):
    return select(ids=[name])[0]


def mutant_named(name):
    return next(m for m in MUTANTS if m.backend == name)


def same_bits(one, other):
    pairs = zip(tensors(one), tensors(other), strict=True)
    return all(torch.equal(bits(a), bits(b)) for (_, a), (_, b) in pairs)


def test_off_binds_the_vendors_callable():
    """Mode off is no mode: the same object as without the key, and no callable beside it."""
    case = case_named("rms_norm/tokens_7")
    made = plan(shape_of(case.site), "cpu", Policy.resolve({"backend": "reference", "mode": "off"}, environ={}))
    bound = made.bind("rms_norm", case.site.kind, "model.layers.3")
    assert bound is made.bind("rms_norm", case.site.kind)
    assert bound.unwatched is None
    assert not isinstance(bound.run, watch._Watcher)


@pytest.mark.parametrize("mode", ["record", "shadow"])
@pytest.mark.parametrize(
    "name",
    [
        "sparse_attention/ragged",
        "qk_norm_rope_insert/page_boundaries",
        "moe_experts/few_resident",
        "select_blocks/ramp",
    ],
)
def test_watching_changes_no_bit(name, mode, folder):
    """Outputs and mutated arguments are those of the unwatched callable."""
    case = case_named(name)
    bound = bound_of(case, mode, folder, sample_rate=1)
    one, other = case.inputs(), case.inputs()
    assert same_bits(bound.run(*one.values()), bound.unwatched(*other.values()))
    assert same_bits(one, other)


def test_record_leaves_cases(folder, capsys, caplog):
    """Every call at rate 1, named by operator and layer; the warning says once that they hold user data."""
    case = case_named("sparse_attention/ragged")
    bound = bound_of(case, "record", folder)
    for seed in (0, 1):
        bound.run(*case.inputs(seed).values())
    files = sorted(folder.iterdir())
    assert [file.name for file in files] == [f"sparse_attention-model.layers.3-00{n}.pt" for n in (0, 1)]
    assert folder.stat().st_mode & 0o077 == 0
    assert [record.getMessage() for record in caplog.records if "user data" in record.getMessage()] != []
    assert main(["replay", str(files[1])]) == 0
    assert capsys.readouterr().out.startswith("pass")
    assert torch.load(files[0], weights_only=True)["origin"]["layer"] == "model.layers.3"


def test_rate_and_cap(folder, caplog):
    """One call in four; none beyond the cap, which is said once."""
    case = case_named("swiglu_oai/expert")
    bound = bound_of(case, "record", folder, sample_rate=0.25)
    for _ in range(12):
        bound.run(*case.inputs().values())
    assert len(list(folder.iterdir())) == 3
    size = sum(file.stat().st_size for file in folder.iterdir())
    watch.shelf.cache_clear()  # another process finds what is there
    bound = bound_of(case, "record", folder, capture_bytes=size + 1)
    for _ in range(3):
        bound.run(*case.inputs().values())
    assert len(list(folder.iterdir())) == 3
    assert sum("no more calls" in record.getMessage() for record in caplog.records) == 1


def test_a_planned_batch_is_recorded_as_metadata(folder):
    """What plan_batch made of the metadata, a new object or the same one refilled, is traced back to it."""
    case = case_named("sparse_attention/ragged")
    bound = bound_of(case, "off", folder)
    run, refilled = bound.run, {}

    def plan_batch(meta, storage):
        refilled["meta"] = meta
        return refilled

    planned = replace(bound, run=lambda q, kv, ids, made: run(q, kv, ids, made["meta"]), plan_batch=plan_batch)
    watched = watch.watched(planned, Watch("record", str(folder)), "model.layers.3")
    for seed in (0, 1):
        inputs = case.inputs(seed)
        watched.run(*list(inputs.values())[:3], watched.plan_batch(inputs["meta"], None))
    kept = [load(file).inputs()["meta"].seq_lens.tolist() for file in sorted(folder.iterdir())]
    assert kept == [case.inputs(seed)["meta"].seq_lens.tolist() for seed in (0, 1)]


def test_packed_weights_are_recorded_unpacked_or_not_at_all(folder, caplog):
    """Through the implementation's own unpack; one that can't unpack is left alone, and that is said."""
    case = case_named("moe_experts/few_resident")
    bound = bound_of(case, "off", folder)
    run, inputs = bound.run, case.inputs()
    packing = replace(
        bound, run=lambda x, w, i, p: run(x, w, i, p[0]), prepare_weights=lambda e: (e,), unpack=lambda p: p[0]
    )
    rest = [inputs[name] for name in ("x", "weights", "ids")]
    watch.watched(packing, Watch("record", str(folder))).run(*rest, packing.prepare_weights(inputs["experts"]))
    (file,) = folder.iterdir()
    assert Runner("reference", "cpu").run_case(load(file)).status == "pass"
    closed = replace(packing, unpack=None)
    assert watch.watched(closed, Watch("record", str(folder))) is closed
    assert "can't unpack" in caplog.text


MUTANTS_SHADOWED = [
    ("rms_norm/every_chunk", "zoo-rms-norm-short-reduction"),
    ("sparse_attention/ragged", "zoo-sparse-attention-lse-base-two"),
    ("qk_norm_rope_insert/page_boundaries", "zoo-qk-norm-rope-insert-norms-v"),
]


@pytest.mark.parametrize(("name", "backend"), MUTANTS_SHADOWED)
def test_shadow_reports_a_wrong_operator(name, backend, folder, caplog):
    """Each call is logged with layer, bound and place, and counted in the report; the first is no file unless asked."""
    case = case_named(name)
    with installed(mutant_named(backend)):
        bound = bound_of(case, "shadow", folder, backend=backend, sample_rate=1)
        for seed in range(2):
            bound.run(*case.inputs(seed).values())
    report = json.loads(watch.ledger(str(folder)).path.read_text())
    (row,) = report["rows"]
    assert (row["operator"], row["layer"]) == (case.operator, "model.layers.3")
    assert (row["compared"], row["failed"], row["first"]) == (2, 2, 1)
    assert row["worst"] > 1
    assert f"{case.operator} of {backend} at model.layers.3 left its bound" in caplog.text
    assert list(folder.glob("*.pt")) == []
    assert "Infinity" not in watch.ledger(str(folder)).path.read_text()  # which is no JSON


def test_shadow_keeps_the_first_mismatch_when_asked(folder):
    """With capture_bytes the first call that left its bound is a file, and replaying it fails."""
    name, backend = MUTANTS_SHADOWED[0]
    case = case_named(name)
    with installed(mutant_named(backend)):
        bound = bound_of(case, "shadow", folder, backend=backend, sample_rate=1, capture_bytes="1 GiB")
        for _ in range(2):
            bound.run(*case.inputs().values())
        (file,) = folder.glob("*.pt")
        assert main(["replay", str(file), "--backend", backend]) == 1
    assert main(["replay", str(file)]) == 0


def test_shadow_of_the_reference_finds_nothing(folder):
    """It compares, and nothing leaves its bound."""
    for name in ("rms_norm/every_chunk", "sparse_attention/ragged", "route_topk/bias_decides"):
        case = case_named(name)
        bound_of(case, "shadow", folder, sample_rate=1).run(*case.inputs().values())
    book = watch.ledger(str(folder))
    assert (book.compared, book.failed) == (3, [])
    assert "compared 3 of 3 calls at sample_rate 1 with" in book.summary()
    assert "none left its bound" in book.summary()
    book.write()
    assert book.path.stat().st_mode & 0o077 == 0


def test_shadow_tells_of_nothing_that_nothing_is_known(folder, caplog, monkeypatch):
    """The last line is there when no call was compared, and counts those that could not be."""
    case = case_named("rms_norm/tokens_7")
    bound = bound_of(case, "shadow", folder, sample_rate=1e-6)
    for _ in range(10):
        bound.run(*case.inputs().values())
    watch.ledger(str(folder)).close()
    assert "compared 0 of 10 calls at sample_rate 1e-06 with their definitions: nothing is known." in caplog.text
    watch.ledger.cache_clear()
    monkeypatch.setattr(watch, "compare_call", lambda *_: 1 / 0)
    bound_of(case, "shadow", folder, sample_rate=1).run(*case.inputs().values())
    assert "could not compare 1: nothing is known." in watch.ledger(str(folder)).summary()


def test_only_the_call_that_is_kept_is_said_to_be(folder, caplog):
    """Of two mismatches the first is a file; the sentences before it end."""
    name, backend = MUTANTS_SHADOWED[0]
    case = case_named(name)
    with installed(mutant_named(backend)):
        bound = bound_of(case, "shadow", folder, backend=backend, sample_rate=1, capture_bytes="1 GiB")
        for _ in range(2):
            bound.run(*case.inputs().values())
    assert caplog.text.count("left its bound") == 2
    assert caplog.text.count(". The call is kept as ") == 1


def test_parts_of_a_composition_are_watched(folder):
    """A fault in a part is reported for the part, before the composition that it spoils."""
    case = case_named("select_blocks/around_2048")
    backend = "zoo-block-scores-every-second-key"
    with installed(mutant_named(backend)):
        bound = bound_of(case, "shadow", folder, backend=f"{backend},reference", sample_rate=1)
        bound.run(*case.inputs().values())
    assert watch.ledger(str(folder)).failed[0].operator == "block_scores"


def test_a_mismatch_raises_when_asked(folder):
    """on_mismatch: raise ends the call with a sentence that has the remedy."""
    name, backend = MUTANTS_SHADOWED[0]
    case = case_named(name)
    with installed(mutant_named(backend)):
        bound = bound_of(case, "shadow", folder, backend=backend, sample_rate=1, on_mismatch="raise")
        with pytest.raises(shadow.Mismatch, match=r"Override operators\.rms_norm"):
            bound.run(*case.inputs().values())


@pytest.mark.parametrize("mode", ["record", "shadow"])
def test_what_goes_wrong_is_a_warning(mode, folder, caplog, monkeypatch):
    """A folder that can't be made, a comparison that raises: said once, and the call's result is there."""
    folder.write_text("a file is in the way")
    case = case_named("rms_norm/tokens_7")
    monkeypatch.setattr(watch, "compare_call", lambda *_: 1 / 0)
    bound = bound_of(case, mode, folder, sample_rate=1)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert bound.run(*case.inputs().values()).shape == case.inputs()["x"].shape
    assert caplog.text.count("a call can't be watched") == 1


def test_nothing_is_copied_in_the_capture_of_a_graph(folder, monkeypatch):
    """While a CUDA graph is captured the call is the implementation's alone."""
    case = case_named("rms_norm/tokens_7")
    bound = bound_of(case, "record", folder)
    monkeypatch.setattr(watch, "_is_capturing", lambda: True)
    bound.run(*case.inputs().values())
    assert not folder.exists()
