"""Inference servers on the network: requests for completions with log-probabilities, and answers that are checked before use.

endpoint.py finds out which API a server speaks; llama_server.py, sglang.py and openai.py speak it; completions.py is the record that all
return. client.py and fields.py trust no server: answers are limited in time and size, and every value's type is checked.
"""
