from .FusedRMSNorm import FusedRMSNorm as FusedRMSNorm
