"""The layers of the decoder, one idea per file: each says its shapes, and the checks hold it to them."""
