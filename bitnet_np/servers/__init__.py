"""Inference servers on the network: requests for completions with log-probabilities, and answers that are checked before use.

endpoint.py finds out which API a server speaks; llama_server.py, sglang.py and openai.py speak it; completions.py is the record that all
return; words.py is what names say of types. No server is trusted: answers are limited in time and size (client.py), and every value's type
is checked (completions.py).
"""
