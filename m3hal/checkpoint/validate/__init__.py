"""Whether a converted checkpoint says what its source says; nothing here is shared with the converter."""

from m3hal.checkpoint.validate.checks import validate
from m3hal.checkpoint.validate.faults import Fault, Kind, Verdict
from m3hal.checkpoint.validate.selftest import self_test

__all__ = ["Fault", "Kind", "Verdict", "self_test", "validate"]
