"""What a vendor got wrong before a kernel runs is a failure with its sentence, neither unsupported nor a crash."""

import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
from m3hal_conformance import reports
from m3hal_conformance.results import CheckResult, Result
from m3hal_conformance.runner import Runner
from m3hal_conformance.suite import select
from m3hal_conformance.trial import Unsupported

from m3hal import ops
from m3hal.cli import main
from m3hal.dispatch import Impl, Manifest, one_of, register, unregister
from m3hal.reference import bind_definition

CASE = "rms_norm/no_token"


def raises(site):
    raise RuntimeError("the library\nis too old")


def no_callable(site):
    return 5


def right(site):
    from m3hal import ops

    return bind_definition(ops.load("rms_norm"), site)


@pytest.fixture
def faulty(monkeypatch):
    """Registers a backend ``faulty`` with one entry for rms_norm."""
    module = SimpleNamespace(raises=raises, no_callable=no_callable, right=right, __spec__=None)
    monkeypatch.setitem(sys.modules, "m3hal_faulty", module)

    def made(entry, name="rms_norm"):
        register(Manifest("faulty", "m3hal tests", ">=1,<2", ("cpu",), {name: entry}))

    yield made
    unregister("faulty")


def impl(name, **what):
    return Impl(f"m3hal_faulty:{name}", **what)


@pytest.mark.parametrize(
    ("entry", "check", "sentence"),
    [
        ((impl("right", limits=(one_of("dtyp", "bfloat16"),)),), "manifest", "Did you mean 'dtype'?"),
        ((impl("right"), impl("raises", limits=(one_of("dtyp", "bfloat16"),))), "manifest", "raises: it limits 'dtyp'"),
        (impl("right"), "manifest", "must be a tuple of Impl"),
        ((impl("raises"),), "bind", "RuntimeError: the library is too old"),
        ((impl("no_callable"),), "bind", "returned 5"),
        ((impl("not_there"),), "bind", "AttributeError"),
    ],
)
def test_fault_fails_the_run(faulty, capsys, entry, check, sentence):
    """The command exits with 1 and names the fault, in fp32 and in bf16."""
    faulty(entry)
    assert main(["conform", "--backend", "faulty", "--device", "cpu", "--case", CASE]) == 1
    printed = capsys.readouterr().out
    assert f"FAIL {CASE}/float32\n  {check}: " in printed
    assert printed.count(sentence) == 1
    assert f"\n  the same: {CASE}/bfloat16\n  again: " in printed
    assert "1 check failed" in printed


@pytest.mark.parametrize(
    ("name", "case", "sentence"),
    [
        ("rms_nrom", f"FAIL {CASE}/float32", "'rms_nrom' is no operator of this m3hal. Did you mean 'rms_norm'?"),
        ("warp", "FAIL warp/manifest", "'warp' is no operator of this m3hal. Known: add_rms_norm, "),
    ],
)
def test_a_misspelt_operator_is_refused_by_name(faulty, capsys, monkeypatch, name, case, sentence):
    """It fails the cases of the operator that was meant, or one of its own; `m3hal backends` names it too."""
    monkeypatch.setattr("m3hal_conformance.command._cases", lambda options: select(ids=[CASE]))
    faulty((impl("right"),), name)
    assert main(["conform", "--backend", "faulty", "--device", "cpu"]) == 1
    printed = capsys.readouterr().out
    assert case in printed
    assert sentence in printed
    assert "faulty: " in printed or name == "warp"  # the sentence begins with the backend, which has no such entry
    assert "faulty :" not in printed
    main(["backends", "--device", "cpu"])
    assert sentence in capsys.readouterr().out


def test_fault_of_one_operator_leaves_the_others(faulty):
    """The run goes on: cases of another operator keep their own result."""
    faulty((impl("raises"),))
    results = Runner("faulty", "cpu").run(select(ids=[CASE, "linear/square"]))
    assert {(r.operator, r.status) for r in results} == {("rms_norm", "fail"), ("linear", "unsupported")}


def test_one_slip_is_one_block():
    """Cases that fail with one sentence are told together, the rest one by one, up to twenty blocks."""
    claim = {"backend": "acme", "device": "cpu", "seed": 0, "tiers": {}, "coverage": {}}
    slip = (CheckResult("manifest", False, None, "a slip"),)
    alike = [Result(f"a/{n}/float32", "a", "float32", "fail", slip) for n in range(6)]
    apart = [Result(f"b/{n}/f", "b", "f", "fail", (CheckResult("oracle", False, 2.0, f"{n}"),)) for n in range(21)]
    printed = reports.terminal(claim, [*alike, *apart], selected=True)
    assert printed.count("a slip") == 1
    assert "  the same: a/1/float32, a/2/float32, a/3/float32 and 2 more\n" in printed
    assert printed.count("FAIL ") == 20
    assert "and 2 more failed; --html FILE shows all." in printed


@pytest.mark.parametrize(("ratio", "printed"), [(1e308, "1e+308"), (float("inf"), "inf"), (0.4321, "0.432")])
def test_ratios_are_short(ratio, printed):
    """Three digits, whatever the size."""
    found = Result("a/b/c", "a", "float32", "fail", (CheckResult("oracle", False, ratio, "far"),))
    assert reports.matrix([found])[1][5:] == [printed, "1 check failed"]


def test_failed_checks_are_counted():
    """Two checks are plural."""
    found = Result("a/b/c", "a", "float32", "fail", tuple(CheckResult(n, False) for n in ("oracle", "rerun")))
    assert reports.matrix([found])[1][6] == "2 checks failed"


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [("foo", "begin with an operator: rms_norm, "), ("rms_norm/no_tokn", "rms_norm/no_token")],
)
def test_unknown_case_is_a_short_refusal(capsys, asked, sentence):
    """Near matches or the operators, not every id; also beside an id that is known."""
    assert main(["conform", "--backend", "reference", "--case", CASE, "--case", asked]) == 2
    printed = capsys.readouterr().err
    assert f"no case is called {asked!r}" in printed
    assert sentence in printed
    assert len(printed) < 700


def test_selection_that_contradicts_itself_is_said(capsys):
    """A case of another operator than the one asked for."""
    assert main(["conform", "--backend", "reference", "--op", "linear", "--case", CASE]) == 2
    assert "no case meets all of" in capsys.readouterr().err


def skips(site):
    return lambda *inputs, out=None: pytest.skip("not today")


def excuses(site):
    def run(*inputs, out=None):
        raise Unsupported("inputs like these are never asked for")

    return run


def asserts(site):
    def run(*inputs, out=None):
        raise AssertionError("unreachable")

    return run


@pytest.mark.parametrize(
    ("kernel", "kind"), [(skips, "Skipped"), (excuses, "Unsupported"), (asserts, "AssertionError")]
)
def test_an_exception_of_a_kernel_fails_its_case(faulty, capsys, monkeypatch, kernel, kind):
    """Also those by which the suite or pytest say that a case is not asked."""
    monkeypatch.setattr(sys.modules["m3hal_faulty"], "right", kernel)
    faulty((impl("right"),))
    assert main(["conform", "--backend", "faulty", "--device", "cpu", "--case", CASE]) == 1
    assert f"the call raised {kind}" in capsys.readouterr().out


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Writes a distribution ``m3hal-made`` whose kernel lies in a module that its manifest may list."""

    def made(kernel, files=(), more=()):
        folder = tmp_path / "m3hal_made"
        (folder / "inner").mkdir(parents=True)
        (folder / "__init__.py").write_text("")
        (folder / "inner" / "__init__.py").write_text("")
        (folder / "inner" / "kernel.py").write_text(kernel)
        (folder / "factory.py").write_text(
            "def rms_norm(site):\n    from .inner import kernel\n    return kernel.make(site)\n"
        )
        (folder / "manifest.py").write_text(
            "from m3hal.dispatch import Impl, Manifest\n"
            f"IMPL = Impl('m3hal_made.factory:rms_norm', memory='self', traceable=False, files={tuple(files)!r})\n"
            "MANIFEST = Manifest('made', 'tests', '>=1,<2', ('cpu',), {'rms_norm': (IMPL,)})\n"
        )
        told = tmp_path / "m3hal_made-1.dist-info"
        told.mkdir()
        (told / "METADATA").write_text("Metadata-Version: 2.1\nName: m3hal-made\nVersion: 1\n")
        (told / "entry_points.txt").write_text("[m3hal.backends]\nmade = m3hal_made.manifest:MANIFEST\n")
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH")))))
        command = [
            sys.executable,
            "-m",
            "m3hal",
            "conform",
            "--backend",
            "made",
            "--device",
            "cpu",
            "--case",
            CASE,
            *more,
        ]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    return made


RIGHT = """
from m3hal import ops
from m3hal.reference import bind_definition
def make(site):
    return bind_definition(ops.load('rms_norm'), site)
"""


def test_modules_that_an_implementation_imports_are_listed(package):
    """A claim would not die with a change in one that is not."""
    ended = package(RIGHT)
    assert ended.returncode == 1
    assert "manifest: it runs m3hal_made.inner.kernel, which its files do not list" in ended.stdout


def test_listed_modules_are_taken(package):
    """A pattern of files covers them."""
    ended = package(RIGHT, ["inner/*.py"])
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize(("leave", "how"), [("os._exit(0)", "exit status 0"), ("os.abort()", "signal SIGABRT")])
def test_a_kernel_that_ends_the_process_fails_the_run(package, leave, how):
    """No exit code of its own making is taken for a pass; the case is named."""
    ended = package(
        f"import os\ndef make(site):\n    return lambda *inputs, out=None: {leave}\n",
        ["inner/*.py"],
    )
    assert ended.returncode == 1
    assert f"the suite's process ended while it asked {CASE}/float32: {how}" in ended.stderr


@pytest.mark.parametrize(
    ("number", "code", "jobs"),
    [(signal.SIGTERM, 143, 1), (signal.SIGINT, 130, 1), (signal.SIGTERM, 143, 2), (signal.SIGHUP, 129, 1)],
)
def test_stopping_the_command_stops_the_suite(number, code, jobs, tmp_path):
    """No suite outlives its command, as one would that a CI job's time limit kills; no backend is blamed.

    Nothing is written: an earlier claim stays, and no part of a new one lies beside it.
    """
    (tmp_path / "claim.json").write_text("an earlier one")
    command = [sys.executable, "-m", "m3hal", "conform", "--backend", "reference", "--device", "cpu"]
    command += ["--op", "rms_norm", "--op", "linear"]
    command += ["--jobs", str(jobs), "--json", str(tmp_path / "claim.json"), "--html", str(tmp_path / "page.html")]
    where = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True, env=where) as running:
        assert "failed" in running.stderr.readline()  # a tenth of the cases: the suite is running
        if number == signal.SIGINT:
            os.killpg(running.pid, number)  # as a terminal does
        else:
            running.send_signal(number)
        told = running.stderr.read()  # ends when the child, too, has closed it
        assert running.wait(30) == code
    assert "A backend may have ended it" not in told
    assert (tmp_path / "claim.json").read_text() == "an earlier one"
    assert [path.name for path in tmp_path.iterdir() if "m3hal" in path.name or "page" in path.name] == []


def test_a_sentence_at_the_end_is_no_fault_of_a_backend(package, tmp_path, monkeypatch):
    """A refusal after the cases ran keeps its exit code, and nothing is added to it."""
    monkeypatch.setenv("M3HAL_TEST_FULL", str(tmp_path / "full.json"))
    (tmp_path / "sitecustomize.py").write_text(
        "import os\nreplace = os.replace\n"
        "def refuse(source, target, **more):\n"
        "    if str(target) == os.environ['M3HAL_TEST_FULL']: raise OSError('no space')\n"
        "    return replace(source, target, **more)\n"
        "os.replace = refuse\n"
    )
    ended = package(RIGHT, ["inner/*.py"], ["--json", str(tmp_path / "full.json")])
    assert ended.returncode == 1
    assert "no space" in ended.stderr
    assert "A backend may have ended it" not in ended.stderr


def test_a_suite_that_is_killed_before_it_begins_is_a_failure(package, tmp_path):
    """As by a kernel that has no memory left: exit code 1 and a sentence, as it can't have said why."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal\nif '_M3HAL_CONFORM_DIARY' in os.environ: os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = package(RIGHT, ["inner/*.py"])
    assert ended.returncode == 1
    assert "the suite's process ended: signal SIGKILL." in ended.stderr


def test_an_exit_after_the_run_changes_nothing(package):
    """The code is the one that the suite wrote down."""
    ended = package(
        "import atexit, os\natexit.register(os._exit, 0)\n"
        "def make(site):\n    return lambda *inputs, out=None: out.zero_()\n",
        ["inner/*.py"],
    )
    assert ended.returncode == 1
    assert "FAIL" in ended.stdout


def test_a_tier_needs_the_published_sizes(monkeypatch):
    """A backend whose limits leave only other models' sizes serves no operator of MiniMax-M3."""
    narrow = Impl("m3hal.reference:route_topk", memory="self", limits=(one_of("top_k_experts", 1),))
    register(Manifest("narrow", "m3hal tests", ">=1,<2", ("cpu",), {"route_topk": (narrow,)}))
    try:
        assert Runner("narrow", "cpu").published_operators() == []
    finally:
        unregister("narrow")
    assert set(Runner("reference", "cpu").published_operators()) == set(ops.CORE)


@pytest.mark.parametrize(
    ("device", "code", "sentence"),
    [
        ("cuda:sm_999", 3, "this machine has no cuda:sm_999, so nothing can be asked there"),
        ("tpu9", 2, "'tpu9' is of no kind that m3hal, torch or the manifest of a backend that is asked names"),
        ("cuda", 2, "device 'cuda' needs its architecture"),
    ],
)
def test_a_device_that_is_not_here_is_no_failure(capsys, device, code, sentence):
    """3 for a device that this machine lacks, 2 for what is none; no case is said to fail."""
    assert main(["conform", "--backend", "reference", "--device", device, "--case", CASE]) == code
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ({"layouts": ("nhdd",)}, "its layout 'nhdd' is no page map. Did you mean 'nhd'"),
        ({"limits": (one_of("dtype", "bf16"),)}, "its limit on dtype takes 'bf16', which no dtype is"),
        ({"limits": (one_of("kv_format", "fp8"),)}, "its limit on kv_format takes 'fp8', which no kv_format is"),
    ],
)
def test_values_that_nothing_has_are_faults(faulty, capsys, what, sentence):
    """They would exclude every case, and read as unsupported."""
    faulty((impl("right", **what),))
    assert main(["conform", "--backend", "faulty", "--device", "cpu", "--case", CASE]) == 1
    assert sentence in capsys.readouterr().out
