"""Backends installed as distributions, planned in interpreters of their own."""

from __future__ import annotations

from typing import Any

from m3hal import ops


def test_priority_decides_under_auto(environment: Any) -> None:
    """The higher priority serves; the reference fills what neither implements."""
    environment.install("acme", operators=("rms_norm", "topk_blocks"), manifest="priority=200")
    environment.install("zeta", operators=("rms_norm", "route_topk"), manifest="priority=150")
    served = environment.run("print(json.dumps(servers(made())))")
    assert served["rms_norm"] == "acme"
    assert served["route_topk"] == "zeta"
    assert served["moe_experts"] == "reference"


def test_negative_priority_serves_only_when_named(environment: Any) -> None:
    """Installing an example changes nothing until someone asks for it."""
    environment.install("acme", operators=("rms_norm",), manifest="priority=-1")
    got = environment.run(
        "print(json.dumps([servers(made())['rms_norm'], servers(made({'backend': 'acme,reference'}))['rms_norm']]))"
    )
    assert got == ["reference", "acme"]
    reasons = environment.run("print(json.dumps([str(v) for v in made().choice('rms_norm', 'moe').verdicts]))")
    assert "acme: rejected at policy: its priority is negative: it serves only when asked for by name" in reasons


def test_override_disables_the_fused_forms_that_cover_it(environment: Any) -> None:
    """Overriding rms_norm composes qk_norm_rope_insert around it, leaves select_blocks fused, and explain says so."""
    environment.install("acme", operators=ops.NAMES)
    environment.install("zeta", operators=("rms_norm",))
    got = environment.run("""
        p = made({"backend": "acme", "operators": {"rms_norm": "zeta"}})
        print(json.dumps({
            "servers": servers(p),
            "rms_norm": p.bind("rms_norm", "moe").run(),
            "select_blocks": p.bind("select_blocks", "sparse_attention").run(),
            "explain": p.explain("qk_norm_rope_insert"),
        }))
    """)
    assert got["servers"]["qk_norm_rope_insert"] == "composed"
    assert got["servers"]["select_blocks"] == "acme"
    assert got["rms_norm"] == "m3hal_zeta.rms_norm"
    assert got["select_blocks"] == "m3hal_acme.select_blocks"
    assert "rejected at policy: the policy overrides rms_norm, which it covers" in got["explain"]


def test_named_backend_must_cover_everything(environment: Any) -> None:
    """A partial backend asked for by name is an error with every reason and the way out, never a silent mixture."""
    environment.install("acme", operators=("rms_norm", "topk_blocks"), impl='limits=(one_of("dtype", "float32"),)')
    kind, text = environment.run("print(json.dumps(refusal({'backend': 'acme'})))")
    assert kind == "M3halError"
    assert "dtype is 'bfloat16'; it takes 'float32'" in text
    assert "rms_norm at dense_attention, sparse_attention, dense_mlp, moe" in text
    assert "acme doesn't implement add_rms_norm" in text
    assert "moe_experts" in text
    assert "ask for 'acme,reference'" in text
    assert "linear" not in text, "the engine holds it"


def test_list_permits_exactly_its_fallbacks(environment: Any) -> None:
    """``acme,reference`` lets the reference fill the gaps; a third backend that could is not even looked at."""
    environment.install("acme", operators=("rms_norm", "topk_blocks"))
    environment.install("zeta", manifest="priority=900")
    got = environment.run("""
        p = made({"backend": "acme,reference"})
        print(json.dumps([servers(p), [m for m in sys.modules if "zeta" in m]]))
    """)
    assert set(got[0].values()) == {"acme", "reference", "composed", "engine: vllm"}
    assert got[0]["topk_blocks"] == "acme"
    assert got[1] == []


def test_order_of_a_list_beats_priority(environment: Any) -> None:
    """The first name that implements an operator serves it."""
    environment.install("acme", manifest="priority=1")
    environment.install("zeta", manifest="priority=900")
    assert environment.run("print(json.dumps(servers(made({'backend': 'acme,zeta'}))))")["rms_norm"] == "acme"
    assert environment.run("print(json.dumps(servers(made({'backend': 'zeta,acme'}))))")["rms_norm"] == "zeta"


def test_partial_backend_is_welcome_one_operator_at_a_time(environment: Any) -> None:
    """Conformance plans what there is; an absent operator is left unserved with its verdict."""
    environment.install("acme", operators=("rms_norm",))
    got = environment.run("""
        whole = made({"backend": "acme"}, partial=True)
        one = made({"backend": "acme"}, operators=["rms_norm"])
        planned = sorted({row.operator for row in one.choices})
        print(json.dumps([servers(whole)["topk_blocks"], planned, one.bind("rms_norm", "moe").run()]))
    """)
    assert got == ["nothing", ["rms_norm"], "m3hal_acme.rms_norm"]


def test_name_claimed_by_two_distributions_is_nobodys(environment: Any) -> None:
    """Both are rejected and both named; naming the distribution resolves it, and imports only that one."""
    environment.install("acme", distribution="first-acme")
    environment.install("acme", distribution="second-acme", version="2.0")
    kind, text = environment.run("print(json.dumps(refusal({'backend': 'acme'})))")
    assert kind == "UnsupportedError"
    assert "first-acme 1.0" in text
    assert "second-acme 2.0" in text
    got = environment.run("""
        p = made({"backend": "second-acme:acme"})
        print(json.dumps([p.bind("rms_norm", "moe").run(), verdicts(p), [m for m in sys.modules if "first_acme" in m]]))
    """)
    assert got[0] == "second_acme.rms_norm"
    assert got[1]["first-acme:acme"][0] == "policy"
    assert got[2] == []
    under_auto = environment.run("print(json.dumps(verdicts(made())))")
    assert under_auto["first-acme:acme"][0] == under_auto["second-acme:acme"][0] == "discover"


def test_override_may_name_the_distribution_under_auto(environment: Any) -> None:
    """A pin in an override settles a doubled name for the whole plan."""
    environment.install("acme", distribution="first-acme")
    environment.install("acme", distribution="second-acme")
    got = environment.run("""
        p = made({"operators": {"rms_norm": "first-acme:acme"}})
        print(json.dumps([p.bind("rms_norm", "moe").run(), verdicts(p)["second-acme:acme"]]))
    """)
    assert got == ["first_acme.rms_norm", ["policy", "the policy names first-acme:acme"]]


def test_nobody_else_can_be_the_reference(environment: Any) -> None:
    """A distribution that claims 'reference' is rejected; m3hal's own keeps serving."""
    environment.install("reference", distribution="impostor")
    got = environment.run(
        "p = made(); print(json.dumps([servers(p)['rms_norm'], verdicts(p)['impostor:reference'][0], "
        "p.rows('rms_norm')[0].chosen.distribution]))"
    )
    assert got == ["reference", "discover", "m3hal"]


def test_what_is_not_selected_is_never_imported(environment: Any) -> None:
    """Not the manifest of a backend that isn't named, not the kernels of a named one before bind, not torch."""
    environment.install("acme")
    environment.install("zeta")
    got = environment.run("""
        def seen():
            return sorted(m for m in sys.modules if m.split(".")[0] in ("m3hal_acme", "m3hal_zeta", "torch"))
        p = made({"backend": "acme"})
        p.table(), p.explain(), p.fingerprint, p.to_json()
        before = seen()
        p.bind("rms_norm", "moe")
        print(json.dumps([before, seen()]))
    """)
    assert got[0] == ["m3hal_acme", "m3hal_acme.manifest"]
    assert got[1] == ["m3hal_acme", "m3hal_acme.kernels", "m3hal_acme.manifest"]


def test_denied_backend_is_not_imported(environment: Any) -> None:
    """Deny works by name, before any import, and says where it came from."""
    environment.install("acme", files={"manifest.py": "raise SystemExit"})
    got = environment.run(
        "p = made(); print(json.dumps([verdicts(p)['m3hal-acme:acme'], 'm3hal_acme' in sys.modules]))",
        M3HAL_DENY="acme",
    )
    assert got == [["policy", "deny 'acme' (from M3HAL_DENY)"], False]


def test_plan_for_a_device_that_this_machine_lacks(environment: Any) -> None:
    """It is not probed, its libraries are assumed, limits and traits still speak."""
    environment.install(
        "acme",
        manifest="devices=('hip:gfx95*',), libraries={'aiter': '>=9'}, probe='m3hal_acme.nowhere:probe'",
        impl="limits=(at_most('max_tokens', 512),) if name == 'rms_norm' else ()",
    )
    got = environment.run("""
        p = made({"backend": "acme,reference"}, device="hip:gfx950")
        reason = p.rows("rms_norm")[0].verdicts[0].reason
        print(json.dumps([verdicts(p)["m3hal-acme:acme"], servers(p), p.present, p.table(), reason]))
    """)
    verdict, served, present, table, reason = got
    assert verdict == ["chosen", "this machine has no hip:gfx950: not probed; aiter >=9 assumed"]
    assert served["topk_blocks"] == "acme"
    assert served["rms_norm"] == "reference"
    assert reason == "max_tokens is 1024; it takes 512 or less"
    assert not present
    assert "libraries assumed, nothing probed" in table


def test_auto_leaves_an_accelerator_to_the_in_tree_model(environment: Any) -> None:
    """Neither the reference nor what no claim proves serves an accelerator unasked; the plan says why."""
    environment.install("acme", operators=ops.NAMES, manifest="devices=('cuda:sm_100',)")
    got = environment.run("""
        p = made(device="cuda:sm_100")
        ids = {row.verdicts[0].impl: row for row in p.choices if row.verdicts}
        from m3hal.dispatch.discovery import discover
        from m3hal.dispatch.screen import candidates
        from m3hal import ops
        acme = next(found for found in discover() if found.name == "acme")
        good, _ = candidates(acme, {name: ops.load(name) for name in ops.NAMES}, {})
        proved = {candidate.impl_id: "hardware" for candidate in good}
        q = made(device="cuda:sm_100", levels=proved)
        r = made({"min_level": "compiled"}, device="cuda:sm_100", levels={name: "emulated" for name in proved})
        try:
            p.bind("rms_norm", "moe")
        except M3halError as error:
            print(json.dumps([p.in_tree, p.reason, str(error), q.in_tree, servers(q), r.in_tree]))
    """)
    assert got[0] is True
    assert "acme is refused" in got[1]
    assert "'declared'; the policy asks for 'hardware'" in got[1]
    assert "vLLM's in-tree model serves this plan" in got[2]
    assert got[3] is False
    assert set(got[4].values()) == {"acme", "engine: vllm"}
    assert got[5] is False


def test_stale_caches_and_homes_do_not_matter(environment: Any) -> None:
    """Discovery reads the metadata itself: an unwritable HOME and a truncated stevedore cache change nothing."""
    cache = environment.folder / "cache" / "python-entrypoints"
    cache.mkdir(parents=True)
    (cache / "truncated").write_text("{")
    environment.install("acme")
    script = "print(json.dumps(servers(made())['rms_norm']))"
    assert environment.run(script, HOME="/proc/nowhere", XDG_CACHE_HOME=str(environment.folder / "cache")) == "acme"
    environment.install("zeta", manifest="priority=900")
    assert environment.run(script, XDG_CACHE_HOME=str(environment.folder / "cache")) == "zeta"
    assert sorted(path.name for path in cache.iterdir()) == ["truncated"]


def test_configuration_carriers_in_their_order(environment: Any) -> None:
    """API, engine, file, environment; explain tells the origin of each value and what it hides."""
    file = environment.folder / "m3hal.toml"
    file.write_text('backend = "acme"\nmin_level = "compiled"\n[operators]\nrms_norm = "reference"\n')
    environment.install("acme", operators=("rms_norm",))
    got = environment.run(
        """
        policy = Policy.resolve(api={"require": []}, engine={"backend": "acme,reference"})
        print(json.dumps({key: str(origin) for key, origin in policy.origins.items()}))
        """,
        M3HAL_CONFIG=str(file),
        M3HAL_BACKEND="zeta",
        M3HAL_OPERATORS="rms_norm=acme;topk_blocks=reference",
    )
    assert got["backend"] == (
        "'acme,reference' (from the engine's additional_config['m3hal'], "
        f"over 'acme' from the file {file} (M3HAL_CONFIG), over 'zeta' from M3HAL_BACKEND)"
    )
    assert got["min_level"].startswith("'compiled' (from the file")
    assert got["operators.rms_norm"].startswith("'reference' (from the file")
    assert got["operators.topk_blocks"] == "'reference' (from M3HAL_OPERATORS)"


def test_two_processes_make_the_same_plan(environment: Any) -> None:
    """The fingerprint is a function of what is installed and asked; the engine's is compared, and a difference told."""
    environment.install("acme", operators=ops.NAMES)
    first = environment.run("print(json.dumps(made().fingerprint))")
    assert environment.run("print(json.dumps(made().fingerprint))") == first
    assert environment.run(f"print(json.dumps(made({{'fingerprint': {first!r}}}).fingerprint))") == first
    kernels = environment.folder / "m3hal_acme" / "kernels.py"
    kernels.write_text(kernels.read_text() + "# changed\n")
    kind, text = environment.run(f"print(json.dumps(refusal({{'fingerprint': {first!r}}})))")
    assert kind == "M3halError"
    assert first in text


def test_pinned_plan_comes_out_again_or_says_what_differs(environment: Any) -> None:
    """A better backend that arrives later doesn't change a pinned plan; a changed kernel does."""
    environment.install("acme", manifest="priority=50")
    environment.run("p = made(); open('plan.json', 'w').write(json.dumps(p.to_json())); print(1)")
    environment.install("zeta", manifest="priority=900")
    got = environment.run(
        "print(json.dumps([servers(made())['rms_norm'], servers(made({'plan': 'plan.json'}))['rms_norm']]))"
    )
    assert got == ["zeta", "acme"]
    kernels = environment.folder / "m3hal_acme" / "kernels.py"
    kernels.write_text(kernels.read_text() + "# changed\n")
    kind, text = environment.run("print(json.dumps(refusal({'plan': 'plan.json'})))")
    assert kind == "M3halError"
    assert "rms_norm at dense_attention, sparse_attention, dense_mlp, moe was acme rms_norm, is nothing; " in text
    assert "\n" not in text
    kind, text = environment.run("print(json.dumps(refusal({'plan': 'plan.json', 'backend': 'acme'})))")
    assert kind == "ConfigurationError"
    assert "remove 'backend'" in text


def test_pin_that_leaves_the_in_tree_model_is_checked_too(environment: Any) -> None:
    """A plan edited by hand to say ``in_tree`` doesn't escape the comparison."""
    environment.install("acme")
    got = environment.run("""
        first = made(device="cuda:sm_100", present=False)
        def pinned(data):
            open("plan.json", "w").write(json.dumps(data))
            return refusal({"plan": "plan.json"}, device="cuda:sm_100", present=False)
        edited = {**first.to_json(), "fingerprint": "0" * 16}
        print(json.dumps([first.in_tree, pinned(first.to_json()), pinned(edited)]))
    """)
    assert got[0] is True
    assert got[1] == ["", ""]
    assert got[2][0] == "M3halError"
    assert "can't be made here" in got[2][1]


def test_pin_edited_out_of_shape_is_no_plan(environment: Any) -> None:
    """Rows, layouts and nesting that no exported plan has are a sentence, not a traceback."""
    got = environment.run("""
        good = made().to_json()
        def pinned(text):
            open("plan.json", "w").write(text)
            return refusal({"plan": "plan.json"})
        broken = [{"choices": "abc"}, {"choices": [{}]}, {"layouts": {"moe": {}}}, {"layouts": 3}, {"policy": [1]}]
        texts = [json.dumps({**good, "fingerprint": "0", **change}) for change in broken]
        print(json.dumps([pinned(text) for text in (*texts, "[" * 100000)]))
    """)
    for kind, text in got:
        assert kind == "ConfigurationError"
        assert "plan.json is no exported plan" in text
