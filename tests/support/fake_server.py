"""A server on the loopback that answers what a test says, right or wrong."""

import json
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import numpy as np
from completions import completions_by, llama_answer, sglang_answer, vllm_answer

PROPS = {"default_generation_settings": {"n_ctx": 512}, "total_slots": 1}
SGLANG_INFO = {"model_path": "tiny", "tokenizer_path": "tiny", "is_generation": True, "preferred_sampling_params": None}
MODELS = {"object": "list", "data": [{"id": "tiny", "object": "model"}]}


@contextmanager
def serving(answers, port=0):
    """Yields the address of a server, and the requests that it got: (method, path, body).

    answers: path -> a JSON value, bytes that are the body, (status, value, headers), or a function of the request's body that returns one
    of them; a function with the attribute `raw` gets the handler and writes everything. Other paths are not found.
    """
    requests = []

    class Handler(BaseHTTPRequestHandler):
        def answer(self):
            size = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(size)) if size else None
            requests.append((self.command, self.path, body))
            answer = answers.get(self.path, (404, {"error": {"message": "File Not Found"}}, {}))
            if getattr(answer, "raw", False):
                answer(self)
                return
            answer = answer(body) if callable(answer) else answer
            status, value, headers = answer if isinstance(answer, tuple) else (200, answer, {})
            content = value if isinstance(value, bytes) else json.dumps(value).encode()
            self.send_response(status)
            for name, text in {"Content-Length": str(len(content)), **headers}.items():
                self.send_header(name, text)
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = answer

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    server.handle_error = lambda request, address: None  # a client that hangs up is what some tests are about
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", requests
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def raw(write):
    """A function that writes the whole answer to the handler itself."""
    write.raw = True
    return write


def llama_server(logits_of, tokenize=None, change=lambda answer: answer):
    """The answers of a llama-server with this engine. tokenize: text -> ids; change: what it sends instead of its answer."""

    def complete(body):
        made = completions_by(logits_of, body["prompt"], body["n_predict"], body["n_probs"])
        return change(llama_answer(made))

    routes = {"/props": PROPS, "/completion": complete}
    return routes | ({} if tokenize is None else {"/tokenize": lambda body: {"tokens": tokenize(body["content"])}})


def vllm(logits_of, tokenize=None, change=lambda answer: answer):
    """The answers of vLLM with this engine."""

    def complete(body):
        first = 0 if "prompt_logprobs" in body else None
        return change(vllm_answer(completions_by(logits_of, body["prompt"], body["max_tokens"], body["logprobs"], first=first)))

    routes = {"/v1/models": MODELS, "/v1/completions": complete}
    return routes | ({} if tokenize is None else {"/tokenize": lambda body: {"tokens": tokenize(body["prompt"])}})


def sglang(logits_of):
    """The answers of SGLang with this engine."""

    def complete(body):
        predict = body["sampling_params"]["max_new_tokens"]
        return sglang_answer(
            completions_by(logits_of, body["input_ids"], predict, body["top_logprobs_num"], first=body["logprob_start_len"])
        )

    return {"/get_model_info": SGLANG_INFO, "/generate": complete, "/v1/models": MODELS}


def table_logits(vocab=40, seed=0):
    """An engine without a model: the logits after a token are a row of a table."""
    table = np.random.default_rng(seed).normal(0, 2, (vocab, vocab)).astype(np.float32)
    return lambda ids: table[ids]
