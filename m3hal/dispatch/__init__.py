"""From installed package to running kernel: discover, screen, plan, bind."""

from m3hal.dispatch.bind import Bound
from m3hal.dispatch.discovery import refresh, register, unregister
from m3hal.dispatch.errors import ConfigurationError, M3halError, UnsupportedError
from m3hal.dispatch.manifest import (
    API_VERSION,
    Impl,
    Kernel,
    Limit,
    Manifest,
    Rung,
    Symbol,
    at_least,
    at_most,
    multiple_of,
    one_of,
)
from m3hal.dispatch.names import LEVELS
from m3hal.dispatch.planner import VLLM_HOLDS, plan
from m3hal.dispatch.plans import Choice, Plan
from m3hal.dispatch.policy import Policy
from m3hal.dispatch.verdict import STAGES, Verdict

__all__ = [
    "API_VERSION",
    "LEVELS",
    "STAGES",
    "VLLM_HOLDS",
    "Bound",
    "Choice",
    "ConfigurationError",
    "Impl",
    "Kernel",
    "Limit",
    "M3halError",
    "Manifest",
    "Plan",
    "Policy",
    "Rung",
    "Symbol",
    "UnsupportedError",
    "Verdict",
    "at_least",
    "at_most",
    "multiple_of",
    "one_of",
    "plan",
    "refresh",
    "register",
    "unregister",
]
