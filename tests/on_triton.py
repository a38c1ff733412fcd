"""Which codecs compute on Triton's kernels, for the tests that loop over them. Import it only where Triton is."""

from __future__ import annotations

from hack_kernels.triton.backend import TritonBackend

from hackkv.codec import KvCodec
from hackkv.codecs import CODECS, make_codec
from hackkv.config import CodecConfig
from hackkv.types import KvShape
from tests.meta import META
from tests.pair import PI


def codec_on(backend: TritonBackend, name: str) -> KvCodec:
    """For the tiny model."""
    return make_codec(CodecConfig(name=name, settings={"page_tokens": PI}), KvShape(2, 2, 64), backend)


def served() -> list[str]:
    """Names of the codecs for whose pages the backend has kernels."""
    backend = TritonBackend(META)
    return [name for name in sorted(CODECS) if codec_on(backend, name).served_by == backend.name]
