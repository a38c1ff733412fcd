"""The codecs that compute on Triton's kernels, and the key by which Triton compiles a launch. Needs Triton."""

from __future__ import annotations

from hack_kernels.triton.backend import TritonBackend
from hack_kernels.triton.launch import Launch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from hackkv.codec import KvCodec
from hackkv.codecs import CODECS, make_codec
from hackkv.config import CodecConfig
from hackkv.types import KvShape
from tests.meta import META
from tests.pair import PI


def codec_on(backend: TritonBackend, name: str) -> KvCodec:
    """The codec `name` for the shape of the tiny model."""
    return make_codec(CodecConfig(name=name, settings={"page_tokens": PI}), KvShape(2, 2, 64), backend)


def served() -> list[str]:
    """Names of the codecs for whose pages the backend has kernels."""
    backend = TritonBackend(META)
    return [name for name in sorted(CODECS) if codec_on(backend, name).served_by == backend.name]


def compiled_for(launch: Launch) -> object:
    """The key for which Triton compiles a kernel: compile-time values, options, types, whether memory is aligned to 16
    bytes, and whether an integer is 1, divisible by 16, or larger than 31 bits."""
    given = getattr(launch.kernel, "kwargs", None) or vars(launch.kernel)  # interpreted, or compiled
    free = given.get("do_not_specialize") or ()
    unaligned = given.get("do_not_specialize_on_alignment") or ()

    def known(name: str, value: object) -> object:
        if isinstance(value, TensorDescriptor):
            return known(name, value.base), tuple(value.block_shape)
        if isinstance(value, Tensor):
            at = value.storage_offset() * value.itemsize if value.is_meta else value.data_ptr()
            return value.dtype, at % 16 == 0
        if name.isupper() or not isinstance(value, int):
            return value
        wide = not -(2**31) <= value < 2**31
        return wide if name in free else (wide, value == 1, name not in unaligned and value % 16 == 0)

    arguments = tuple((name, known(name, value)) for name, value in launch.arguments.items())
    return launch.kernel, arguments, tuple(launch.options.items())
