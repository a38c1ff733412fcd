"""gRPC method paths of `kv.proto`; a test holds them against its descriptor."""

from __future__ import annotations

PREFILL_SERVE = "/hackkv.v1.Prefill/Serve"
PREFILL_ASSIGN = "/hackkv.v1.Prefill/Assign"
PREFILL_DESCRIBE = "/hackkv.v1.Prefill/Describe"
DECODE_SERVE = "/hackkv.v1.Decode/Serve"
DECODE_DESCRIBE = "/hackkv.v1.Decode/Describe"
REGISTRY_REGISTER = "/hackkv.v1.Registry/Register"
KV_PUSH = "/hackkv.v1.KvReceiver/Push"
KV_CONNECT = "/hackkv.v1.KvReceiver/Connect"
KV_FETCH = "/hackkv.v1.KvReceiver/Fetch"

ALL = (
    PREFILL_SERVE,
    PREFILL_ASSIGN,
    PREFILL_DESCRIBE,
    DECODE_SERVE,
    DECODE_DESCRIBE,
    REGISTRY_REGISTER,
    KV_PUSH,
    KV_CONNECT,
    KV_FETCH,
)
