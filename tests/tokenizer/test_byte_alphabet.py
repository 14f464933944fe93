from hypothesis import given
from hypothesis import strategies as st
from tokenizers.pre_tokenizers import ByteLevel

from tinyllm.tokenizer.byte_alphabet import BYTE_TO_CHAR, spell_bytes, unspell_bytes


def test_same_characters_as_the_tokenizers_library():
    assert sorted(BYTE_TO_CHAR) == sorted(ByteLevel.alphabet())


def test_known_spellings():
    assert spell_bytes(bytes([0x00, 0x0A, 0x20, 0x21, 0x7F, 0xA0, 0xAD, 0xFF])) == "ĀĊĠ!ġłŃÿ"


@given(st.binary())
def test_every_byte_string_comes_back(data: bytes):
    assert unspell_bytes(spell_bytes(data)) == data


def test_a_token_that_is_no_spelling_stands_for_itself():
    assert unspell_bytes("\n") == b"\n"
    assert unspell_bytes("\u203c") == "\u203c".encode()
    assert unspell_bytes("Ġ\n") == "Ġ\n".encode()
    assert unspell_bytes("a\udcff") == b"a\xff"
