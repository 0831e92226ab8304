"""What stands in a JPEG file before its pixels, segment by segment."""

from __future__ import annotations

from collections.abc import Iterator

START, END = b"\xff\xd8", b"\xff\xd9"
_BASELINE, _APP1, _APP14, _SCAN = 0xC0, 0xE1, 0xEE, 0xDA
_IN_FULL = 0x11  # a colour that has a value for each pixel, or for each pixel of the coarsest colour
_LUMA = {0x11, 0x21, 0x12, 0x22}  # 4:4:4, 4:2:2, 4:4:0 and 4:2:0
_EXIF, _ADOBE, _YCBCR = b"Exif\0\0", b"Adobe", 1


def segments(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield marker and content of each segment, up to the one where the pixels begin.

    Raises ValueError where no segment begins in a place where one must.
    """
    at, marker = len(START), 0
    while marker != _SCAN:
        if data[at : at + 1] != b"\xff" or at + 4 > len(data):
            raise ValueError("it has no segment where one must be")
        marker, end = data[at + 1], at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        yield marker, data[at + 4 : end]
        at = end


def has_exif(data: bytes) -> bool:
    """Return whether the file has a segment that may say how the image is to be turned. Raises ValueError."""
    return any(marker == _APP1 and content.startswith(_EXIF) for marker, content in segments(data))


def is_plain(data: bytes) -> bool:
    """Return whether each decoder of JPEG must know this kind: baseline, 8 bits, grey or YCbCr, all in one scan.

    That is what hardware decodes. Colours of other kinds and rare ways to thin them out, which some decoders read
    wrongly, are none of it.
    """
    colours = b""  # of a baseline image
    try:
        for marker, content in segments(data):
            if marker == _APP14 and content.startswith(_ADOBE) and content[11] != _YCBCR:
                return False
            if marker == _BASELINE:
                if content[0] != 8:
                    return False
                colours = content[6 : 6 + 3 * content[5]]
            if marker == _SCAN and content[0] != len(colours) // 3:
                return False
    except (ValueError, IndexError):
        return False
    names, thinning = colours[0::3], [*colours[1::3]]
    if len(names) == 1:
        return thinning == [_IN_FULL]
    return len(names) == 3 and names != b"RGB" and thinning[0] in _LUMA and thinning[1:] == [_IN_FULL, _IN_FULL]
