"""Texts on which the tests train and try tokenizers."""

CORPUS = [
    "The quick brown fox doesn't jump; it's 12345 years old, they'll say. I'M sure WE'VE seen it.",
    "def f(x):\n    return x ** 2  # 0123456789\n\n\tprint(f'{x:>10}')\r\n",
    "Größe, naïve, ŝipo, привет мир, 你好世界, नमस्ते, 🙂🙃👩‍👩‍👧, ١٢٣٤٥",
    "   many    spaces \n \n\n and\ttabs...!!! ??? <<>> $$$ end",
] * 3
