"""m3hal bench: its rows, its floors, what it does with a wrong output, and the command on a CPU."""

import importlib.metadata
import itertools
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from m3hal_conformance.bench import Bench, Floor, Row, Work, Wrong, clock, picture, table
from m3hal_conformance.bench.bench import _refusals, alone, nbytes, relative, sample
from m3hal_conformance.bench.command import measure
from m3hal_conformance.bench.rows import operators, rows
from m3hal_conformance.bench.vllm_peer import find
from m3hal_conformance.trial import Unsupported

from m3hal import ops
from m3hal.cli import main
from m3hal.dispatch import Impl, Manifest, register, unregister
from m3hal.dispatch.errors import M3halError
from m3hal.dispatch.verdict import Verdict
from m3hal.ops import ExpertWeights
from m3hal.reference import bind_definition

RATES = {"copy_GBps": 100.0, "read_GBps": 200.0, "bfloat16_TFLOPs": 1.0}


@pytest.fixture(scope="module")
def bench():
    """The definitions on this CPU."""
    return Bench("cpu", "reference", small=True)


def row(work):
    """A row of given work."""
    return Row("rms_norm", "made up", lambda bench: work)


@pytest.mark.parametrize("small", [True, False])
def test_rows_are_found_and_told_apart(small):
    """Every module of rows is in the table, of an operator or a sequence of them, with titles that differ."""
    for name in operators():
        found = list(rows(name, small))
        assert found
        assert {r.operator for r in found} == {name}
        assert len({r.case for r in found}) == len(found)
    assert set(operators()) - set(ops.NAMES) == {"msa"}


@pytest.mark.parametrize("name", operators())
def test_the_definitions_pass_their_rows(bench, name):
    """Every small row's output is checked and right, so that a wrong one is the implementation's."""
    picked = [one for one in rows(name, True) if "TP1" not in one.case]
    for one in picked[:: max(1, len(picked) // 3)]:
        found = measure(bench, one, {}, 0)
        assert found.status == "checked", found
        assert found.errors or name == "msa"


def test_rows_name_what_they_need(bench, monkeypatch):
    """What is listed is what a row asks the plan for, traits included, when it is prepared."""
    asked = set()
    bound = bench.bound

    def watched(operator, site, layout="hnd", require=()):
        asked.update((operator, *require))
        return bound(operator, site, layout, require)

    monkeypatch.setattr(bench, "bound", watched)
    for one in [one for name in operators() for one in list(rows(name, True))[:2]]:
        asked.clear()
        one.prepare(bench)
        assert asked == set(one.needs), one
    large = {f"{one.operator} {one.case}": one.needs for name in operators() for one in rows(name, False)}
    assert large["route_topk gate, choice and order 1"] == ("linear", "route_topk", "moe_experts")
    rounded = ("moe_experts", "activation_format=fp8_e4m3", "double_rounding=bfloat16")
    assert large["moe_experts fp8 TP4 8192 fp8 activations"] == rounded


def test_a_row_has_its_median_floor_share_and_ratio(bench):
    """The ratio is of the best rival to ours, whatever the order; the share is of the floor that ours reaches."""
    pause = {"m3hal": 2e-3, "slow": 4e-3, "fast": 1e-3}
    import time

    work = Work({name: [lambda s=s: time.sleep(s)] for name, s in pause.items()}, Floor(read=200_000 * 500))
    found = measure(bench, row(work), RATES, 5)
    assert (found.status, found.runs, found.best, found.floor_us) == ("measured", 5, "fast", 500.0)
    assert found.ratio == pytest.approx(found.us["fast"] / found.us["m3hal"])
    assert found.share == pytest.approx(500 / found.us["m3hal"])
    assert 0.3 < found.ratio < 0.8


def test_candidates_take_turns():
    """Interleaved: a drift of the clocks meets all alike."""
    order = []
    work = Work({name: [lambda name=name: order.append(name)] for name in ("m3hal", "vllm")}, None)
    times = clock.measure(work, torch.device("cpu"), 5)
    assert order == ["m3hal", "vllm"] * 5
    assert {name: len(found) for name, found in times.items()} == {"m3hal": 5, "vllm": 5}


@pytest.mark.parametrize("apart", [False, True])
def test_calls_apart_gain_nothing_from_each_other(monkeypatch, apart):
    """A kernel between calls ends their overlap, and its own time is taken off."""
    call, between, overlap = 5.0, 2.0, 1.5

    def duration(calls):
        same = sum(a is b for a, b in itertools.pairwise(calls) if a is ours)
        return sum(call if each is ours else between for each in calls) - overlap * same

    def ours():
        return None

    monkeypatch.setattr(clock, "_captured", list)
    monkeypatch.setattr(clock, "events", lambda calls, times: duration(calls))
    took = clock._replayed([ours], (lambda: None) if apart else None)()
    assert took == pytest.approx(call if apart else call - overlap * (clock.CHAIN - 1) / clock.CHAIN)


@pytest.mark.parametrize(
    ("floor", "expected"),
    [
        (Floor(read=200_000), 1.0),
        (Floor(read=50_000, written=50_000), 1.0),
        (Floor(read=200_000, flops=5e6), 5.0),
        (Floor(flops=5e6, unit="float8"), None),
        (Floor(), None),
    ],
)
def test_floor(floor, expected):
    """The larger of bytes over bandwidth and operations over their rate; none where the rate was not measured."""
    assert floor.microseconds(RATES) == expected


@pytest.mark.parametrize(
    ("check", "status", "told"),
    [
        (lambda: 0.02, "wrong", "0.02 from the exact one; the limit is 0.01"),
        (lambda: float("nan"), "wrong", "nan from the exact one"),
        (lambda: (_ for _ in ()).throw(Wrong("ids must ascend")), "wrong", "ids must ascend"),
        (lambda: 1 / 0, "failed", "ZeroDivisionError: division by zero (test_bench.py:"),
        (lambda: (_ for _ in ()).throw(Unsupported("it has no such format")), "unsupported", "no such format"),
        (lambda: 0.01, "checked", ""),
    ],
)
def test_what_becomes_of_a_row(bench, check, status, told):
    """A wrong output is told and not timed; a fault of one row does not end the table."""
    found = measure(bench, row(Work({"m3hal": [lambda: None]}, None, {"m3hal": check})), {}, 0)
    assert found.status == status
    assert told in found.reason
    assert not found.us


def test_tokens_alone_see_what_they_saw(bench):
    """A token asked as a request of its own gives the row that it has in its batch."""
    site = bench.site(tensor_parallel=4)
    (meta,) = bench.batches(20, 2, 7, 300)
    q, kv = bench.normal(14, site.num_q_heads, 128), bench.cache("bfloat16", 20, 1, True)
    ids = bench.random_ids(meta.positions(14), 1, 16)
    whole, some = bench.exact("sparse_attention", site, q, kv, ids, meta), sample(14)
    single = bench.exact("sparse_attention", site, q[some], kv, ids[some], alone(meta, some))
    assert some == [0, 4, 13]
    assert relative(whole[some], single.double()) < 1e-2


def test_an_unwritten_number_is_infinitely_far():
    """Poison that stays is no small error."""
    assert relative(torch.full((2, 4), float("nan")), torch.ones(2, 4)) == float("inf")


def test_bytes_of_experts():
    """Codes, scales and the shared expert count."""
    weights = ExpertWeights(torch.zeros(2, 8, 4), torch.zeros(2, 4, 4), shared=ExpertWeights(*torch.zeros(2, 1, 4, 4)))
    assert nbytes(weights) == 4 * (64 + 32 + 16 + 16)


@pytest.mark.parametrize(("installed", "told"), [("0.32.0", "0.32.0 is installed"), (None, "not importable here")])
def test_without_the_peer_the_table_says_why(installed, told, monkeypatch):
    """An absent or older peer is a reason, not an error; nothing of it is imported."""

    def version(name):
        if installed is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setitem(sys.modules, "vllm", None)
    found, reason = find("vllm")
    assert found is None
    assert told in reason


def test_picture(tmp_path):
    """A PNG where matplotlib is."""
    pytest.importorskip("matplotlib", reason="it draws, and is an extra that is not installed here")
    shown = [
        table.Measured("rms_norm", "1", "measured", us={"m3hal": 2.0, "vllm": 3.0}, share=0.5, ratio=1.5, best="vllm")
    ]
    picture.draw(shown, tmp_path / "a.png", "title")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def axes(monkeypatch):
    """What would be drawn on, without matplotlib."""
    library = mock.MagicMock()
    monkeypatch.setitem(sys.modules, "matplotlib", library)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", library)
    drawn = library.Figure.return_value.subplots.return_value
    drawn.legend = library.Figure.return_value.legend
    return drawn


def test_picture_of_a_share_above_one(axes, tmp_path):
    """The bar ends at 100 %, and what it would be stands beside it."""
    shown = [table.Measured("rms_norm", case, "measured", us={"m3hal": 2.0}, share=share) for case, share in
             (("1", 0.5), ("8", 1.284))]  # fmt: skip
    picture.draw(shown, tmp_path / "a.png", "NVIDIA H200 (cuda:sm_90), triton")
    assert axes.barh.call_args.args == (["rms_norm  1", "rms_norm  8"], [0.5, 1])
    assert [call.args[:2] for call in axes.annotate.call_args_list] == [("128%", (picture.BEYOND, 1))]
    assert axes.set.call_args.kwargs["title"] == "NVIDIA H200 (cuda:sm_90), triton"
    assert not axes.legend.called
    assert not axes.scatter.called


def test_picture_shows_where_a_rival_is_faster(axes, tmp_path):
    """Its mark is the share that it reaches, up to 110 %: beyond the bar if it is faster, hollow if another kind."""
    kinds = (
        ("1", 0.5, 2.0, "vllm"),
        ("8", 0.5, 0.8, "vllm cuda"),
        ("64", 0.4, 0.5, "our fp8"),
        ("512", 0.9, 0.5, "vllm"),
    )
    shown = [table.Measured("rms_norm", case, "measured", us={"m3hal": 2.0}, share=share, ratio=ratio, best=best)
             for case, share, ratio, best in kinds]  # fmt: skip
    picture.draw([shown[0], table.Measured("msa", "host", "measured", ratio=2.0, best="vllm"), *shown[1:]],
                 tmp_path / "a.png", "title")  # fmt: skip
    (alike, other) = axes.scatter.call_args_list
    assert alike.args == ((0.25, 0.625, picture.BEYOND), (0, 1, 3))
    assert other.args == ((0.8,), (2,))
    assert alike.kwargs["facecolor"] != other.kwargs["facecolor"]
    assert axes.legend.called


@pytest.mark.parametrize("options", [["--read", "{table}"], ["--device", "cpu", "--backend", "reference"]])
def test_a_picture_without_matplotlib_is_refused(monkeypatch, capsys, tmp_path, options):
    """Before anything is measured, with what to install; no picture is no success."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("m3hal_conformance.bench.command.measure", lambda *_: pytest.fail("it ran"))
    made = tmp_path / "table.json"
    made.write_text(table.to_json([table.Measured("rms_norm", "1", "measured", us={"m3hal": 2.0}, share=0.5)],
                                  {"device": "cpu", "backend": "reference"}, {}, "m3hal bench"))  # fmt: skip
    named = [option.format(table=made) for option in options]
    assert main(["bench", *named, "--png", str(tmp_path / "a.png")]) == 2
    assert "pip install 'm3hal-conformance[bench]'" in capsys.readouterr().err
    assert not (tmp_path / "a.png").exists()


def test_a_table_without_shares_makes_no_picture(axes, capsys, tmp_path):
    """An empty chart would say that all went well."""
    made = tmp_path / "table.json"
    made.write_text(table.to_json([table.Measured("gate", "1", "measured", us={"64,16": 2.0})],
                                  {"device": "cpu", "backend": "reference"}, {}, "m3hal bench"))  # fmt: skip
    assert main(["bench", "--read", str(made), "--png", str(tmp_path / "a.png")]) == 2
    assert "there are no shares to draw" in capsys.readouterr().err
    assert not axes.barh.called


@pytest.mark.parametrize(
    ("rival", "alike"),
    [("vllm", True), ("vllm split 264", True), ("vllm marlin", True), ("cuBLAS", True), ("cuBLAS bf16", False),
     ("our fp8", False), ("vllm fp8", False), ("dense cuDNN", False), ("vllm tuned fp8 activations", False)],
)  # fmt: skip
def test_a_ratio_to_another_kind_of_rival_is_marked(rival, alike):
    """Somebody else's kernel at the row's formats has none; what the mark means stands below the table."""
    shown = [table.Measured("linear", "1", "measured", us={"m3hal": 2.0, rival: 3.0}, ratio=1.5, best=rival, runs=5)]
    assert table.line(shown[0])[4] == ("1.50" if alike else "1.50*")
    told = table.footer(shown, {"device": "cpu", "backend": "a"}, {}, "m3hal bench")
    assert ("* the fastest rival" in told) is not alike


def test_the_footer_tells_machine_date_runs_and_ceilings():
    """All that the file knows of where its numbers come from, and what was asked."""
    where = {"device": "cuda:sm_90", "device_label": "NVIDIA H200", "backend": "triton", "torch": "2.11.0"}
    machine = {**where, "driver": "580", "date": "2026-11-30", "require": ["batch_invariant"], "peer_absent": "none"}
    shown = [table.Measured("rms_norm", "1", "measured", us={"m3hal": 2.0}, share=1.74, runs=7)]
    told = table.footer(shown, machine, {"copy_GBps": 4247.09, "bfloat16_TFLOPs": 790.88}, "m3hal bench --op rms_norm")
    assert told.splitlines() == [
        "microseconds, medians of 7 interleaved runs; NVIDIA H200 (cuda:sm_90), backend triton, torch 2.11.0, "
        "driver 580, 2026-11-30",
        "ceilings: copy 4247 GB/s, bfloat16 790.9 TFLOP/s",
        "required of implementations: batch_invariant",
        "a share far above 100 % says that its floor counts what the call needn't do, not that it is fast",
        "no peer: none",
        "m3hal bench --op rms_norm",
    ]
    assert table.footer([], {"device": "cpu", "backend": "a"}, {}, "x").startswith("nothing was timed; cpu, backend a")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--read", "x.json", "--require", "batch_invariant"], "--read measures nothing"),
        (["--read", "x.json", "--runs", "9"], "Leave out --runs."),
        (["--read", "x.json", "--peer", "vllm", "--apart"], "Leave out --peer and --apart."),
        (["--device", "cpu", "--list", "--require", "batch_invariant"], "--list measures nothing"),
        (["--device", "cpu", "--check-only", "--png", "a.png"], "no shares to draw. Leave out --png."),
    ],
)
def test_an_option_that_would_be_ignored_is_refused(capsys, options, told):
    """Whoever asked for variants must not read a table of something else."""
    assert main(["bench", *options]) == 2
    assert told in capsys.readouterr().err


def test_what_nothing_serves_is_told_with_its_implementations():
    """Two implementations' reasons are two, each with its name."""

    def refused(impl, reason):
        return Verdict("limits", False, reason, "nvidia_vllm", impl=impl)

    two = [refused("verify bf16", "kv_format is 'fp8_e4m3'"), refused("verify fp8", "num_kv_heads is 4")]
    assert _refusals(two) == "verify bf16: kv_format is 'fp8_e4m3'; verify fp8: num_kv_heads is 4"
    assert _refusals([refused("a", "not on cpu"), refused("b", "not on cpu")]) == "not on cpu"


def test_a_rival_that_is_not_served_has_no_column(bench, monkeypatch):
    """It is no reason for the row, whose own format may well be served."""
    monkeypatch.setattr(bench, "calls", mock.Mock(side_effect=Unsupported("it takes bf16")))
    assert bench.rival("our fp8", "sparse_attention", None, [], None) == {}
    monkeypatch.setattr(bench, "calls", lambda *_, **__: [1])
    assert bench.rival("our fp8", "sparse_attention", None, [], None) == {"our fp8": [1]}


def test_command(tmp_path, capsys):
    """The table on a CPU, with bars, and the same in JSON."""
    out = tmp_path / "rows.json"
    options = ["--device", "cpu", "--backend", "reference", "--op", "topk_blocks", "--runs", "5", "--peer", "vllm"]
    assert main(["bench", *options, "--out", str(out)]) == 0
    printed, made = capsys.readouterr(), json.loads(out.read_text())
    assert "topk_blocks  prefill TP1" in printed.out
    assert "[1/2" in printed.err
    assert len(made["rows"]) == 2
    assert {"operator", "case", "us", "floor_us", "share", "errors"} <= set(made["rows"][0])
    assert made["ceilings"]["copy_GBps"] > 0
    assert "peer_absent" in made["machine"] or "vllm" in made["rows"][0]["us"]
    assert main(["bench", "--read", str(out), "--case", "TP4"]) == 0
    again = capsys.readouterr().out
    assert "prefill TP4" in again
    assert "prefill TP1" not in again
    assert "microseconds, medians of 5 interleaved runs; " in again
    assert f"backend reference, torch {torch.__version__}" in again
    assert f", {made['machine']['date']}\nceilings: copy " in again
    assert again.rstrip().splitlines()[-1] == made["command"]
    assert main(["bench", "--read", str(out), "--case", "TP4", "--json"]) == 0
    assert all("TP4" in row["case"] for row in json.loads(capsys.readouterr().out)["rows"])
    assert main(["bench", "--read", str(out), "--case", "nothing"]) == 2
    assert "has no such rows" in capsys.readouterr().err


@pytest.fixture
def variants(monkeypatch):
    """A backend with two linear, the second of which declares batch_invariant; returns what was bound, in order."""
    bound = []

    def made(name):
        def factory(site):
            bound.append(name)
            return bind_definition(ops.load("linear"), site)

        return factory

    monkeypatch.setitem(
        sys.modules, "m3hal_variants", SimpleNamespace(fast=made("fast"), same=made("same"), __spec__=None)
    )
    fast = Impl("m3hal_variants:fast", memory="self")
    same = Impl("m3hal_variants:same", memory="self", traits={"batch_invariant": "yes"})
    register(Manifest("variants", "m3hal tests", ">=1,<2", ("cpu",), {"linear": (fast, same)}))
    yield bound
    unregister("variants")


def test_a_variant_is_timed_by_requiring_what_it_declares(variants, tmp_path, capsys):
    """As conform asks it; the table says what was required, and rows that nothing serves so say why, in one object."""
    out, options = tmp_path / "rows.json", ["bench", "--device", "cpu", "--backend", "variants", "--op", "linear"]
    assert main([*options, "--check-only"]) == 0
    assert set(variants) == {"fast"}
    variants.clear()
    required = ["--require", "batch_invariant", "--require", "batch_invariant"]
    assert main([*options, "--check-only", *required, "--out", str(out)]) == 0
    assert set(variants) == {"same"}
    assert json.loads(out.read_text())["machine"]["require"] == ["batch_invariant"]
    capsys.readouterr()
    assert main([*options, "--check-only", "--require", "batch_invariant=no", "--json"]) == 0
    assert "require" in json.loads(capsys.readouterr().out)["machine"]
    reference = ["bench", "--device", "cpu", "--backend", "reference", "--op", "moe_experts", "--case", "fp8 TP4 3"]
    assert main([*reference, "--check-only", "--require", "activation_format=fp8_e4m3", "--json"]) == 3
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {row["reason"] for row in rows} == {"the policy requires activation_format=fp8_e4m3; it declares given"}


def test_an_output_is_compared_with_the_definition_that_takes_what_is_required(bench):
    """A required freedom that the definition can take is no error of the implementation's."""
    rounded = Bench("cpu", "reference", small=True, require=("activation_format=fp8_e4m3", "batch_invariant"))
    site = replace(bench.site("moe", 4), num_experts=8, num_local_experts=8, hidden_size=64, intermediate_size=32)
    x, experts = bench.normal(3, 64), ExpertWeights(bench.normal(8, 64, 64), bench.normal(8, 64, 32))
    inputs = (x.double(), torch.ones(3, 4), torch.arange(12).view(3, 4).int() % 8, experts)
    given, taken = (one.exact("moe_experts", site, *inputs) for one in (bench, rounded))
    assert 1e-3 < relative(taken, given) < 0.1
    both = bench.exact("moe_experts", site, *inputs, require=("activation_format=fp8_e4m3",))
    assert torch.equal(taken, both)


def test_rows_of_a_device_that_is_not_here_are_listed(monkeypatch, capsys):
    """A GPU's rows, with what each needs; nothing is planned or measured, and --json says the same."""
    monkeypatch.setattr("m3hal_conformance.bench.command.Bench", lambda *_: pytest.fail("it was planned"))
    monkeypatch.setattr("m3hal.dispatch.devices.is_present", lambda device: device == "cpu")
    options = ["bench", "--device", "cuda:sm_90", "--op", "msa", "--op", "msa", "--list"]
    assert main(options) == 0
    printed = capsys.readouterr().out
    assert "prefill bf16 TP1 8192 @ 8K     select_blocks, sparse_attention" in printed
    assert printed.endswith("6 rows of published sizes; measuring needs cuda:sm_90, which this machine lacks.\n")
    assert main([*options, "--small", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["device"], told["is_here"], told["sizes"]) == ("cuda:sm_90", False, "small")
    assert told["rows"][0]["case"] == "prefill bf16 TP1 256 @ 256"
    assert main(["bench", "--device", "cpu", "--op", "rms_norm", "--list"]) == 0
    assert capsys.readouterr().out.endswith("1 row of small sizes; without --list they are measured on cpu.\n")


@pytest.mark.parametrize(
    ("options", "code", "told"),
    [
        (["--device", "npu:ascend910", "--list"], 2, "is of no kind that m3hal, torch or the manifest"),
        (["--device", "cuda", "--list"], 2, "needs its architecture"),
        (["--device", "cuda:sm_90"], 3, "`m3hal bench --device cuda:sm_90 --list` names its rows"),
        (["--device", "cpu", "--backend", "triton", "--op", "topk_blocks"], 3, "not on cpu"),
        (["--device", "cpu", "--op", "sparse_atention"], 2, "Did you mean 'sparse_attention'?"),
        (["--device", "cpu", "--case", "nothing"], 2, "no row's case contains 'nothing'"),
        (["--device", "cpu", "--op", "msa", "--list"], 0, ""),
        (["--device", "cpu", "--backend", "vllm"], 2, "backend 'vllm' dispatches nothing to measure"),
        (["--device", "cpu", "--backend", ""], 2, "names no backend"),
        (["--device", "cpu", "--require", ""], 2, "--require takes a trait, such as batch_invariant, and got none."),
        (["--device", "cpu", "--backend", "reference", "--require", "batch_invarian"], 2, "'batch_invariant'?"),
        (["--read", __file__], 2, "is no table that m3hal bench wrote"),
        (["--read", "nothing.json"], 2, "nothing.json can't be read"),
    ],
)
def test_exit_codes(options, code, told, capsys):
    """0 done, 2 the request means nothing, 3 it can't be served here, each refusal in one sentence."""
    if torch.cuda.is_available():
        pytest.skip("refusals of a machine without a GPU")
    assert main(["bench", *options]) == code
    error = capsys.readouterr().err
    assert told in error
    assert not told or len(error.strip().splitlines()) == 1


def test_a_wrong_output_is_exit_code_1(monkeypatch, capsys):
    """Whoever runs it in CI sees it."""
    monkeypatch.setattr(torch.Tensor, "float", lambda self: torch.full_like(self, 2.0, dtype=torch.float32))
    assert main(["bench", "--device", "cpu", "--backend", "reference", "--op", "topk_blocks", "--check-only"]) == 1
    assert "wrong" in capsys.readouterr().out


def test_output_that_cannot_be_written_is_refused_first(monkeypatch, capsys, tmp_path):
    """No row runs before the sentence, and the exit code is 2."""
    monkeypatch.setattr("m3hal_conformance.bench.command.measure", lambda *_: pytest.fail("it ran"))
    options = ["--device", "cpu", "--backend", "reference", "--op", "topk_blocks", "--check-only"]
    assert main(["bench", *options, "--out", str(tmp_path / "none" / "x.json")]) == 2
    assert "there is no folder" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["/dev/full", "loop"])
def test_a_table_that_cannot_be_written_is_a_sentence(capsys, monkeypatch, tmp_path, name):
    """Also where only the attempt can show it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    options = ["--device", "cpu", "--backend", "reference", "--op", "topk_blocks", "--check-only"]
    assert main(["bench", *options, "--out", name]) == 1
    assert f"m3hal: {name} can't be written: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "rows",
    [
        "null",
        '["a"]',
        "[" * 100_000,
        '[{"operator": "a", "case": "b", "status": "measured", "us": {"m3hal": "x"}}]',
        '[{"operator": "a", "case": "b", "status": "measured", "us": {"m3hal": 1.0}, "share": NaN}]',
        '[{"operator": "a", "case": "b", "status": "measured", "us": [1]}]',
        '[{"operator": "a", "case": "b", "status": "measured", "share": "x"}]',
        '[{"operator": "a", "case": 7, "status": "measured"}]',
    ],
)
def test_what_is_no_table_is_refused(capsys, tmp_path, rows):
    """Whatever stands where a table's rows stand."""
    path = tmp_path / "table.json"
    path.write_text(f'{{"machine": {{"device": "cpu", "backend": "a"}}, "rows": {rows}}}')
    assert main(["bench", "--read", str(path), "--case", "b"]) == 2
    assert "is no table that m3hal bench wrote: " in capsys.readouterr().err


def test_picture_of_a_kind_that_cannot_be_drawn(monkeypatch, tmp_path):
    """A sentence; the measurement is over by then."""
    library = mock.MagicMock()
    library.Figure.return_value.savefig.side_effect = ValueError("Format 'nope' is not supported")
    monkeypatch.setitem(sys.modules, "matplotlib", library)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", library)
    shown = [table.Measured("rms_norm", "1", "measured", us={"m3hal": 2.0}, share=0.5)]
    with pytest.raises(M3halError, match=r"can't be drawn: Format 'nope' is not supported\."):
        picture.draw(shown, tmp_path / "a.nope", "title")


def test_fewer_than_five_runs_are_refused(capsys):
    """A median of three is none."""
    with pytest.raises(SystemExit) as ended:
        main(["bench", "--runs", "3"])
    assert ended.value.code == 2
    assert "5 runs or more" in capsys.readouterr().err


def test_the_command_line_needs_no_torch():
    """The core's file only parses."""
    import m3hal.cli.bench as module

    assert "torch" not in Path(module.__file__).read_text()
