"""`m3hal doctor --bundle`: one archive, whole, without secrets."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from m3hal.cli import main
from m3hal.cli._bundle import REDACTED, captures, redacted

SECRETS = ("hf_abcdefghijklmnop", "sk-proj-abcdefghijkl", "ghp_0123456789abcdef", "hunter2", "swordfish")


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Its members and what was printed, for a user who has secrets in many places."""
    home = tmp_path / "jane"
    (home / "captures").mkdir(parents=True)
    (home / "captures" / "moe_experts-000.pt").write_bytes(b"12345")
    plan = home / "plan.json"
    assert main(["plan", "export", str(plan), "--backend", "reference", "--device", "cpu"]) == 0
    (home / "fleet.toml").write_text('backend = "reference"\n[devices.cpu]\nmin_level = "declared"\n')
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("M3HAL_CONFIG", str(home / "fleet.toml"))
    monkeypatch.setenv("M3HAL_CAPTURE_DIR", str(home / "captures"))
    monkeypatch.setenv("VLLM_API_KEY", SECRETS[4])
    monkeypatch.setenv("VLLM_NOTE", f"{SECRETS[0]} {SECRETS[1]} {SECRETS[2]} https://jane:{SECRETS[3]}@example.org/x")
    monkeypatch.setenv("HF_TOKEN", "hf_notoursatall00")
    capsys.readouterr()
    code = main(["doctor", "--bundle", str(tmp_path / "report.zip"), "--plan", str(plan)])
    with zipfile.ZipFile(tmp_path / "report.zip") as archive:
        members = {Path(name).name: archive.read(name).decode() for name in archive.namelist()}
    return code, members, capsys.readouterr().out, home


def test_it_holds_what_a_report_needs(bundle: Any) -> None:
    """Versions and verdicts, the policy of this device with where it came from, claims, captures, the plan."""
    _, members, out, _ = bundle
    found = {name: json.loads(text) for name, text in members.items()}
    assert list(found) == [
        *("doctor.json", "policy.json", "environment.json", "claims.json", "captures.json", "plan.json"),
    ]
    assert found["doctor.json"]["versions"]["m3hal"]
    assert all("verdict" in backend for backend in found["doctor.json"]["backends"])
    assert found["policy.json"]["asked"]["backend"] == "reference"
    assert found["policy.json"]["origins"]["backend"] == "'reference' (from the file ~/fleet.toml (M3HAL_CONFIG))"
    assert found["captures.json"]["files"][0]["name"] == "moe_experts-000.pt"
    assert found["plan.json"]["device"] == "cpu"
    assert all("results" not in claim for claim in found["claims.json"])
    for name, text in members.items():
        assert f"{name:<18} {len(text.encode())} bytes" in out


def test_it_holds_no_secret(bundle: Any) -> None:
    """Not by name, not by look, not the home folder; other programs' variables are not there at all."""
    _, members, _, home = bundle
    text = "".join(members.values())
    for secret in (*SECRETS, str(home), "HF_TOKEN", "hf_notoursatall00"):
        assert secret not in text
    environment = json.loads(members["environment.json"])
    assert environment["VLLM_API_KEY"] == REDACTED
    assert environment["VLLM_NOTE"] == f"{REDACTED} {REDACTED} {REDACTED} https://{REDACTED}@example.org/x"
    assert environment["M3HAL_CONFIG"] == "~/fleet.toml"


def test_what_is_no_secret_stays() -> None:
    """Hashes, module paths, and a folder that only begins like the home folder."""
    text = "adbef83a6ccfbe29 m3hal_triton.norm:rms_norm /home/janet/x https://example.org/a:b sk-8"
    assert redacted(text, "/home/jane") == text
    assert redacted("/home/jane/x /home/jane", "/home/jane") == "~/x ~"
    assert redacted("/root", "/") == "/root"


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("nvapi-AbCdEf0123456789", REDACTED),
        ("glpat-abcdefghij1234567890", REDACTED),
        ("AIzaSyA1234567890abcdefghijklmnopqrstuv", REDACTED),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.abcdef", REDACTED),
        ("-----BEGIN OPENSSH PRIVATE KEY-----\nabc\n", REDACTED),
        ("Authorization: Basic dXNlcjpwYXNz", f"Authorization: Basic {REDACTED}"),
        ("https://jane:p@ss@example.org/x", f"https://{REDACTED}@example.org/x"),
        ("https://example.org/x?token=abc&n=1", f"https://example.org/x?token={REDACTED}&n=1"),
        ("aws_secret_access_key=wJalr/K7", f"aws_secret_access_key={REDACTED}"),
        ('{"api_key": "abc"}', f'{{"api_key": "{REDACTED}"}}'),
        ("serve --api-key abc --port 1", f"serve --api-key {REDACTED} --port 1"),
        ("max_tokens=8192, 5 bytes per token 7", "max_tokens=8192, 5 bytes per token 7"),
    ],
)
def test_what_looks_like_a_secret(text: str, kept: str) -> None:
    """By its beginning, by the name beside it, by its place in a URL; counts of tokens are none."""
    assert redacted(text) == kept


@pytest.mark.parametrize("name", ["jané", "link"])
def test_the_home_folder_however_it_is_spelt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """With a letter that JSON escapes; as a link's name and as what it leads to."""
    real = tmp_path / "jané"
    real.mkdir()
    (tmp_path / "link").symlink_to(real)
    monkeypatch.setenv("HOME", str(tmp_path / name))
    monkeypatch.setenv("M3HAL_CAPTURE_DIR", str(real))
    monkeypatch.setenv("VLLM_CACHE_ROOT", f"{tmp_path / name}/x")
    main(["doctor", "--bundle", str(tmp_path / "a.zip")])
    with zipfile.ZipFile(tmp_path / "a.zip") as archive:
        found = json.loads(archive.read("m3hal-bundle/environment.json"))
        folder = json.loads(archive.read("m3hal-bundle/captures.json"))["folder"]
    assert (found["M3HAL_CAPTURE_DIR"], found["VLLM_CACHE_ROOT"], folder) == ("~", "~/x", "~")


def test_a_user_without_a_home_can_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container that runs under a number that nobody has, with a variable that is no text."""
    monkeypatch.delenv("HOME")
    monkeypatch.setenv("VLLM_NOTE", "\udcff")
    monkeypatch.setattr("pwd.getpwuid", lambda _: (_ for _ in ()).throw(KeyError("uid")))
    assert main(["doctor", "--bundle", str(tmp_path / "a.zip")]) in (0, 1)
    assert zipfile.is_zipfile(tmp_path / "a.zip")


def test_captures_that_cannot_be_read_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Someone else's folder."""
    monkeypatch.setattr(Path, "glob", lambda *_: (_ for _ in ()).throw(PermissionError("not yours")))
    assert captures({"M3HAL_CAPTURE_DIR": str(tmp_path)}) == {"folder": str(tmp_path), "error": "not yours"}


def test_slips(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A plan without an archive, a file that is no plan: 2; a folder that is not there: 1, and nothing is left."""
    assert main(["doctor", "--plan", "plan.json"]) == 2
    assert main(["doctor", "--bundle", str(tmp_path / "a.zip"), "--plan", str(tmp_path / "none.json")]) == 2
    assert main(["doctor", "--bundle", str(tmp_path / "none" / "a.zip")]) == 1
    assert "name another file" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_policy_that_means_nothing_is_packed_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A report about a bad configuration can be made."""
    monkeypatch.setenv("M3HAL_MIN_LEVEL", "hardwear")
    assert main(["doctor", "--bundle", str(tmp_path / "a.zip"), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["bundle"]["files"].keys() >= {"policy.json"}
    with zipfile.ZipFile(tmp_path / "a.zip") as archive:
        assert "Did you mean 'hardware'" in json.loads(archive.read("m3hal-bundle/policy.json"))["error"]
