"""GPT-2's byte alphabet: one printable character for each of the 256 bytes.

Vocabulary files are text, tokens are bytes. So the files spell a byte that is already a visible Latin-1 character as
itself and every other one (control characters, blank, 7f to a0, ad) as the next free character from U+0100 on. The
blank, byte 20, is the 33rd of those: U+0120, the Ġ of every byte-level vocabulary.

Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.2 and its published code.
"""


def _byte_characters() -> list[str]:
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return [chr(byte) if byte in visible else chr(0x100 + hidden.index(byte)) for byte in range(256)]


BYTE_TO_CHAR = _byte_characters()
CHAR_TO_BYTE = {char: byte for byte, char in enumerate(BYTE_TO_CHAR)}


def spell_bytes(data: bytes) -> str:
    r"""Write bytes in the alphabet.

    >>> spell_bytes(" on\n".encode())
    'ĠonĊ'
    >>> spell_bytes("é".encode())  # two bytes, c3 and a9, both visible in Latin-1
    'Ã©'
    """
    return "".join(BYTE_TO_CHAR[byte] for byte in data)


def unspell_bytes(spelling: str) -> bytes:
    r"""Read bytes back from the alphabet.

    A spelling that holds a character from outside the alphabet was never a spelled token: it stands for itself, as a
    whole, in UTF-8. A surrogate escape in it stands for the byte that was not UTF-8 in the file.

    Raises UnicodeEncodeError for any other surrogate.

    >>> unspell_bytes("Ġon")
    b' on'
    >>> unspell_bytes("é"), unspell_bytes("é ")  # a blank is outside the alphabet
    (b'\xe9', b'\xc3\xa9 ')
    """
    try:
        return bytes([CHAR_TO_BYTE[char] for char in spelling])
    except KeyError:
        return spelling.encode("utf-8", "surrogateescape")
