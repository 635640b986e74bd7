"""The command line: what it prints, as text and as JSON, and how it exits."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import m3hal
from m3hal import ops
from m3hal.cli import COMMANDS, main
from m3hal.cli._matrix import Offer, _proved
from m3hal.dispatch import Impl, Manifest, at_most, devices, discovery, register, unregister


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The reference and a toy for an AMD card, whatever else is installed."""
    entries = [entry for entry in discovery._entries() if entry.name == "reference"]
    monkeypatch.setattr(discovery, "_entries", lambda: tuple(entries))
    monkeypatch.setattr(devices, "detect", lambda: (devices.Detected("cpu", "a CPU", 2**34, "test"),))
    for name in ("M3HAL_CONFIG", "M3HAL_BACKEND", "M3HAL_OPERATORS"):
        monkeypatch.delenv(name, raising=False)
    small = Impl("m3hal.reference:rms_norm", limits=(at_most("max_tokens", 16),), name="small")
    register(Manifest("acme", "toy", ">=1,<2", ("hip:gfx950",), {"rms_norm": (small,)}))
    yield
    unregister("acme")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """(exit code, stdout, stderr) of a command."""

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(arguments)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("confrom",), "invalid choice: 'confrom'. Did you mean 'conform'?"),
        (("claim", "verfy", "x.json"), "invalid choice: 'verfy'. Did you mean 'verify'?"),
        (("conform", "--qiuck"), "unrecognized arguments: --qiuck. Did you mean '--quick'?"),
        (("conform", "--bakend=acme"), "--bakend=acme. Did you mean '--backend'?"),
        (("conform", "--quic"), "Did you mean '--quick'?"),
        (("ops", "rms_norm", "linear"), "unrecognized arguments: linear\n"),
        (("xyz",), "choose from"),
    ],
)
def test_slips_on_the_command_line(capsys: Any, arguments: tuple[str, ...], sentence: str) -> None:
    """A mistyped command, action or option is told with the nearest one, and exits with 2; nothing is abbreviated."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert sentence in capsys.readouterr().err


def test_devices(run: Any) -> None:
    """Names that plans use, and the same as JSON."""
    code, out, _ = run("devices")
    assert code == 0
    assert "cpu" in out
    assert "16 GiB" in out
    assert json.loads(run("devices", "--json")[1])["devices"][0]["device"] == "cpu"


def test_backends(run: Any) -> None:
    """Each with a verdict; for another device on request; 3 when none is usable."""
    code, out, _ = run("backends")
    assert code == 0
    assert "usable on cpu" in out
    assert "rejected at device: it runs on hip:gfx950; not on cpu" in out
    data = json.loads(run("backends", "--json", "--device", "hip:gfx950")[1])
    assert {row["name"]: row["usable_on"] for row in data["backends"]}["acme"] == ["hip:gfx950"]
    assert run("backends", "--device", "hip")[0] == 2


def test_backends_exit_with_3_when_none_is_usable(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing supports the request."""
    monkeypatch.setattr(discovery, "_entries", tuple)
    assert run("backends")[0] == 3


def test_ops(run: Any) -> None:
    """All operators, or one whole definition."""
    code, out, _ = run("ops")
    assert code == 0
    assert all(name in out for name in ops.NAMES)
    code, out, _ = run("ops", "sparse_attention")
    assert code == 0
    for expected in ("sparse_attention(q: Tensor, kv: PagedCache", "Args:", "worst-row", "p_dtype", "MiniMax-AI/MSA"):
        assert expected in out
    data = json.loads(run("ops", "select_blocks", "--json")[1])
    assert data["covers"] == ["block_scores", "topk_blocks", "merge_topk"]
    assert data["statics"] == ["block_size", "top_k_blocks", "init_blocks", "local_blocks"]
    assert "m3hal:reference" in json.loads(run("ops", "rms_norm", "--json")[1])["implemented_by"]


def test_unknown_operator_is_a_usage_error(run: Any) -> None:
    """2, with the nearest name, as text or as JSON."""
    code, out, err = run("ops", "rmsnorm")
    assert (code, out) == (2, "")
    assert "Did you mean 'rms_norm'" in err
    code, out, _ = run("explain", "rmsnorm", "--json")
    assert code == 2
    assert "Did you mean 'rms_norm'" in json.loads(out)["error"]


def test_explain_shows_the_plan_and_its_reasons(run: Any) -> None:
    """The table, the configuration with its origin, the backends."""
    code, out, _ = run("explain", "--backend", "reference")
    assert code == 0
    for expected in ("m3hal plan", "moe_experts", "backend = 'reference' (from the command line)", "engine: vllm"):
        assert expected in out


def test_explain_an_operator_for_a_device_that_is_not_here(run: Any) -> None:
    """Verdicts on every implementation, libraries assumed."""
    arguments = ("explain", "rms_norm", "--device", "hip:gfx950", "--backend", "acme,reference")
    code, out, _ = run(*arguments)
    assert code == 0
    assert "acme small: rejected at limits: max_tokens is 8192; it takes 16 or less" in out
    assert "this machine has no hip:gfx950: not probed" in out
    code, out, _ = run(*arguments, "--max-tokens", "16", "--json")
    assert code == 0
    row = json.loads(out)["choices"][0]
    assert (row["backend"], row["impl"], row["operator"]) == ("acme", "small", "rms_norm")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--backend", "acmee"), 2, "Did you mean 'acme'"),
        (("--backend", "acme"), 3, "it runs on hip:gfx950; not on cpu"),
        (("--backend", "acme", "--device", "hip:gfx950"), 1, "ask for 'acme,reference'"),
        (("--device", "cuda"), 2, "cuda:sm_90"),
        (("--device", "gpu"), 2, "hpu:gaudi2. A backend names one in its manifest: devices=('gpu:*',).\n"),
        (("--device", "gpu:sm_90"), 2, "hpu:gaudi2. Did you mean 'cuda:sm_90'?"),
        (("--device", "cuda:sm90"), 2, "'cuda:sm90' is no device. Did you mean 'cuda:sm_90'?"),
        (("--device", "hip:gfx_950"), 2, "'hip:gfx_950' is no device. Did you mean 'hip:gfx950'?"),
        (("--dtype", "int8"), 2, "--dtype int8 is no format of activations. Known: bfloat16, float32, float64."),
        (("--operator", "rms_norm"), 2, "must read OP=BACKEND"),
        (("--operator", "rmsnorm=acme"), 2, "Did you mean 'rms_norm'"),
        (("--model", "/nowhere"), 2, "can't be read as a model's config.json"),
        (("--tp", "7"), 2, "can't be split over 7 ranks"),
        (("--tp", "0"), 2, "--tp 0 must be a whole number from 1 on."),
        (("--ep=-1",), 2, "--ep -1 must be a whole number from 1 on."),
        (("qkv_norm_rope_insert", "--backend", "reference"), 2, "plan. It covers linear, which vllm holds."),
        (
            ("draft_block_sample", "--backend", "reference", "--engine", "none"),
            2,
            "plan. It runs at drafter, which this model has not;",
        ),
        (("--max-context", "0"), 2, "--max-context 0 must be a whole number from 1 on."),
        (("--device", ""), 2, "'' is not a device"),
        (("--kv-format", "nvfp5"), 2, "--kv-format nvfp5 is no cache format. Did you mean 'nvfp4'?"),
        (("--index-format", "int8"), 2, "--index-format int8 is no cache format."),
        (("--layouts", "hndd"), 2, "--layouts hndd: 'hndd' is no layout of pages. Did you mean 'hnd'?"),
    ],
)
def test_explain_exit_codes(run: Any, arguments: tuple[str, ...], code: int, message: str) -> None:
    """1 for a failed plan, 2 for a request that means nothing, 3 for what nothing supports."""
    got, out, err = run("explain", *arguments)
    assert (got, out) == (code, "")
    assert message in err


def test_explain_exits_with_3_when_the_in_tree_model_stays(run: Any) -> None:
    """Auto found nothing for the device; asking for vLLM is a success."""
    code, out, _ = run("explain", "--device", "cuda:sm_90")
    assert code == 3
    assert "vLLM's in-tree model stays: no installed backend is for cuda:sm_90" in out
    assert run("explain", "--device", "cuda:sm_90", "--backend", "vllm")[0] == 0


def test_explain_prints_what_can_be_pinned(run: Any, tmp_path: Path) -> None:
    """``--json`` is the form that is pinned, as `m3hal plan export` writes it."""
    file = tmp_path / "plan.json"
    file.write_text(run("explain", "--json", "--backend", "reference")[1])
    assert run("explain", "--plan", str(file))[0] == 0
    assert run("explain", "--plan", str(tmp_path / "none.json"))[0] == 2


def test_explain_reads_a_checkpoint(run: Any, tmp_path: Path) -> None:
    """A folder with config.json, nested as published."""
    small = {**m3hal.MINIMAX_M3, "num_hidden_layers": 2, "moe_layer_freq": [1, 1]}
    small["sparse_attention_config"] = {**small["sparse_attention_config"], "sparse_attention_freq": [1, 1]}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": small}))
    code, out, _ = run("explain", "--model", str(tmp_path), "--json")
    assert code == 0
    assert {row["site"] for row in json.loads(out)["choices"]} == {"", "sparse_attention", "moe"}
    (tmp_path / "config.json").write_text("{}")
    assert run("explain", "--model", str(tmp_path))[0] == 2


def test_doctor_is_content(run: Any) -> None:
    """Versions and no problem; a backend for another device is none."""
    code, out, _ = run("doctor")
    assert (code, out.splitlines()[-1]) == (0, "  none"), out
    assert json.loads(run("doctor", "--json")[1])["versions"]["m3hal"] == m3hal.__version__


def test_doctor_finds_what_is_wrong(tmp_path: Path) -> None:
    """A failing plugin with its traceback, a stale and a shadowed distribution, a lie, a wrong variable."""
    first, second = tmp_path / "first", tmp_path / "second"
    _distribution(first, "m3hal-acme", "2.0", "acme")
    _distribution(second, "m3hal-acme", "1.0", "acme")
    _distribution(first, "gone", "1.0", "gone")
    (first / "m3hal_acme").mkdir()
    (first / "m3hal_acme" / "__init__.py").write_text("import a_library_that_is_not_there\n")
    path = f"{first}:{second}"
    command = [sys.executable, "-m", "m3hal", "doctor"]
    environ = {"PATH": "/usr/bin:/bin", "PYTHONPATH": path, "M3HAL_BACKEN": "acme"}
    done = subprocess.run(command, capture_output=True, text=True, env=environ)
    assert done.returncode == 1, done.stderr
    problems = done.stdout.partition("problems\n")[2]
    for expected in (
        "Did you mean 'M3HAL_BACKEND'",
        f"m3hal-acme 2.0 in {first} hides 1.0 in {second}",
        "gone 1.0 is stale: its entry point gone is gone:MANIFEST, but there is no module gone",
        "m3hal-acme:acme: rejected at import: importing m3hal_acme:MANIFEST raised ModuleNotFoundError",
    ):
        assert expected in problems
    assert "Traceback (most recent call last)" in done.stdout
    assert "import a_library_that_is_not_there" in done.stdout


def _distribution(folder: Path, name: str, version: str, backend: str) -> None:
    module = name.replace("-", "_")
    info = folder / f"{module}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(f"[m3hal.backends]\n{backend} = {module}:MANIFEST\n")


def test_closed_pipe_is_no_traceback() -> None:
    """``m3hal ops | head -1``."""
    command = f"{sys.executable} -m m3hal ops --json | head -c 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.stdout == "{"
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("where", "code", "told"),
    [
        ("> /dev/full", 1, "m3hal: the output can't be written: No space left on device.\n"),
        (">&-", 0, ""),
        ("2>&- --nonsense", 2, ""),
    ],
)
@pytest.mark.parametrize("command", ["devices", "ops --json"])
def test_output_that_goes_nowhere_is_no_traceback(where: str, code: int, told: str, command: str) -> None:
    """A full disk fails the command; a stream that was closed before it began is none of its business."""
    script = f"{sys.executable} -m m3hal {command} {where}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (code, told)


@pytest.mark.parametrize("arguments", [("explain", "--model"), ("plan", "diff"), ("convert", "mxfp4-to-fp8")])
def test_contents_in_place_of_a_name(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """``--model "$(cat config.json)"``: a sentence, whichever command looks for the file first."""
    contents = '{"architectures": []}' * 300
    rest = ("there", "--profile", "hopper") if arguments[0] == "convert" else ()
    assert main((*arguments, contents, *rest)) == 2
    error = capsys.readouterr().err
    assert error.startswith("m3hal: ")
    assert "File name too long" in error


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_documents_itself_and_knows_json(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """--help shows the command's docstring; --json is everywhere."""
    with pytest.raises(SystemExit) as caught:
        main((name, "--help"))
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert "--json" in out
    assert COMMANDS[name].__doc__.splitlines()[0] in out


def test_usage_errors_exit_with_2() -> None:
    """argparse's own."""
    for arguments in (("--json",), ("dance",), ("explain", "--min-level", "perfect")):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2


def test_no_command_lists_the_commands(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On stderr and with 2, as a usage error; so does the program without arguments."""
    monkeypatch.setattr(sys, "argv", ["m3hal"])
    code, out, err = run()
    assert (code, out) == (2, "")
    assert all(name in err for name in COMMANDS)
    assert main() == 2


def test_an_interrupt_is_no_traceback(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command line ends with 130, as shells tell it; a program that calls main keeps its Ctrl-C."""

    def interrupted(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(COMMANDS["devices"], "run", interrupted)
    monkeypatch.setattr(sys, "argv", ["m3hal", "devices"])
    assert main() == 130
    with pytest.raises(KeyboardInterrupt):
        run("devices")


@pytest.mark.parametrize(("short", "long"), [("bf16", "bfloat16"), ("fp32", "float32")])
def test_explain_takes_short_names_of_dtypes(run: Any, short: str, long: str) -> None:
    """The plan is that of the whole name."""
    plans = [run("explain", "--backend", "reference", "--dtype", dtype, "--json") for dtype in (short, long)]
    assert plans[0] == plans[1]
    assert plans[0][0] == 0


def test_explain_takes_the_formats_of_both_caches(run: Any) -> None:
    """By their short names; the index cache has the KV cache's unless told otherwise."""
    asked = ("explain", "--backend", "reference", "--json", "--kv-format", "fp8")
    for more, index in (((), "fp8_e4m3"), (("--index-format", "nvfp4"), "nvfp4")):
        code, out, _ = run(*asked, *more)
        site = json.loads(out)["sites"]["sparse_attention"]
        assert (code, site["kv_format"], site["index_format"]) == (0, "fp8_e4m3", index)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"hidden_size": 1e999, "sparse_attention_config": 5}', '{"a": NaN}'])
def test_a_hostile_configuration_is_a_sentence(run: Any, tmp_path: Path, text: str) -> None:
    """Nested too deeply, with infinities, with numbers for tables: 2, for both commands that read one."""
    path = tmp_path / "config.json"
    path.write_text(text)
    for arguments in (("explain", "--model", str(path)), ("capacity", "--gpu", "B300", "--model", str(path))):
        code, _, err = run(*arguments)
        assert (code, err.startswith("m3hal: ")) == (2, True), err


def test_explain_takes_a_kind_that_an_installed_manifest_names(run: Any) -> None:
    """A third party's device is legal, and told among the known ones."""
    rms_norm = Impl("m3hal.reference:rms_norm")
    register(Manifest("novel", "toy", ">=1,<2", ("npu:*",), {"rms_norm": (rms_norm,)}))
    try:
        assert run("explain", "--device", "npu:v1", "--backend", "vllm")[0] == 0
        assert "hpu:gaudi2, npu:*." in run("explain", "--device", "gpu")[2]
        assert run("explain", "--device", "npu:v1", "--deny", "novel")[0] == 3
    finally:
        unregister("novel")


@pytest.mark.parametrize(
    ("device", "stale", "words"),
    [
        ("cpu", "", "run on a CPU"),
        ("cuda:sm_90", "", "run on hardware"),
        ("cuda:sm_90", "m3hal claim verify x", "stale: ran with other files"),
    ],
)
def test_proofs_in_words(device: str, stale: str, words: str) -> None:
    """A CPU is no hardware that was missing, and of files that changed after they ran the table says so."""
    assert _proved(Offer("acme", "linear", ("moe",), "fast", "hardware", "", stale), device) == words


def test_an_unknown_kind_imports_no_backend_that_the_policy_excludes(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking for a kind among manifests asks the policy about each backend first, as planning does."""
    asked = []

    def spy(refusal: Any = None) -> tuple[()]:
        asked.append(refusal("acme", "toy"))
        return ()

    monkeypatch.setattr("m3hal.dispatch.admission.discover", spy)
    assert run("explain", "--device", "gpu", "--deny", "acme")[0] == 2
    assert asked[0] is not None
    assert "den" in asked[0]


def test_explain_an_operator_that_vllm_keeps(run: Any) -> None:
    """Asking for vLLM's model answers who serves the operator, and is no usage error."""
    code, out, _ = run("explain", "sparse_attention", "--backend", "vllm")
    assert code == 0
    assert "sparse_attention: vLLM's own model serves it; m3hal dispatches nothing" in out
    shape = m3hal.ModelShape.from_config(
        m3hal.MINIMAX_M3, dtype="float32", page_size=128, max_tokens=16, max_seqs=2, max_context=256
    )
    made = m3hal.plan(shape, "cpu", m3hal.Policy.resolve({"backend": "vllm"}))
    with pytest.raises(m3hal.M3halError, match="vLLM's own model serves rms_norm and m3hal dispatches nothing"):
        made.rows("rms_norm")


@pytest.mark.parametrize("command", ["convert mxfp4-to-fp8 SRC DST --profile hopper", "validate DST --source SRC"])
def test_checkpoint_commands_without_numpy_exit_with_3(command: str) -> None:
    """One sentence that names the extra."""
    program = "import sys; sys.modules['numpy'] = None; from m3hal.cli import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run([sys.executable, "-c", program, *command.split()], capture_output=True, text=True)
    assert done.returncode == 3, done.stderr
    assert "needs NumPy" in done.stderr
    assert done.stderr.endswith("pip install 'm3hal[convert]'\n")


def test_convert_without_a_source_is_a_usage_error(run: Any, tmp_path: Path) -> None:
    """2, dry or not, as for validate."""
    paths = (str(tmp_path / "none"), str(tmp_path / "fp8"))
    for extra in ((), ("--dry-run",)):
        code, _, err = run("convert", "mxfp4-to-fp8", *paths, "--profile", "hopper", *extra)
        assert code == 2
        assert "none is not a folder" in err


@pytest.mark.parametrize("name", ["reference", "auto", "vllm"])
def test_new_backend_refuses_reserved_names(run: Any, name: str, tmp_path: Path) -> None:
    """And says so; nothing is written."""
    code, _, err = run("new-backend", name, "--into", str(tmp_path))
    assert code == 2
    assert f"the name {name!r} is reserved" in err
    assert not list(tmp_path.iterdir())


def test_new_backend_imports_from_m3hal(run: Any, tmp_path: Path) -> None:
    """The scaffold's manifest loads, by the names that the documentation uses."""
    assert run("new-backend", "fresh", "--into", str(tmp_path))[0] == 0
    text = (tmp_path / "m3hal-fresh" / "m3hal_fresh" / "__init__.py").read_text()
    assert "from m3hal import Impl, Manifest, one_of" in text
    names: dict[str, Any] = {}
    exec(text, names)
    assert names["MANIFEST"].name == "fresh"
