"""One answer, token by token: milliseconds a token of inlay, of stock transformers and of llama.cpp."""
