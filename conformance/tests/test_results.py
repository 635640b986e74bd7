"""Results, waivers, exit codes and what is written about a run."""

import datetime
import json
import xml.etree.ElementTree as xml
from dataclasses import replace

import pytest
from m3hal_conformance import reports
from m3hal_conformance.bugs import BUGS
from m3hal_conformance.claim import TIERS, digest, largest, make_claim, tiers
from m3hal_conformance.page import LIMIT, page
from m3hal_conformance.results import (
    CheckResult,
    Result,
    Waiver,
    WaiverError,
    apply_waivers,
    concerning,
    exit_code,
    nowhere,
    read_waivers,
    unused,
)
from m3hal_conformance.runner import Runner
from m3hal_conformance.suite import all_cases, select
from m3hal_conformance.verification import _installed, compare, verify

from m3hal import ops
from m3hal.cli import main

TODAY = datetime.date(2026, 12, 1)
BAD = (CheckResult("rerun", False, None, "noise"),)
CASES = select(ids=["rms_norm/tokens_7", "rms_norm/no_token"])


def result(case, status, checks=()):
    return Result(case, case.partition("/")[0], "float32", status, checks)


def waiver(case, until=TODAY, check="*"):
    return Waiver(case, "https://example.org/1", until, check)


def test_waived_failure_passes_the_run():
    """A failure that a waiver covers is waived, with its issue."""
    (found,) = apply_waivers([result("a/b/c", "fail", BAD)], [waiver("a/b/*")], TODAY)
    assert found.status == "waived"
    assert "https://example.org/1" in found.reason
    assert exit_code([found]) == 0


def test_unexpected_pass_fails():
    """A case that a waiver covers and that passes fails, so that no waiver outlives its bug."""
    (found,) = apply_waivers([result("a/b/c", "pass")], [waiver("a/b/c")], TODAY)
    assert found.status == "fail"
    assert "take the waiver out" in found.sentence


def test_expired_waiver_fails():
    """After its last day a waiver covers nothing."""
    (found,) = apply_waivers([result("a/b/c", "fail", BAD)], [waiver("a/b/c", TODAY - datetime.timedelta(1))], TODAY)
    assert found.status == "fail"
    assert "ended on" in found.sentence


def test_waiver_of_one_check_covers_no_other():
    """A waiver that names a check leaves the others' failures standing."""
    both = (*BAD, CheckResult("oracle", False, 3.0, "far"))
    (found,) = apply_waivers([result("a/b/c", "fail", both)], [waiver("a/b/c", check="rerun")], TODAY)
    assert found.status == "fail"


def test_unsupported_is_never_waived():
    """Unsupported stays unsupported, and alone it is exit code 3."""
    (found,) = apply_waivers([result("a/b/c", "unsupported")], [waiver("a/*")], TODAY)
    assert found.status == "unsupported"
    assert exit_code([found]) == 3
    assert exit_code([found, result("a/d/e", "fail", BAD)]) == 1


def test_waiver_that_meets_nothing_is_named():
    """A waiver whose pattern meets no case is reported."""
    assert unused([waiver("z/*")], [result("a/b/c", "pass")]) == [waiver("z/*")]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[[waiver]]\ncase='a'\nuntil=2027-01-01", "its issue"),
        ("[[waiver]]\ncase='a'\nissue='https://x'", "until when"),
        ("[[waiver]]\ncase='a'\nissue='https://x'\nuntil=2027-01-01\nwhy='b'", "unknown key 'why'"),
        ("[[waiver", "can't be read"),
        ("[[waivr]]\ncase='a'", "unknown table 'waivr'. Did you mean 'waiver'"),
        ("[waiver]\ncase='a'", "in double brackets"),
        ("[[waiver]]\ncase='a'\nissue='https://x'\nuntil=2027-01-01\ncheck='orcale'", "called 'orcale'. Did you mean"),
        ("[[waiver]]\ncase='a'\nissue='https://x'\nuntil=2027-01-01\ncheck='orc*x'", "no check is called 'orc.*x'"),
    ],
)
def test_waiver_file_says_what_is_wrong(tmp_path, text, sentence):
    """Issue and expiry are mandatory; a typing error is refused."""
    path = tmp_path / "waivers.toml"
    path.write_text(text)
    with pytest.raises(WaiverError, match=sentence):
        read_waivers(path, ("oracle", "rerun"))


def test_waivers_for_another_device_are_left_out(tmp_path):
    """A waiver may name its device."""
    path = tmp_path / "waivers.toml"
    path.write_text("[[waiver]]\ncase='a'\nissue='https://x'\nuntil=2027-01-01\ndevice='cuda:*'")
    found = read_waivers(path, ("oracle",))
    assert concerning(found, "cpu") == ()
    assert len(concerning(found, "cuda:sm_90")) == 1


@pytest.mark.parametrize(
    ("pattern", "meets"),
    [("*", True), ("cpu", True), ("c*", True), ("cuda:*", True), ("cuda:sm_9?", True), ("hip:gfx950", True),
     ("acme:a1", True), ("cdua:*", False), ("cuda", False), ("cuda:sm90", False), ("gpu", False)],
)  # fmt: skip
def test_waiver_of_no_known_device_is_named(pattern, meets):
    """A pattern that no kind of device can match is found; the device that is asked is always known."""
    one = Waiver("a/*", "https://x", TODAY, device=pattern)
    assert nowhere([one], "acme:a1") == ([] if meets else [one])


def test_waiver_names_the_check_that_passes():
    """On a case that fails in another check it says which one of the waiver's passes, or that none is asked."""
    checks = (CheckResult("rerun", True), CheckResult("oracle", False, 3.0, "far"))
    (found,) = apply_waivers([result("a/b/c", "fail", checks)], [waiver("a/b/c", check="rerun")], TODAY)
    assert "its check rerun passes, but https://example.org/1 waives it" in found.sentence
    (found,) = apply_waivers([result("a/b/c", "fail", checks)], [waiver("a/b/c", check="guards")], TODAY)
    assert "it is not asked the check 'guards', but" in found.sentence


@pytest.fixture(scope="module")
def claim():
    runner = Runner("reference", "cpu")
    results = runner.run(CASES)
    return make_claim(runner, CASES, results, {"notes": []}), results


def test_claim_verifies(claim):
    """A fresh claim holds: digest, cases, counts, and the files of its implementation."""
    made, _ = claim
    assert {finding.state for finding in verify(made)} == {"ok"}
    files = next(iter(made["implementations"]["rms_norm"].values()))["files"]
    assert all(len(value) == 64 for value in files.values())
    assert "reference.py" in files


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (lambda c: c["results"][0].update(ratio=0.1), "edited"),
        (lambda c: c["counts"].update({"pass": 9}), "do not follow"),
        (lambda c: c["suite"].update(case_set="0" * 16), "stale"),
        (lambda c: c["results"][0].update(failed={"oracle": "far"}), "said to pass"),
        (lambda c: c["results"][0].update(impl_id="1" * 16), "not among its implementations"),
        (
            lambda c: c["implementations"].update(rms_norm={"0" * 16: c["implementations"]["rms_norm"].popitem()[1]}),
            "stale",
        ),
    ],
)
def test_edited_claim_is_found(claim, edit, sentence):
    """An edit breaks the digest; an edit with a new digest breaks what it contradicts."""
    made = json.loads(json.dumps(claim[0]))
    edit(made)
    if sentence != "edited":
        made["digest"] = digest(made)
    assert any(f.state == "broken" and sentence in f.sentence for f in verify(made))


def test_tiers_of_another_suite_are_no_edit(claim, monkeypatch):
    """Where only the suite has changed since, the claim is stale: its counts still follow, its tiers can't be told."""
    made = json.loads(json.dumps(claim[0]))
    made["tiers"]["experts"] = True  # as they were with the suite that ran
    made["digest"] = digest(made)
    assert "its tiers do not follow from its results" in [f.sentence for f in verify(made)]
    more = [*CASES, *select(ids=["rms_norm/one_token"])]
    monkeypatch.setattr("m3hal_conformance.verification.all_cases", lambda: more)
    made["suite"]["whole"] = True
    made["digest"] = digest(made)
    states = {finding.sentence: finding.state for finding in verify(made)}
    assert states[f"stale: it ran {len(CASES)} cases; the suite now has {len(more)}"] == "broken"
    assert states["its counts follow from its results; its tiers are those of the suite that it ran"] == "ok"
    assert not [sentence for sentence in states if "do not follow" in sentence]


@pytest.mark.parametrize("name", ["backend", "suite", "results", "implementations", "counts", "digest", "tiers"])
def test_torn_claim_is_refused(claim, tmp_path, capsys, name):
    """A claim that lacks a part, or has it of another kind, is a sentence and exit code 2, not a traceback."""
    for damage in (lambda c: c.pop(name), lambda c: c.update({name: 3.5})):
        made = json.loads(json.dumps(claim[0]))
        damage(made)
        path = tmp_path / "claim.json"
        path.write_text(json.dumps({**made, "digest": digest(made)} if name != "digest" else made))
        assert main(["claim", "verify", str(path)]) == 2
        assert main(["claim", "compare", str(path), str(path)]) == 2
        assert f"its {name} is missing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda c: c.update(require=3), "its require is no list of names"),
        (lambda c: c.update(require=[["batch_invariant"]]), "its require is no list of names"),
        (lambda c: c.update(published_shape="linear"), "its published_shape is no list of names"),
        (lambda c: c["suite"].update(whole_operators=None), "its whole_operators is no list of names"),
        (lambda c: c["environment"].update(driver=5), "its environment has a value that is no str"),
        (lambda c: c["results"][0].pop("ratio"), "has status 'pass' and ratio None"),
        (lambda c: c["results"][0].update(ratio=float("nan")), "and ratio nan"),
        (lambda c: next(iter(c["implementations"]["rms_norm"].values())).update(case=[]), "do not name their case"),
        (lambda c: next(iter(c["implementations"]["rms_norm"].values())).update(path=7), "do not name their case"),
    ],
)
def test_a_claim_of_odd_parts_is_refused(claim, tmp_path, capsys, damage, sentence):
    """A digest that fits makes no claim of it; every action refuses it in one sentence."""
    made = json.loads(json.dumps(claim[0]))
    damage(made)
    path = tmp_path / "claim.json"
    path.write_text(json.dumps({**made, "digest": digest(made)}))
    for action in ("verify", "matrix"):
        assert main(["claim", action, str(path)]) == 2
        assert sentence in capsys.readouterr().err
    assert main(["claim", "compare", str(path), str(path)]) == 2


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "can't be read as a claim"),
        ('{"claim_version": 1, "claim_version": 1}', "it says 'claim_version' twice"),
        ("[]", "is no claim"),
        ('{"name": "npm"}', "is no claim"),
        ('{"claim_version": 7}', "this suite reads 1"),
        ("[" * 100000, "can't be read as a claim"),
    ],
)
def test_what_is_no_claim_is_refused(tmp_path, capsys, text, sentence):
    """Any other file, an empty one and one of another version give exit code 2."""
    path = tmp_path / "claim.json"
    path.write_text(text)
    assert main(["claim", "verify", str(path)]) == 2
    assert sentence in capsys.readouterr().err
    assert main(["claim", "verify", str(tmp_path / "absent.json")]) == 2


def test_composition_is_told_where_its_libraries_are_absent(monkeypatch):
    """Verifying binds nothing: the identity of composed operators is their parts', which manifests and files tell."""
    case = next(case for case in all_cases() if case.operator == "select_blocks")
    bound = Runner("reference", "cpu").offer(case.operator, case.site, case.layout).bound.impl_id
    monkeypatch.setattr(Runner, "offer", lambda *_: pytest.fail("it was bound"))
    assert _installed(Runner("reference", "cpu"), case) == (bound, None)


def test_claim_of_an_absent_backend_is_unknown(claim, tmp_path, capsys):
    """This machine can't tell what another one's backend was: exit code 3, and --json says so to programs."""
    made = {**json.loads(json.dumps(claim[0])), "backend": "acme"}
    made["digest"] = digest(made)
    path = tmp_path / "claim.json"
    path.write_text(json.dumps(made))
    assert main(["claim", "verify", str(path), "--json"]) == 3
    (told,) = json.loads(capsys.readouterr().out)["claims"]
    assert (told["file"], told["state"]) == (str(path), "unknown")
    assert {finding["state"] for finding in told["findings"]} == {"ok", "unknown"}


def test_several_claims_are_verified_at_once(claim, tmp_path, capsys):
    """A line for each file, those of a folder included; the exit code is the worst, and a stray file ends nothing."""

    def written(name, **edits):
        made = {**claim[0], **edits}
        made["digest"] = digest(made) if edits != {"seed": 5} else made["digest"]
        (tmp_path / name).write_text(json.dumps(made))
        return str(tmp_path / name)

    whole, absent, edited = written("b.json"), written("c.json", backend="acme"), written("a.json", seed=5)
    stray = tmp_path / "d.json"
    stray.write_text("{}")
    (tmp_path / "notes.txt").write_text("no claim, and not asked")
    assert main(["claim", "verify", whole, whole]) == 0
    assert main(["claim", "verify", absent, whole]) == 3
    assert main(["claim", "verify", edited, absent, whole]) == 1
    capsys.readouterr()
    assert main(["claim", "verify", str(tmp_path), whole]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["broken", "ok", "unknown", "refused"]
    assert lines[0] == f"broken  {edited}: it was edited: its digest does not match"
    assert lines[1] == f"ok      {whole}: it holds here"
    assert "acme" in lines[2].partition(absent)[2]
    assert lines[3] == f"refused {stray}: is no claim; `m3hal conform --json FILE` writes one."
    assert main(["claim", "verify", str(tmp_path), "--json"]) == 2
    states = [told["state"] for told in json.loads(capsys.readouterr().out)["claims"]]
    assert states == ["broken", "ok", "unknown", "refused"]


def test_a_folder_of_one_claim_and_of_none(claim, tmp_path, capsys):
    """A folder's claims have a line each, a single one too, which is told in full by its name; none is no pass."""
    assert main(["claim", "verify", str(tmp_path)]) == 2
    assert "holds no claim" in capsys.readouterr().err
    (tmp_path / "one.json").write_text(json.dumps(claim[0]))
    assert main(["claim", "verify", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"ok      {tmp_path / 'one.json'}: it holds here\n"
    assert main(["claim", "verify", str(tmp_path / "one.json")]) == 0
    assert len(capsys.readouterr().out.splitlines()) > 3
    assert main(["claim", "verify", "x" * 5000, str(tmp_path)]) == 2
    assert main(["claim", "verify"]) == 2
    assert main(["claim", "compare", str(tmp_path / "one.json")]) == 2


def test_edited_file_hashes_are_found(claim):
    """An impl_id that holds, and hashes beside it that do not."""
    made = json.loads(json.dumps(claim[0]))
    (told,) = made["implementations"]["rms_norm"].values()
    told["files"]["reference.py"] = "0" * 64
    made["digest"] = digest(made)
    assert any(f.state == "broken" and "files that it lists" in f.sentence for f in verify(made))


def test_claim_says_what_ran(claim):
    """Sizes, seed, executor, threads, versions; the same in a few lines for people."""
    made, results = claim
    assert largest(results)["rms_norm"]["tokens"] == 7
    assert (made["seed"], made["executor"], made["threads"]) == (0, "in-process", 1)
    lines = reports.facts(made)
    assert "torch" in lines["software"]
    assert made["suite"]["case_set"] in lines["suite"]
    assert "a part" in lines["suite"]
    assert "7 tokens" in lines["largest inputs"]
    assert "case set" in reports.terminal(made, results)
    assert "case set" not in reports.terminal(made, results, selected=True)


def test_claims_compare(claim):
    """Comparison names cases that changed and errors that grew."""
    made = json.loads(json.dumps(claim[0]))
    assert compare(claim[0], made) == []
    made["results"][0].update(status="fail", ratio=3.0)
    made["seed"], made["environment"]["torch"] = 5, "0.1"
    made["results"].pop()
    lines = compare(claim[0], made)
    assert any("pass -> fail" in line for line in lines)
    assert f"1 case no longer run: {claim[0]['results'][-1]['case']}" in lines
    made["results"] = []
    ids = [row["case"] for row in claim[0]["results"]]
    assert f"4 cases no longer run: {', '.join(ids[:3])} and 1 more" in compare(claim[0], made)
    assert "seed: 0 -> 5" in lines
    assert any(line.startswith("environment torch: ") for line in lines)


def test_tier_needs_every_case(claim):
    """A quick or partial run carries no tier."""
    assert not any(tiers(claim[1], ops.NAMES).values())


def test_tier_needs_the_published_sizes():
    """Every case passed, and yet no tier when one core operator is not served at MiniMax-M3's own sizes."""
    passed = [Result(case.id, case.operator, case.format, "pass") for case in select(operators=TIERS["experts"])]
    assert tiers(passed, TIERS["experts"])["experts"]
    assert not tiers(passed, ("swiglu_oai", "moe_experts"))["experts"]


def test_html_page_answers(claim):
    """One page without network: the failing case first, by how much, and how to ask again; under a megabyte."""
    made, results = claim
    text = page(made, [*results, result("rms_norm/x/float32", "fail", (CheckResult("oracle", False, 7.5, "far <b>"),))])
    head = text[: text.index("By operator")]
    assert "1 of 5 cases fail" in head
    assert "7.5 times its bound" in head
    assert "m3hal conform --backend reference --device cpu --case rms_norm/x/float32" in head
    assert "far &lt;b&gt;" in head
    assert "http" not in text.replace("https://example.org", "")
    assert len(text.encode()) < LIMIT


def test_call_that_raises_is_told_once(claim):
    """Checks that share a sentence share a line, on the terminal and on the page."""
    raised = "the call raised ValueError: no"
    checks = (*(CheckResult(name, False, None, raised) for name in ("oracle", "guards")), *BAD)
    found = result("rms_norm/x/float32", "fail", checks)
    assert found.faults == [(["oracle", "guards"], raised), (["rerun"], "noise")]
    told = reports.terminal(claim[0], [found])
    assert f"  oracle, guards: {raised}\n  rerun: noise\n" in told
    assert page(claim[0], [found]).count(f"</b>: {raised}") == 1


def test_page_links_the_bug_that_a_case_reproduces(claim):
    """F73 leads to its public report."""
    found = replace(result("rms_norm/x/float32", "fail", BAD), bugs=("F73",))
    assert f"reproduces <a href='{BUGS['F73'].link}'" in page(claim[0], [found])


def test_html_page_of_the_worst_run_is_small(claim):
    """Every case of the suite fails in many checks, and the page still opens: all cases are on it."""
    many = tuple(CheckResult(f"check{n}", False, 2.0 + n, "far from it & so on, " * 40) for n in range(9))
    results = [result(case.id, "fail", many) for case in all_cases()]
    text = page(claim[0], results)
    assert len(text.encode()) < LIMIT
    assert all(f"<td>{case.id}</td>" in text for case in all_cases())
    assert text.count("class='fail'") == 6 * len({case.operator for case in all_cases()})


def test_junit_is_xml(claim):
    """JUnit counts failures and skips, with reasons."""
    made, results = claim
    text = reports.junit(made, [*results, result("a/b/c", "unsupported"), result("a/d/e", "fail", BAD)])
    suites = {suite.get("name"): suite for suite in xml.fromstring(text)}
    assert suites["a"].get("failures") == "1"
    assert suites["a"].get("skipped") == "1"


def test_command_line(tmp_path, capsys):
    """conform runs a case, writes its files and exits with 0; the claim verifies; unknown names exit with 2."""
    files = {name: tmp_path / f"out.{name}" for name in ("json", "html", "junit")}
    options = [part for name, path in files.items() for part in (f"--{name}", str(path))]
    assert main(["conform", "--backend", "reference", "--case", "rms_norm/no_token", *options]) == 0
    assert "rms_norm" in capsys.readouterr().out
    assert all(path.stat().st_size > 100 for path in files.values())
    assert main(["claim", "verify", str(files["json"])]) == 0
    assert main(["claim", "compare", str(files["json"]), str(files["json"])]) == 0
    assert main(["conform", "--backend", "reference", "--op", "rms_nrom"]) == 2
    assert "rms_norm" in capsys.readouterr().err
    assert main(["conform", "--backend", "reference", "--case", "rms_norm/tokens"]) == 2


@pytest.mark.parametrize(
    ("path", "sentence"), [("none/x.html", "there is no folder"), (".", "is a folder"), ("", "is a folder")]
)
def test_output_that_cannot_be_written_is_refused_first(tmp_path, monkeypatch, capsys, path, sentence):
    """No case runs before the sentence, and the exit code is 2."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Runner, "run", lambda *_: pytest.fail("it ran"))
    assert main(["conform", "--backend", "reference", "--case", "rms_norm/no_token", "--html", path]) == 2
    assert sentence in capsys.readouterr().err


def test_outputs_do_not_replace_each_other(tmp_path, monkeypatch, capsys):
    """Two options that name one file, in whatever words; a device may be named twice."""
    monkeypatch.chdir(tmp_path)
    ask = ["conform", "--backend", "reference", "--case", "rms_norm/no_token"]
    assert main([*ask, "--json", "same", "--html", str(tmp_path / "same")]) == 2
    assert "--json and --html name one file" in capsys.readouterr().err
    assert main([*ask, "--json", "/dev/null", "--html", "/dev/null"]) == 0


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--threads", "1" + "0" * 30), "--threads takes 1 to 4096"),
        (("--threads", "0"), "--threads takes 1 to 4096"),
        (("--jobs", "0"), "--jobs takes 1 or more"),
        (("--require", ""), "--require takes a trait"),
    ],
)
def test_numbers_and_traits_that_mean_nothing(options, sentence, capsys):
    """No case fails for them, and no claim says them."""
    assert main(["conform", "--backend", "reference", "--case", "rms_norm/no_token", *options]) == 2
    assert sentence in capsys.readouterr().err


def test_a_trait_required_twice_is_required_once(tmp_path):
    """A claim says it once, so that two claims of the same compare equal."""
    path = tmp_path / "claim.json"
    ask = ["conform", "--backend", "reference", "--case", "rms_norm/no_token", "--json", str(path)]
    assert main([*ask, "--require", "batch_invariant", "--require", "batch_invariant"]) == 0
    assert json.loads(path.read_text())["require"] == ["batch_invariant"]


@pytest.mark.parametrize("exists", [False, True])
def test_a_folder_that_cannot_be_written_is_told_before_anything_runs(exists, monkeypatch, capsys, tmp_path):
    """Also for a file that could be: it is written beside itself first, so that it is there whole or not at all."""
    monkeypatch.setattr("m3hal_conformance.jobs.run", lambda *_: pytest.fail("it ran"))
    monkeypatch.setattr("os.access", lambda path, mode: str(path) != str(tmp_path))
    if exists:
        (tmp_path / "claim.json").write_text("{}")
    ask = ["conform", "--backend", "reference", "--case", "rms_norm/no_token"]
    assert main([*ask, "--json", str(tmp_path / "claim.json")]) == 2
    assert f"claim.json can't be written: you lack the permission for {tmp_path}." in capsys.readouterr().err


def test_table_outlives_a_file_that_cannot_be_written(capsys, monkeypatch, tmp_path):
    """What a long run found is on the terminal even when the disk is full."""
    full = OSError(28, "No space left on device")
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(full))
    options = ["--case", "rms_norm/no_token", "--json", str(tmp_path / "claim.json")]
    assert main(["conform", "--backend", "reference", *options]) == 1
    told = capsys.readouterr()
    assert "cases. Tiers: " in told.out
    assert "claim.json can't be written" in told.err


def test_slip_in_waivers_is_a_usage_error(capsys, tmp_path):
    """Exit code 2, and no run."""
    path = tmp_path / "waivers.toml"
    path.write_text("[[waiver]]\ncase='a'\nissue='https://x'\nuntil=2027-01-01\ncheck='orcale'")
    options = ["--backend", "reference", "--case", "rms_norm/no_token", "--waivers", str(path)]
    assert main(["conform", *options]) == 2
    assert "no check is called 'orcale'. Did you mean 'oracle'?" in capsys.readouterr().err


def test_absent_operator_is_unsupported(capsys):
    """A backend without the operator gives exit code 3, and the reason."""
    pytest.importorskip("m3hal_example_numpy", reason="the example is not installed")
    assert main(["conform", "--backend", "numpy", "--case", "linear/square"]) == 3
    assert "numpy does not implement linear" in capsys.readouterr().out
