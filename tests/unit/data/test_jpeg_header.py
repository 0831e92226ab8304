"""What is read of JPEG files before their pixels."""

from __future__ import annotations

import pytest
from PIL import Image

from hvd_train.data import jpeg_header
from tests.support.jpegs import encoded, noise


def with_exif() -> bytes:
    """Return a file with an Exif segment."""
    exif = Image.Exif()
    exif[0x0112] = 1
    return encoded(noise(20, 10), exif=exif)


def test_segments_end_where_the_pixels_begin() -> None:
    """All segments are there, up to that of the scan; a file without one ends in an error, not in a loop."""
    data = encoded(noise(40, 30))
    markers = [marker for marker, _ in jpeg_header.segments(data)]
    assert (markers[0], markers[-1], markers.count(0xC0)) == (0xE0, 0xDA, 1)
    for cut in (0, 3, 20, 100):
        with pytest.raises(ValueError, match="no segment"):
            list(jpeg_header.segments(data[:cut] + b"\0\0\0\0"))


def test_an_exif_segment_is_found() -> None:
    """Only such a segment may say that an image is to be turned."""
    assert jpeg_header.has_exif(with_exif())
    assert not jpeg_header.has_exif(encoded(noise(20, 10)))


PLAIN = {
    "4:2:0": encoded(noise(40, 30), subsampling=2),
    "4:2:2": encoded(noise(40, 30), subsampling=1),
    "4:4:4": encoded(noise(40, 30), subsampling=0),
    "grey": encoded(noise(40, 30, "L")),
    "restarts": encoded(noise(40, 30), restart_marker_blocks=2),
    "Exif": with_exif(),
    "a profile of colours": encoded(noise(40, 30), icc_profile=bytes(70_000)),
}
BASELINE = PLAIN["4:2:0"].index(b"\xff\xc0")


def changed(at: int, value: int) -> bytes:
    """Return the plain file with another byte in the segment that describes the image."""
    data = bytearray(PLAIN["4:2:0"])
    data[BASELINE + at] = value
    return bytes(data)


OTHER = {
    "progressive": encoded(noise(40, 30), progressive=True),
    "four colours": encoded(noise(40, 30, "CMYK")),
    "red, green and blue": encoded(noise(40, 30), keep_rgb=True),
    "red, green and blue by name only": encoded(noise(40, 30), keep_rgb=True).replace(b"\xff\xee", b"\xff\xe5"),
    "red, green and blue by Adobe's word only": PLAIN["4:2:0"].replace(
        b"\xff\xdb", b"\xff\xee\0\x0eAdobe\0\x64\0\0\0\0\0\xff\xdb", 1
    ),
    "12 bits": changed(4, 12),
    "arithmetic coding": changed(1, 0xC9),
    "4:1:0": changed(11, 0x42),
    "thinned out otherwise": changed(14, 0x12),
    "two colours": changed(9, 2),
    "a scan for each colour": PLAIN["4:2:0"].replace(b"\xff\xda\0\x0c\x03", b"\xff\xda\0\x0c\x01"),
    "no scan": PLAIN["4:2:0"][:BASELINE],
    "no image": PLAIN["4:2:0"].replace(b"\xff\xc0", b"\xff\xe5"),
    "nothing": b"\xff\xd8",
}


@pytest.mark.parametrize("kind", PLAIN)
def test_files_of_cameras_and_of_the_web_are_plain(kind: str) -> None:
    """What nearly all files are is for every decoder."""
    assert jpeg_header.is_plain(PLAIN[kind])


@pytest.mark.parametrize("kind", OTHER)
def test_rare_kinds_are_not_plain(kind: str) -> None:
    """What some decoders refuse, or read with other colours, is for none but our own."""
    assert not jpeg_header.is_plain(OTHER[kind])
