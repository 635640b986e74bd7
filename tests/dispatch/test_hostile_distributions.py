"""Installed distributions that break, refuse or lie: each becomes a verdict, and everybody else works."""

from __future__ import annotations

import json
from typing import Any

FAILING = {
    "importing": ("raise ImportError('no libacme.so')", "import", "ImportError: no libacme.so"),
    "asserting": ("assert False, 'too old'", "import", "AssertionError: too old"),
    "exiting": ("raise SystemExit(3)", "import", "SystemExit: 3"),
    "leaving": ("import sys; sys.exit('bye')", "import", "SystemExit: bye"),
    "dividing": ("1 / 0", "import", "ZeroDivisionError"),
    "panicking": (
        "class Panic(BaseException): pass\nraise Panic('rust')",
        "import",
        "Panic: rust",
    ),
    "cancelled": ("import asyncio; raise asyncio.CancelledError", "import", "CancelledError"),
    "recursing": ("def f(): f()\nf()", "import", "RecursionError"),
    "speechless": (
        "class E(Exception):\n    def __str__(self): raise ValueError\nraise E",
        "import",
        "E, which has no readable message",
    ),
    "unmade": (
        "from m3hal import Manifest; MANIFEST = object.__new__(Manifest)",
        "manifest",
        "it was not made by m3hal.Manifest",
    ),
    "subclass": (
        "from m3hal import Manifest\nclass Own(Manifest): pass\nMANIFEST = Own('subclass', 'toy', '>=1', ('*',), {})",
        "manifest",
        "it is a Own, not a m3hal.Manifest",
    ),
    "nothing": ("something = 1", "import", "AttributeError"),
    "unreadable": ("this is no Python", "import", "SyntaxError"),
    "dict": ("MANIFEST = {'name': 'dict'}", "manifest", "it is a dict, not a m3hal.Manifest"),
    "renamed": (
        "from m3hal import Manifest; MANIFEST = Manifest('other', 'toy', '>=1', ('*',), {})",
        "manifest",
        "the entry point is called 'renamed' but its manifest 'other'",
    ),
}


def test_failing_manifests_are_verdicts(environment: Any) -> None:
    """Whatever a manifest's import does, the reason is kept and everybody else works."""
    for name, (source, _, _) in FAILING.items():
        environment.install(name, files={"manifest.py": source})
    environment.install("zeta", operators=("rms_norm",))
    got = environment.run("""
        p = made()
        print(json.dumps([verdicts(p), servers(p)["rms_norm"], refusal({"backend": "exiting"})]))
    """)
    for name, (_, stage, reason) in FAILING.items():
        assert got[0][f"m3hal-{name}:{name}"][0] == stage
        assert reason in got[0][f"m3hal-{name}:{name}"][1]
    assert got[1] == "zeta"
    assert got[2][0] == "UnsupportedError"
    assert "SystemExit: 3" in got[2][1]
    assert got[2][1].endswith("`m3hal doctor` shows the traceback.")


#: What a manifest can say that is nonsense -> what is said about it.
NONSENSE = {
    "wildcard": ("api='==x.*'", "'x' is not a version"),
    "bytes": ("api=b'>=1'", "it must be a version range"),
    "library": ("libraries={'torch': '!=abc.*'}", "'abc' is not a version"),
    "number": ("libraries={3: '>=1'}", "its libraries must map"),
    "nameless": ("libraries={'': '>=1'}", "its libraries must map"),
    "mapping": ("operators=__import__('collections').UserDict()", "its operators must map"),
}

#: The same for one implementation.
NONSENSICAL = {
    "phases": ("rungs=(Rung('a', phases=None),)", "must have a tuple of phases"),
    "text": ("rungs=(Rung('a', min_tokens='0'),)", "whole numbers of tokens"),
    "values": ("limits=(Limit('dtype', values=3),)", "the values must be texts and numbers"),
    "object": ("limits=(one_of('dtype', 'bfloat16', object()),)", "the values must be texts and numbers"),
    "absolute": ("files=('/etc/passwd',)", "is no pattern inside the package"),
    "empty": ("files=('',)", "is no pattern inside the package"),
    "buckets": ("buckets={'tokens': 5}", "to a tuple of sizes"),
}


def test_nonsense_in_a_manifest_costs_what_says_it(environment: Any) -> None:
    """Whatever its fields hold, planning goes on without the backend, or without the implementation."""
    for name, (manifest, _) in NONSENSE.items():
        environment.install(name, manifest=manifest)
    for name, (impl, _) in NONSENSICAL.items():
        environment.install(name, operators=("rms_norm",), impl=impl)
    environment.install("zeta", operators=("rms_norm",))
    got = environment.run("""
        p = made()
        print(json.dumps([verdicts(p), {v.backend: v.reason for v in p.faults}, servers(p)["rms_norm"]]))
    """)
    for name, (_, reason) in NONSENSE.items():
        assert got[0][f"m3hal-{name}:{name}"][0] == "manifest"
        assert reason in got[0][f"m3hal-{name}:{name}"][1]
    for name, (_, reason) in NONSENSICAL.items():
        assert reason in got[1][name]
    assert got[2] == "zeta"


def test_what_vendors_print_stays_out_of_json(environment: Any) -> None:
    """A manifest, a probe and a predicate that print: ``--json`` is one object, and the text goes to stderr."""
    environment.install(
        "acme",
        manifest="probe='m3hal_acme.talking:probe', vendor=print('MANIFEST') or 'toy'",
        impl="predicate='m3hal_acme.talking:judge'",
        files={"talking.py": "def probe(device): print('PROBE')\ndef judge(site): print('JUDGE')\n"},
    )
    done = environment.python("-m", "m3hal", "explain", "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["fingerprint"]
    assert {"MANIFEST", "PROBE", "JUDGE"} <= set(done.stderr.splitlines())


def test_keyboard_interrupt_is_the_users(environment: Any) -> None:
    """Ctrl-C during a vendor's import stops the program; it is not a verdict."""
    environment.install("acme", files={"manifest.py": "raise KeyboardInterrupt"})
    done = environment.python("-c", "import m3hal; from m3hal.dispatch.discovery import discover; discover()")
    assert done.returncode != 0
    assert "KeyboardInterrupt" in done.stderr


def test_backend_api_range_is_checked_before_anything_runs(environment: Any) -> None:
    """A backend for another API is out, and its probe is never called."""
    probing = {"probing.py": "def probe(device):\n    open(__package__ + '.probed', 'w')\n"}
    for name, api in {"fits": ">=1,<2", "future": ">=2,<3", "past": "<1"}.items():
        environment.install(name, manifest=f"api={api!r}, probe='m3hal_{name}.probing:probe'", files=probing)
    got = environment.run("print(json.dumps(verdicts(made())))")
    assert got["m3hal-fits:fits"] == ["chosen", "its probe finds cpu usable"]
    assert got["m3hal-future:future"] == ["api", "it was written for backend API >=2,<3; this m3hal speaks 1.0"]
    assert got["m3hal-past:past"][0] == "api"
    assert [path.name for path in environment.folder.glob("*.probed")] == ["m3hal_fits.probed"]


def test_libraries_are_checked_by_version(environment: Any) -> None:
    """A missing or too old library is named with what is needed."""
    environment.install("fits", manifest="libraries={'stevedore': '>=1'}")
    environment.install("dated", manifest="libraries={'stevedore': '<1'}")
    environment.install("lacking", manifest="libraries={'acme-runtime': '>=3'}")
    got = environment.run("print(json.dumps(verdicts(made())))")
    assert got["m3hal-fits:fits"][0] == "chosen"
    assert got["m3hal-dated:dated"][0] == "library"
    assert got["m3hal-dated:dated"][1].startswith("it needs stevedore <1; ")
    assert got["m3hal-lacking:lacking"] == [
        "library",
        "it needs acme-runtime >=3, which is not installed; pip install 'acme-runtime>=3'",
    ]


#: What a probe or a predicate does instead of saying yes -> what is said about it.
REFUSING = {
    "refuses": ("return 'the driver is too old'", "the driver is too old"),
    "raises": ("raise KeyError('driver')", "raised KeyError: 'driver'"),
    "asserts": ("assert False", "raised AssertionError"),
    "exits": ("raise SystemExit(1)", "raised SystemExit: 1"),
    "affirms": ("return True", "returned True; it must return None or the reason for refusing"),
}


def test_probes_that_refuse_or_break_are_verdicts(environment: Any) -> None:
    """A probe's words, or what it did, become the reason."""
    for name, (body, _) in REFUSING.items():
        probing = {"probing.py": f"def probe(device):\n    {body}\n"}
        environment.install(name, manifest=f"probe='m3hal_{name}.probing:probe'", files=probing)
    environment.install("dateless", manifest="libraries={'undated': '>=1'}")
    info = environment.folder / "undated-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: undated\nVersion: unknown\n")
    environment.install("absent", manifest="probe='m3hal_absent.nowhere:probe'")
    got = environment.run("print(json.dumps(verdicts(made())))")
    for name, (_, reason) in REFUSING.items():
        assert got[f"m3hal-{name}:{name}"][0] == "probe"
        assert reason in got[f"m3hal-{name}:{name}"][1]
    assert "ModuleNotFoundError" in got["m3hal-absent:absent"][1]
    assert "its version is 'unknown', which can't be compared" in got["m3hal-dateless:dateless"][1]


def test_probe_that_lies_is_found_out_at_bind_and_nothing_falls_back(environment: Any) -> None:
    """It says usable, then the kernel's import fails: the error names backend and operator."""
    environment.install(
        "acme",
        manifest="probe='m3hal_acme.probing:probe'",
        files={
            "probing.py": "def probe(device): return None",
            "kernels.py": "raise ImportError('libacme.so: no such file')",
        },
    )
    got = environment.run("""
        p = made()
        try:
            p.bind("rms_norm", "moe")
        except M3halError as error:
            print(json.dumps([servers(p)["rms_norm"], str(error)]))
    """)
    assert got[0] == "acme"
    assert "backend 'acme' (m3hal-acme 1.0) can't bind rms_norm at moe" in got[1]
    assert "libacme.so: no such file" in got[1]
    assert "Nothing falls back" in got[1]


def test_predicates_that_refuse_or_break_are_verdicts(environment: Any) -> None:
    """They cost their implementation, at the site in question; the reference serves there."""
    for name, (body, _) in REFUSING.items():
        judge = f"def judge(site):\n    if site.kind != 'moe':\n        return None\n    {body}\n"
        environment.install(name, impl=f"predicate='m3hal_{name}.judge:judge'", files={"judge.py": judge})
    got = environment.run("""
        rows = {row.site: row for row in made().rows("rms_norm")}
        moe = {verdict.backend: [verdict.stage, verdict.reason] for verdict in rows["moe"].verdicts}
        print(json.dumps([rows["moe"].server, rows["dense_mlp"].server, moe]))
    """)
    assert got[:2] == ["reference", "affirms"]
    for name, (_, reason) in REFUSING.items():
        assert got[2][name][0] == "predicate"
        assert reason in got[2][name][1]


def test_lies_cost_the_implementation_that_tells_them(environment: Any) -> None:
    """Unknown operator, trait, limit, path, a missing tuple: each is named, and the other entries serve."""
    environment.install(
        "acme",
        operators=("rms_norm",),
        files={
            "manifest.py": """
                from m3hal.dispatch.manifest import *
                def at(name, **more):
                    return Impl("m3hal_acme.kernels:" + name, **more)
                class Odd:
                    def __repr__(self):
                        raise RuntimeError("no words")
                MANIFEST = Manifest(
                    name="acme", vendor="toy", api=">=1", devices=("*",),
                    operators={
                        "rms_norm": (at("rms_norm"),),
                        "kv_read": (at("kv_read", layouts=("hnd",), alignment=Odd()),),
                        "kv_copy_blocks": (at("kv_copy_blocks", layouts=("hnd",), zero_tokens=Odd()),),
                        "rmsnorm": (at("rms_norm"),),
                        "topk_blocks": (at("topk_blocks", traits={"topk_keybits": "32"}),),
                        "merge_topk": (at("merge_topk", traits={"topk_key_bits": "31"}),),
                        "route_topk": (at("route_topk", limits=(at_most("experts", 8),)),),
                        "swiglu_oai": (Impl("m3hal_acme.kernel:swiglu_oai"),),
                        "kv_write": (at("kv_write"),),
                        "moe_experts": at("moe_experts"),
                        "add_rms_norm": (Impl("m3hal_acme/kernels.py"),),
                        "quantize": (at("quantize", limits=at_most("eps", 1)),),
                        "dequantize": (at("dequantize", rungs=(Rung("a", phases=("warmup",)),)),),
                        "rope_partial": ("m3hal_acme.kernels:rope_partial",),
                    })
            """
        },
    )
    got = environment.run("p = made(); print(json.dumps([servers(p), {v.operator: v.reason for v in p.faults}]))")
    served, faults = got
    assert served["rms_norm"] == "acme"
    assert set(served.values()) == {"acme", "reference", "composed", "engine: vllm"}
    assert "Did you mean 'rms_norm'" in faults["rms_norm"]
    assert "Did you mean 'topk_key_bits'" in faults["topk_blocks"]
    assert "the vocabulary is 32, 29, 16" in faults["merge_topk"]
    assert "no attribute of a Site" in faults["route_topk"]
    assert "has no module m3hal_acme.kernel" in faults["swiglu_oai"]
    assert "must declare the layouts" in faults["kv_write"]
    assert "must be a tuple of Impl" in faults["moe_experts"]
    assert "must read 'module:factory'" in faults["add_rms_norm"]
    assert "must be tuples" in faults["quantize"]
    assert "names the phase 'warmup'" in faults["dequantize"]
    assert "it is a str, not a m3hal.Impl" in faults["rope_partial"]
    assert "looking at its entry raised RuntimeError: no words" in faults["kv_read"]
    assert "its zero_tokens is a Odd; it must be True or False" in faults["kv_copy_blocks"]


def test_unreadable_metadata_of_a_stranger(environment: Any) -> None:
    """A package with a broken entry_points.txt takes nobody down; doctor names it."""
    environment.install("acme")
    info = environment.folder / "stranger-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[console_scripts]\nthis is no entry point\n")
    assert environment.run("print(json.dumps(servers(made())['rms_norm']))") == "acme"
    done = environment.python("-m", "m3hal", "doctor")
    assert done.returncode == 1
    assert "stranger" in done.stdout
    assert "unreadable entry_points.txt" in done.stdout
