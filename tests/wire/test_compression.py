"""Compression pays or is left out, and a small payload can never become a large one."""

import gzip
import random
import threading
import tracemalloc

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from tasuki.core.protocol import CODECS
from tasuki.errors import ProtocolError, TasukiError, TooLarge
from tasuki.wire.compression import COMPRESS_FROM_BYTES, GZIP, ZSTD, compress, decompress
from tasuki.wire.messages import BATCH

FLAG = {"zstd": ZSTD, "gzip": GZIP}
PLAIN = b"the sash goes on; " * 1000
LIMIT = 64 * 1024
codecs = pytest.mark.parametrize("codec", CODECS)


def streamed_zstd(plain: bytes) -> bytes:
    """Return a frame of an encoder that does not know the size beforehand."""
    packer = zstandard.ZstdCompressor(level=1).compressobj()
    return packer.compress(plain) + packer.flush()


PACKED = {
    "zstd": zstandard.ZstdCompressor(level=1).compress(PLAIN),
    "gzip": gzip.compress(PLAIN),
    "streamed": streamed_zstd(PLAIN),
}
each_form = pytest.mark.parametrize(("form", "flag"), [("zstd", ZSTD), ("streamed", ZSTD), ("gzip", GZIP)])


# --- when to compress


@codecs
@given(plain=st.binary(max_size=300), times=st.integers(1, 200))
def test_what_was_compressed_comes_back(codec: str, plain: bytes, times: int) -> None:
    payload, flags = compress(plain * times, codec)

    assert decompress(payload, flags, LIMIT) == plain * times
    assert len(payload) <= len(plain * times)


@codecs
def test_a_payload_that_gets_smaller_is_compressed(codec: str) -> None:
    payload, flags = compress(PLAIN, codec)

    assert flags == FLAG[codec]
    assert len(payload) < len(PLAIN) / 10


@codecs
def test_a_payload_that_does_not_get_smaller_goes_as_it_is(codec: str) -> None:
    noise = random.Random(1).randbytes(COMPRESS_FROM_BYTES * 4)

    assert compress(noise, codec) == (noise, 0)


@codecs
def test_a_small_payload_goes_as_it_is(codec: str) -> None:
    small = b"a" * (COMPRESS_FROM_BYTES - 1)

    assert compress(small, codec) == (small, 0)
    assert compress(small + b"a", codec)[1] == FLAG[codec]


def test_without_a_codec_nothing_is_compressed() -> None:
    assert compress(PLAIN, None) == (PLAIN, 0)


@codecs
def test_several_threads_may_compress_at_once(codec: str) -> None:
    texts = [bytes([number]) * 200_000 for number in range(4)]
    wrong: list[int] = []

    def work(text: bytes) -> None:
        for _ in range(50):
            payload, flags = compress(text, codec)
            if decompress(payload, flags, len(text)) != text:
                wrong.append(text[0])

    threads = [threading.Thread(target=work, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert not wrong


# --- what comes in


@each_form
def test_a_payload_of_exactly_the_limit_is_taken(form: str, flag: int) -> None:
    assert decompress(PACKED[form], flag | BATCH, len(PLAIN)) == PLAIN


@each_form
def test_one_byte_over_the_limit_is_too_large(form: str, flag: int) -> None:
    with pytest.raises(TooLarge, match=f"grows past the limit of {len(PLAIN) - 1} bytes"):
        decompress(PACKED[form], flag, len(PLAIN) - 1)


@each_form
def test_a_bomb_is_refused_without_its_memory(form: str, flag: int) -> None:
    bomb_bytes = 64 * 1024 * 1024
    pack = {"zstd": zstandard.ZstdCompressor(level=1).compress, "gzip": gzip.compress, "streamed": streamed_zstd}[form]
    bomb = pack(bytes(bomb_bytes))
    tracemalloc.start()
    try:
        with pytest.raises(TooLarge):
            decompress(bomb, flag, LIMIT)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak_bytes < 4 * LIMIT


@each_form
@pytest.mark.parametrize("missing", [1, 5, 12])
def test_cut_off_data_is_refused(form: str, flag: int, missing: int) -> None:
    with pytest.raises(ProtocolError):
        decompress(PACKED[form][:-missing], flag, LIMIT)


@pytest.mark.parametrize("flag", [ZSTD, GZIP])
@pytest.mark.parametrize("payload", [b"", b"x", b"no compressed data at all"])
def test_what_is_not_compressed_data_is_refused(flag: int, payload: bytes) -> None:
    with pytest.raises(ProtocolError):
        decompress(payload, flag, LIMIT)


def test_a_payload_cannot_be_both() -> None:
    with pytest.raises(ProtocolError, match="both zstd and gzip"):
        decompress(PACKED["zstd"], ZSTD | GZIP, LIMIT)


def test_a_peer_cannot_ask_for_a_huge_window() -> None:
    wide = zstandard.ZstdCompressionParameters.from_level(1, window_log=27)
    packer = zstandard.ZstdCompressor(compression_params=wide).compressobj()
    payload = packer.compress(PLAIN) + packer.flush()

    with pytest.raises(ProtocolError, match="cannot be read"):
        decompress(payload, ZSTD, LIMIT)


@given(st.sampled_from([ZSTD, GZIP]), st.binary(max_size=200))
def test_random_bytes_raise_nothing_but_our_errors(flag: int, payload: bytes) -> None:
    try:
        plain = decompress(payload, flag, 1000)
    except TasukiError:
        return
    assert len(plain) <= 1000


@each_form
@given(place=st.integers(0, 10_000), value=st.integers(0, 255))
def test_a_changed_byte_raises_nothing_but_our_errors(form: str, flag: int, place: int, value: int) -> None:
    payload = bytearray(PACKED[form])
    payload[place % len(payload)] = value
    try:
        plain = decompress(bytes(payload), flag, LIMIT)
    except TasukiError:
        return
    assert len(plain) <= LIMIT
